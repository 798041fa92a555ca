"""The life of a request, from the router's decision to one answer or one clear error.

The whole life runs in one scope with one deadline. A node or link that fails ends an attempt, and another one takes up
where it ended (:mod:`prfaas_net.gateway.ladder`). Whatever else ends it early (the deadline, a client that left, a
gateway that stops) ends the scope, and the scope's end closes the node calls; since an open call owns its work, nothing
is left behind on any node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prfaas_net.errors import BusyError, DeadlineError, LinkError, PrfaasError
from prfaas_net.gateway.ladder import WaitingRoom
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.run import Run, Services, ServingRequest
from prfaas_net.scheduling import RequestEnded, Role

__all__ = ["Lifecycle"]


class Lifecycle:
    """Serves requests over the fleet."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._runs: set[Run] = set()
        self._room = WaitingRoom()

    @asynccontextmanager
    async def serve(self, request: ServingRequest, record: RequestRecord) -> AsyncIterator[Run]:
        """The scope of one request; on entry the decode node has reserved and the prefill has begun.

        Raises:
            DeadlineError: ``request.deadline_at`` passed, inside the body as well.
            PrfaasError: the request failed, as :meth:`Run.next` or any stage before it says.
        """
        run = Run(request, self.services, record, self._room)
        record.prompt_tokens = len(request.token_ids)
        self._runs.add(run)
        try:
            async with asyncio.timeout_at(request.deadline_at) as scope:
                run.enter(scope)
                try:
                    await run.start()
                    yield run
                finally:
                    await run.close()
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self._ended_early(run) from error
        except PrfaasError as error:
            error.ids.setdefault("request", request.request_id)
            raise
        finally:
            self._runs.discard(run)
            self.services.observe(RequestEnded(request.request_id))

    def abort_all(self) -> None:
        """End every request: the gateway stops."""
        for run in list(self._runs):
            run.abort(BusyError("the gateway is stopping", do="send the request to another gateway, or later"))

    def abort_node(self, node_id: str) -> None:
        """A node restarted and lost its requests: they go on elsewhere."""
        for run in list(self._runs):
            run.lost(node_id, LinkError("a node restarted and lost the request", do="send it again", node=node_id))

    def abandon_node(self, node_id: str) -> None:
        """A node has fallen silent: its requests go on elsewhere, if there is an elsewhere.

        Where there is none, they keep what they have: the node may only have been held up.
        """
        role, state = self.services.fleet.role_of(node_id), self.services.router.state
        others = [] if role is None else [*state.up(role)]
        if role is Role.PREFILL:
            others += [node for nodes in state.alone().values() for node in nodes]
        if any(node.node_id != node_id for node in others):
            for run in list(self._runs):
                run.lost(node_id, LinkError("a node no longer answers", do="see whether it runs", node=node_id))

    def _ended_early(self, run: Run) -> PrfaasError:
        """Why the scope of a run ended: its failure, or else its deadline, which may have come for want of room."""
        failure = run.failure or run.no_room
        if failure is not None:
            failure.ids.setdefault("request", run.request.request_id)
            return failure
        stages = list(run.record.stages_s)
        return DeadlineError(
            "the request's deadline passed",
            expected="an end before the deadline",
            found=f"last stage reached: {stages[-1] if stages else 'none'}",
            do="allow more time or ask for fewer tokens",
            request=run.request.request_id,
        )
