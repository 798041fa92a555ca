"""What both kinds of node share: the control port, its authentication, and answers as streams of JSON lines."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from prfaas_net.config import is_loopback
from prfaas_net.errors import (
    AuthError,
    BusyError,
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequest,
    PrfaasError,
    ResourceError,
    error_from_wire,
)
from prfaas_net.logs import about
from prfaas_net.metrics import CONTENT_TYPE, Metrics
from prfaas_net.nodes.auth import check_control_token
from prfaas_net.nodes.callers import expect_life
from prfaas_net.nodes.http_site import listen
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.tracing.context import HEADER
from prfaas_net.tracing.stages import call_span, trace_names
from prfaas_net.tracing.tracer import Tracer

__all__ = ["ControlServer", "Emit", "Job", "parse_call"]

log = logging.getLogger(__name__)

Emit = Callable[[dict[str, Any]], None]
Job = Callable[[Emit], Awaitable[None]]
_Call = TypeVar("_Call", bound=BaseModel)

# Probes and metrics say nothing of requests, and probers have no key.
OPEN_PATHS = ("/health", "/ready", "/live", "/metrics")
# Gateways ask their nodes every second, by default.
NOTICE_S = 1.5
# What whoever was refused for want of room is asked to wait.
RETRY_AFTER_S = 1
# A 128K-token prompt is about 1 MB of JSON.
MAX_CALL_BYTES = 256 << 20
# That one of those takes over 100 Mbit/s, and as much again.
CALL_WITHIN_S = 40.0


async def parse_call(model: type[_Call], request: web.Request) -> _Call:
    """The body of a control call.

    Raises:
        InvalidRequest: it is not what the call expects; names the field.
        DeadlineError: it took too long to arrive.
    """
    try:
        async with asyncio.timeout(CALL_WITHIN_S):
            raw = await request.read()
        return model.model_validate(orjson.loads(raw))
    except TimeoutError as error:
        raise DeadlineError("the body took too long to arrive", expected=f"within {CALL_WITHIN_S:g} s") from error
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("the body is not JSON", found=str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise InvalidRequest(f"{place}: {first['msg']}", found=repr(first.get("input"))[:80]) from error


def _not_a_call(status: int, line: str) -> web.Response:
    """For what is not even a request."""
    return web.Response(
        status=status, body=orjson.dumps(InvalidRequest(line).to_wire()), content_type="application/json"
    )


class ControlServer:
    """The control port of a node.

    Args:
        info: answers ``GET /v1/node``.
        node_key: what callers must prove to hold; None only on loopback.

    Attributes:
        draining: no new calls are taken; ``/health`` says so.
        tracer: makes spans of calls that belong to a trace, where there is one.
    """

    def __init__(self, info: Callable[[], NodeInfo], metrics: Metrics, *, node_key: str | None) -> None:
        self.address: tuple[str, int] = ("", 0)
        self.draining = False
        self.tracer: Tracer | None = None
        self._asked = False
        self._info = info
        self._metrics = metrics
        self._node_key = node_key
        self._jobs: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self.app = web.Application(client_max_size=MAX_CALL_BYTES, middlewares=[self._guard])
        self.app.router.add_get("/v1/node", self._node)
        for path in ("/health", "/ready"):
            self.app.router.add_get(path, self._health)
        self.app.router.add_get("/live", self._live)
        self.app.router.add_get("/metrics", self._render_metrics)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        """
        Args:
            tls: HTTPS is served with it.

        Raises:
            ConfigError: the address is taken or not ours, or is open to others without a key.
        """
        if self._node_key is None and not is_loopback(host):
            raise ConfigError(
                f"will not listen on {host} without authentication",
                expected="a loopback address, or a node key",
                do="set node_key on the nodes and the gateways",
            )
        # Closing the response is how a caller cancels, so a handler must be told of it.
        self._runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await listen(self._runner, host, port, refusal=_not_a_call, tls=tls)
        except ConfigError:
            await self._runner.cleanup()
            raise
        self.address = self._runner.addresses[0][:2]

    async def drain(self, within_s: float) -> None:
        """Refuse new calls, and wait until those that run have ended, for so long at most.

        A node that gateways ask stays for a moment even if nothing runs: until they have heard of it, it is better to
        refuse their calls than not to be there.
        """
        self.draining = True
        if self._asked:
            await asyncio.sleep(min(within_s, NOTICE_S))
        if self._jobs:
            log.info("draining: %d calls have %g s to end", len(self._jobs), within_s)
            _, left = await asyncio.wait(tuple(self._jobs), timeout=within_s)
            log.log(logging.WARNING if left else logging.INFO, "drained: %d calls are left", len(left))

    async def close(self) -> None:
        """Stop listening; cancel what runs and wait until it has let go of everything."""
        jobs = tuple(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- calls --------------------------------------------------------------------------------------------------

    async def run(
        self, request: web.Request, job: Job, *, deadline_s: float, request_id: str | None = None
    ) -> web.StreamResponse:
        """Run ``job`` and answer with the events it emits. The open response owns the job.

        The job runs in a task of its own: when the caller leaves, it is cancelled and finishes its cleaning up
        however long that takes, while this handler is gone.

        Raises:
            BusyError: no new calls are taken.
        """
        if self.draining:
            raise BusyError("the node takes no new calls: it is about to leave", do="ask another node")
        expect_life(request.transport)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        with about(**({} if request_id is None else {"request_id": request_id})):
            task = asyncio.create_task(self._guarded(self._traced(request, job), events, deadline_s))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            first = await events.get()
            if first is not None and first.get("event") == "error":
                return self._refuse(first["error"])
            await response.prepare(request)
            while first is not None:
                await response.write(orjson.dumps(first) + b"\n")
                first = await events.get()
            await response.write_eof()
        except ConnectionResetError:
            pass  # the caller left; so does the job
        finally:
            task.cancel()
        return response

    def _traced(self, request: web.Request, job: Job) -> Job:
        """The job, as a span of the trace that the caller named, if it is to be traced."""
        tracer = self.tracer
        if tracer is None:
            return job

        async def traced(emit: Emit) -> None:
            name = request.path.removeprefix("/v1/").replace("/", "_") + "_node"
            node = {"prfaas.node": self._info().node_id}
            with call_span(tracer, name, request.headers.get(HEADER), **node), about(**trace_names()):
                await job(emit)

        return traced

    @staticmethod
    async def _guarded(job: Job, events: asyncio.Queue[dict[str, Any] | None], deadline_s: float) -> None:
        """Whatever happens to the job, its caller is told, and told that it is over."""
        try:
            async with asyncio.timeout(deadline_s):
                await job(events.put_nowait)
        except asyncio.CancelledError:
            log.info("a call was given up by its caller")
            raise
        except PrfaasError as error:
            log.log(
                logging.INFO if isinstance(error, ResourceError) else logging.WARNING, "a call failed: %s", error.line()
            )
            events.put_nowait({"event": "error", "error": error.to_wire()})
        except TimeoutError:
            overdue = DeadlineError(f"the call's time of {deadline_s:.1f} s is up")
            log.info("a call failed: %s", overdue.line())
            events.put_nowait({"event": "error", "error": overdue.to_wire()})
        except Exception as error:
            log.exception("a call failed for a reason that is none of its own")
            bug = InternalError("the node failed", found=f"{type(error).__name__}: {error}")
            events.put_nowait({"event": "error", "error": bug.to_wire()})
        finally:
            events.put_nowait(None)

    @staticmethod
    def _refuse(body: dict[str, Any], status: int | None = None) -> web.Response:
        error = error_from_wire(body)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, BusyError) else {}
        return web.Response(
            status=status or error.http_status,
            body=orjson.dumps(body),
            headers=headers,
            content_type="application/json",
        )

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        closed = self._node_key is not None and request.path not in OPEN_PATHS
        if closed and not check_control_token(request.headers.get("Authorization"), self._node_key or ""):
            error = AuthError("the caller could not prove that it holds the node key", do="set node_key on both")
            return self._refuse(error.to_wire(), 401)
        try:
            return await handler(request)
        except PrfaasError as error:
            return self._refuse(error.to_wire())

    async def _node(self, request: web.Request) -> web.Response:
        self._asked = True
        info = self._info().model_copy(update={"draining": self.draining})
        return web.Response(body=info.model_dump_json(), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        if self.draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _render_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
