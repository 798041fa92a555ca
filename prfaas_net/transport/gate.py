"""Where receivers dial in: for a sender that cannot dial them, behind a NAT, a proxy or a firewall.

The data flows against the direction of the dialling; everything else is the same. A receiver that dialled once comes
back by itself when the link dies, and the sender's transfers wait for it within ``options.resume_window_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.congestion.verdict import Verdict
from prfaas_net.errors import IncompatibleError, LinkError, PrfaasError
from prfaas_net.transport.accepting import Accepting
from prfaas_net.transport.connections import SendingConnections
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.link_base import LinkBase
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.security import Security
from prfaas_net.transport.streams import Stream
from prfaas_net.wire import MAX_LANES, Hello, PeerIdentity, Timers

__all__ = ["AcceptedLink", "SenderGate"]


class AcceptedLink(LinkBase):
    """A link that its receiver dialled, and dials again when it has died."""

    def __init__(self, peer: PeerIdentity, *, options: LinkOptions, timers: Timers, clock: Clock) -> None:
        super().__init__(options=options, timers=timers, clock=clock)
        self._came_back = asyncio.Event()
        self._now = self._next = self._make_connections(peer)
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._sample())]
        self.telemetry.start()

    @property
    def latest(self) -> SendingConnections:
        """The session that its receiver dialled last."""
        return self._next

    def begin_again(self, peer: PeerIdentity) -> None:
        """The receiver has dialled once more; it knows better than we whether the last session is dead."""
        self._next = self._make_connections(peer)
        self._came_back.set()
        self._now.driver.lost(LinkError("the receiver has dialled again"))
        self._changed.set()  # also if the last one died, and was given up, long ago

    async def _keep(self) -> None:
        """Hand the orphans of a dead session to the next one, if it comes in time."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            old = self._now
            if old.session.error is None:
                # A session that has just begun has no data connections yet.
                if old.had_lanes and not old.lanes:
                    old.lost_every_lane(None)
                continue
            try:
                async with asyncio.timeout(self.options.resume_window_s):
                    await self._wait_for_next(old)
            except TimeoutError:
                self._give_up(old, old.session.error)

    async def _wait_for_next(self, old: SendingConnections) -> None:
        while True:
            await self._came_back.wait()
            self._came_back.clear()
            if self._adopt(old, self._next):
                return


class SenderGate:
    """Accepts receivers; each becomes a link.

    Args:
        on_verdict: as for a pool.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        security: Security | None = None,
        options: LinkOptions | None = None,
        timers: Timers | None = None,
        clock: Clock | None = None,
        on_verdict: Callable[[LinkBase, Verdict], None] | None = None,
    ) -> None:
        self._on_verdict = on_verdict
        self._options = options or LinkOptions()
        self._timers = timers or Timers()
        self._clock = clock or SystemClock()
        self._links: dict[str, AcceptedLink] = {}
        self._sessions: dict[str, SendingConnections] = {}
        self._arrived = asyncio.Event()
        self._accepting = Accepting(
            identity, security or Security(), self._options, role="receiver", on_ready=self._join
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._accepting.address

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken or not ours, or is open to others without authentication.
        """
        await self._accepting.start(host, port)

    async def close(self) -> None:
        """Stop listening and end every link."""
        await self._accepting.close()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    @property
    def links(self) -> tuple[AcceptedLink, ...]:
        """Links that are up."""
        return tuple(link for link in self._links.values() if link.alive)

    def link(self, boot_id: str) -> AcceptedLink | None:
        """The link that a receiver of this boot has dialled, if it is up."""
        link = self._links.get(boot_id)
        return link if link is not None and link.alive else None

    async def wait_for(self, boot_id: str, *, within_s: float) -> AcceptedLink:
        """The same, waiting for the receiver to dial.

        Raises:
            LinkError: it did not in time.
        """
        try:
            async with asyncio.timeout(within_s):
                while (link := self.link(boot_id)) is None:
                    self._arrived.clear()
                    await self._arrived.wait()
                return link
        except TimeoutError as error:
            raise LinkError(
                "the receiver has not dialled", found=f"waited {within_s:g} s", do="point its kv.dial at this gate"
            ) from error

    async def _join(self, hello: Hello, stream: Stream) -> None:
        if hello.lane == 0:
            await self._begin(hello, stream)
            return
        made = self._sessions.get(hello.session)
        if made is None or hello.lane in made.lanes or len(made.lanes) >= MAX_LANES:
            raise LinkError("a data connection without its session, or one too many", found=f"lane {hello.lane}")
        made.add_lane(hello.lane, stream)
        self._arrived.set()

    async def _forget_dead(self, comes_back: str) -> None:
        """Receivers that have restarted never come back under the boot id that they had."""
        for boot_id, link in tuple(self._links.items()):
            if boot_id != comes_back and not link.alive and not link.progress():
                del self._links[boot_id]
                await link.close()

    async def _begin(self, hello: Hello, stream: Stream) -> None:
        if hello.session in self._sessions:
            raise IncompatibleError("the session has a control connection already")
        await self._forget_dead(hello.boot_id)
        features = frozenset(hello.features) if self._options.encode else frozenset()
        peer = PeerIdentity(hello.node, hello.boot_id, features)
        link = self._links.get(hello.boot_id)
        if link is None:
            link = AcceptedLink(peer, options=self._options, timers=self._timers, clock=self._clock)
            link.tell_verdicts_to(self._on_verdict)
            self._links[hello.boot_id] = link
        else:
            link.begin_again(peer)
        made = link.latest
        self._sessions = {name: known for name, known in self._sessions.items() if known.session.error is None}
        self._sessions[hello.session] = made
        try:
            await made.attach(stream)
        except PrfaasError:
            made.end_lanes()
            raise
