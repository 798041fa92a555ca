"""A link: all connections from one sender to one receiver, kept up for as long as it is used.

::

    link = await SenderLink.connect(ticket.endpoints, identity=..., security=..., options=...)
    outgoing = link.open(ticket, table, views, lifetime_s=30)
    outgoing.ready(0) ...            # from any thread, as chunks become final
    outgoing.seal({"first_token": 17})
    stats = await outgoing.wait()    # every byte has landed and was verified, or this raises

A data connection that dies is replaced while the others go on. When all of them die the link dials again and its
transfers go on from what has landed, within ``options.resume_window_s``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from prfaas_net.aio import see_through
from prfaas_net.clock import Clock, SystemClock
from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.kv.codecs import Codec
from prfaas_net.transport.connections import SendingConnections
from prfaas_net.transport.handshaking import dial
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.link_base import LinkBase
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.security import Security
from prfaas_net.transport.tuning import StreamTuner
from prfaas_net.wire import Hello, Timers

__all__ = ["SenderLink"]

Endpoint = tuple[str, int]
# Between two attempts to dial: doubles from the first to the last.
BACKOFF_S = (0.05, 1.0)
# What the threads of connections that are not wanted after all are given to end.
JOIN_S = 1.0


class SenderLink(LinkBase):
    """Made by :meth:`connect`. One control connection, ``options.connections`` data connections."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        identity: Identity,
        security: Security,
        options: LinkOptions,
        timers: Timers,
        clock: Clock,
    ) -> None:
        super().__init__(options=options, timers=timers, clock=clock)
        self.endpoints = endpoints
        self._identity = identity
        self._security = security
        if options.max_connections is not None:
            self._tuner = StreamTuner(start=options.connections, highest=options.max_connections)
        self._sampling: asyncio.Task[None]
        self._session_id = ""
        self._last_lane = 0
        self._endpoint: Endpoint = ("", 0)

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[Endpoint],
        *,
        identity: Identity,
        security: Security | None = None,
        options: LinkOptions | None = None,
        timers: Timers | None = None,
        clock: Clock | None = None,
    ) -> SenderLink:
        """Dial the first endpoint that answers.

        Raises:
            PrfaasError: none did; the error of the last one, which names it.
        """
        link = cls(
            endpoints,
            identity=identity,
            security=security or Security(),
            options=options or LinkOptions(),
            timers=timers or Timers(),
            clock=clock or SystemClock(),
        )
        link._now = await link._dial_session()
        link._sampling = asyncio.create_task(link._sample())
        link.telemetry.start()
        link._tasks = [asyncio.create_task(link._keep()), link._sampling]
        return link

    # -- dialling -----------------------------------------------------------------------------------------------

    def _hello(self, lane: int) -> Hello:
        features = tuple(codec.feature for codec in Codec) if self.options.encode else ()
        nonce = secrets.token_hex(16)
        return Hello(self._session_id, lane, self._identity.node, self._identity.boot_id, nonce, features)

    async def _dial_session(self) -> SendingConnections:
        """Control and all lanes, to the first endpoint that answers."""
        error: PrfaasError = LinkError("a ticket without endpoints")
        for endpoint in self.endpoints:
            try:
                return await self._dial_endpoint(endpoint)
            except PrfaasError as caught:
                error = caught
        raise error

    async def _dial_endpoint(self, endpoint: Endpoint) -> SendingConnections:
        self._session_id = secrets.token_hex(16)
        control, peer = await dial(endpoint, self._hello(0), self._security, self.options)
        numbers = range(1, 1 + self.wanted_connections)
        dials = [asyncio.ensure_future(dial(endpoint, self._hello(n), self._security, self.options)) for n in numbers]
        try:
            dialled = await asyncio.gather(*dials, return_exceptions=True)
        except asyncio.CancelledError:
            control.sock.close()
            for done in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(done, tuple):
                    done[0].sock.close()
            raise
        streams = [result[0] for result in dialled if isinstance(result, tuple)]
        failures = [result for result in dialled if isinstance(result, BaseException)]
        if failures:
            for stream in (control, *streams):
                stream.sock.close()
            raise failures[0]
        self._endpoint = endpoint
        self._last_lane = numbers[-1]
        made = self._make_connections(peer)
        for number, stream in zip(numbers, streams, strict=True):
            made.add_lane(number, stream)
        try:
            await made.attach(control)
        except BaseException:
            # Nobody else knows of these connections yet, so nobody else would close them.
            control.sock.close()
            await see_through(made.join_lanes(JOIN_S))
            raise
        return made

    async def _add_lane(self) -> None:
        current = self._now
        self._last_lane += 1
        number = self._last_lane
        stream, _ = await dial(self._endpoint, self._hello(number), self._security, self.options)
        if current is self._now and current.session.error is None:
            current.add_lane(number, stream)
        else:
            stream.sock.close()

    # -- keeping it up ------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Replace lanes that end; come back when the session has died under its transfers. Without any it stays dead,
        and nothing of the link goes on."""
        while self._now.session.error is None or self._now.session.orphans:
            await self._changed.wait()
            self._changed.clear()
            if self._now.session.error is None:
                await self._replace_lanes()
            elif self._now.session.orphans:
                await self._come_back()
        self._sampling.cancel()
        self.telemetry.end()

    async def _replace_lanes(self) -> None:
        backoff_s, last_s = BACKOFF_S
        while self._now.session.error is None and self._now.open_lanes < self.wanted_connections:
            try:
                await self._add_lane()
            except PrfaasError as error:
                if not self.connections:
                    self._now.lost_every_lane(error)
                    return
                await asyncio.sleep(backoff_s)
                backoff_s = min(last_s, 2 * backoff_s)

    async def _come_back(self) -> None:
        """Dial again and take the orphans along, within the window."""
        old = self._now
        error: PrfaasError = old.session.error or LinkError("the link died")
        give_up_at = self._clock.now() + self.options.resume_window_s
        backoff_s, last_s = BACKOFF_S
        while self._open_orphans(old) and (left_s := give_up_at - self._clock.now()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    new = await self._dial_session()
            except TimeoutError:
                break
            except LinkError as caught:
                error = caught
                await asyncio.sleep(min(backoff_s, max(0.0, give_up_at - self._clock.now())))
                backoff_s = min(last_s, 2 * backoff_s)
                continue
            except PrfaasError as caught:
                error = caught
                break
            if new.peer.boot_id == old.peer.boot_id:
                if self._adopt(old, new):
                    return
                continue
            await new.close("the receiver has restarted", timeout_s=1.0)
            error = LinkError("the receiver has restarted, and its tickets are void", do="reserve again")
            break
        self._give_up(old, error)
