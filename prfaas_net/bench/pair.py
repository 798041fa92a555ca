"""Two ends and a link between them, led from here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from prfaas_net.bench.certificates import make_certificates
from prfaas_net.bench.figures import Case, Sample
from prfaas_net.bench.processes import Child
from prfaas_net.errors import CorruptionError
from prfaas_net.units import GiB

__all__ = ["Pair", "Place"]

ENDS = "prfaas_net.bench.ends"
# Only who knows it may listen beyond loopback; the bench's namespaces are closed anyway.
KEY = "a key for the bench alone"


@dataclass(frozen=True)
class Place:
    """Where the two ends run: on loopback, or each in a network namespace."""

    host: str = "127.0.0.1"
    device: str = "lo"
    receiver_prefix: Sequence[str] = ()
    sender_prefix: Sequence[str] = ()


class Pair:
    """A receiving and a sending process. Each run makes a link of its own, as iperf3 makes its connections.

    Attributes:
        congestion_control: of the data connections of the latest link.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place()
        self._directory = tempfile.TemporaryDirectory(prefix="prfaas-bench-")
        self._tls = False
        self.congestion_control: str | None = None
        self.receiver = Child(ENDS, "receive", prefix=self.place.receiver_prefix)
        try:
            self.sender = Child(ENDS, "send", prefix=self.place.sender_prefix)
            self._endpoint = self.receiver.ask("listen", host=self.place.host, key=KEY)["endpoint"]
            self._tls_endpoint: Any = None
            if make_certificates(Path(self._directory.name)):
                answer = self.receiver.ask("listen", host=self.place.host, key=KEY, certificates=self._directory.name)
                self._tls_endpoint = answer["endpoint"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End both."""
        for child in (getattr(self, "sender", None), self.receiver):
            if child is not None:
                child.close()
        self._directory.cleanup()

    @property
    def has_tls(self) -> bool:
        """Whether certificates could be made."""
        return self._tls_endpoint is not None

    def connect(self, connections: int, *, tls: bool = False, **options: Any) -> None:
        """A fresh link."""
        self._tls = tls
        answer = self.sender.ask(
            "connect",
            endpoint=self._tls_endpoint if tls else self._endpoint,
            key=KEY,
            options={"connections": connections, **options},
            certificates=self._directory.name if tls else None,
        )
        self.congestion_control = answer["congestion_control"]

    def hang_up(self) -> None:
        """End the link."""
        self.sender.ask("hang_up")

    def send(self, total_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """One transfer on the link; both ends' figures.

        Raises:
            CorruptionError: what landed is not what was sent.
        """
        ticket = self._reserve(total_bytes, chunk_bytes)
        sent = self.sender.ask("send", ticket=ticket, chunk_bytes=chunk_bytes)
        return self._verified(ticket, total_bytes, sent)

    def prefill(self, total_bytes: int, chunk_bytes: int, prefill_s: float) -> dict[str, Any]:
        """One transfer whose chunks become ready over ``prefill_s``."""
        ticket = self._reserve(total_bytes, chunk_bytes)
        sent = self.sender.ask("prefill", ticket=ticket, chunk_bytes=chunk_bytes, prefill_s=prefill_s)
        return self._verified(ticket, total_bytes, sent)

    def _reserve(self, total_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        reserved = self.receiver.ask("reserve", total_bytes=total_bytes, chunk_bytes=chunk_bytes, tls=self._tls)
        ticket: dict[str, Any] = reserved["ticket"]
        return ticket

    def _verified(self, ticket: dict[str, Any], total_bytes: int, sent: dict[str, Any]) -> dict[str, Any]:
        landed = self.receiver.ask("landed", transfer=ticket["transfer_id"], total_bytes=total_bytes)
        if landed["digest"] != sent["digest"]:
            raise CorruptionError("what landed is not what was sent", expected=sent["digest"], found=landed["digest"])
        return {**sent, "landed_at_s": landed["at_s"], "receiver_cpu_s": landed["cpu_s"]}

    def run(self, case: Case, total_bytes: int, **options: Any) -> Sample:
        """One case, once, on a link of its own."""
        for child in (self.receiver, self.sender):
            child.ask("checksums", on=case.checksum)
        self.connect(case.connections, tls=case.tls, **options)
        try:
            run = self.send(total_bytes, case.chunk_bytes)
        finally:
            self.hang_up()
        gib = total_bytes / GiB
        return Sample(total_bytes * 8 / run["took_s"], run["cpu_s"] / gib, run["receiver_cpu_s"] / gib)
