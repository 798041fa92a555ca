"""An emulated path: two network namespaces and a userspace link, made for a bench and always taken away again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas_net.bench.namespaces import make_space, owned, remove_space, sweep, why_not
from prfaas_net.bench.pair import Place
from prfaas_net.bench.plan import Path
from prfaas_net.bench.processes import Child
from prfaas_net.bench.tunlink import DEVICE

__all__ = ["SENDER", "emulate", "why_not"]

SPACE = "prfaas-bench-"
SENDER, RECEIVER = "10.203.7.1", "10.203.7.2"
# A queue of one bandwidth-delay product, and never less than what a burst of 64 KiB packets needs.
MIN_QUEUE_BYTES = 1 << 19
# Several paths can stand at once; each has its own namespaces, and the same addresses in them.
_numbers = itertools.count()


def _settings(buffer_bytes: int | None) -> dict[str, str]:
    # Every run begins as if it were the first: the kernel must not remember the last one's window.
    settings = {"tcp_no_metrics_save": "1"}
    if buffer_bytes is not None:
        settings |= {"tcp_wmem": f"4096 65536 {buffer_bytes}", "tcp_rmem": f"4096 131072 {buffer_bytes}"}
    return settings


@contextmanager
def emulate(path: Path, *, buffer_bytes: int | None = None, queue_bytes: int | None = None) -> Iterator[Place]:
    """A place whose sender and receiver are at the two ends of the path.

    Args:
        buffer_bytes: maximum of the kernel's TCP buffers there; None leaves what this host has.
        queue_bytes: what may wait at the bottleneck; None is one bandwidth-delay product, if that is enough for bursts.

    Raises:
        ConfigError: this host does not allow it; see :func:`why_not`.
    """
    sweep(SPACE)
    number = next(_numbers)
    spaces = [f"{owned(SPACE)}{number}-{side}" for side in ("send", "recv")]
    queue_bytes = queue_bytes or max(MIN_QUEUE_BYTES, path.bdp_bytes)
    link: Child | None = None
    try:
        for space in spaces:
            make_space(space, _settings(buffer_bytes))
        link = Child(
            "prfaas_net.bench.tunlink", spaces[0], SENDER, spaces[1], RECEIVER,
            str(path.rate_bps), str(path.rtt_s / 2), str(path.loss), str(queue_bytes),
        )  # fmt: skip
        link.answer(timeout_s=20.0)
        yield Place(
            RECEIVER,
            device=DEVICE,
            receiver_prefix=("ip", "netns", "exec", spaces[1]),
            sender_prefix=("ip", "netns", "exec", spaces[0]),
        )
    finally:
        if link is not None:
            link.close()
        for space in spaces:
            remove_space(space)
