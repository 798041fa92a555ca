"""Completion requests: admitted, answered whole or as a stream, accounted for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.errors import BusyError, PrfaasError
from prfaas_net.gateway.answer import Answer, Piece
from prfaas_net.gateway.api_errors import ApiError, error_body, status_of
from prfaas_net.gateway.choices import Choices
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.instruments import GatewayMetrics
from prfaas_net.gateway.intake import Intake, Job
from prfaas_net.gateway.lifecycle import Lifecycle
from prfaas_net.gateway.middleware import client_id, client_key, internal_id, set_outcome
from prfaas_net.gateway.openai_api import Options
from prfaas_net.gateway.openai_shapes import DONE, Shape, sse, usage_after, usage_of
from prfaas_net.gateway.pings import Pings
from prfaas_net.gateway.record import RecentRecords, RequestRecord
from prfaas_net.gateway.run import Run
from prfaas_net.logs import about
from prfaas_net.nodes.engine_api import TextTokenizer
from prfaas_net.units import format_duration

__all__ = ["Serving"]

log = logging.getLogger(__name__)

# How long an explained answer waits, after its last token, for the report of its transfer.
REPORT_WAIT_S = 10.0
# How long a client may take to accept the last bytes of a stream once the request itself is over.
LAST_WORDS_S = 5.0
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Tells nginx not to collect tokens before passing them on.
    "X-Accel-Buffering": "no",
}


class Serving:
    """Answers completion requests, of both endpoints.

    Args:
        tokenizer: text to tokens and back, for the one model that is served.

    Attributes:
        on_end: told the record of every request that was decided on, once it is over.
        draining: new requests are refused.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: TextTokenizer,
        lifecycle: Lifecycle,
        instruments: GatewayMetrics,
    ) -> None:
        self.intake = Intake(config, tokenizer, lifecycle.services)
        self.records = RecentRecords()
        self.on_end: list[Callable[[RequestRecord], None]] = []
        self._config = config
        self._tokenizer = tokenizer
        self._lifecycle = lifecycle
        self._instruments = instruments
        self.draining = False
        self._in_flight = 0
        self._in_flight_of: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def reconfigure(self, config: GatewayConfig) -> None:
        """Another configuration, for requests that come from now on."""
        self._config = self.intake.config = config

    async def serve(self, request: web.Request, body: type[Options], shape: type[Shape]) -> web.StreamResponse:
        """The whole way of one request.

        Raises:
            PrfaasError: it failed before any of the answer was sent.
        """
        if self.draining:
            raise BusyError("the gateway takes no new requests: it is about to leave", do="ask another gateway")
        request_id = internal_id()
        with self._admitted(1), about(request_id=request_id):
            key = client_key()
            record = RequestRecord(request_id, key.name if key else None)
            self.records.add(client_id(), record)
            try:
                job = await self.intake.understand(request, body, shape, record)
            except PrfaasError as error:
                record.error = error.line()
                raise
            jobs = [job.choice(index) for index in range(job.options.n or 1)]
            with self._admitted(len(jobs) - 1):
                return await self._answered(request, jobs)

    async def drain(self, within_s: float) -> None:
        """Refuse new requests, and wait until those in flight have ended, for so long at most."""
        self.draining = True
        if not self._idle.is_set():
            log.info("draining: %d requests have %g s to end", self._in_flight, within_s)
            try:
                async with asyncio.timeout(within_s):
                    await self._idle.wait()
                log.info("drained")
            except TimeoutError:
                log.warning("not drained: %d requests are left", self._in_flight)

    async def part(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: a client that is answered while we leave should not come back on the same connection."""
        if self.draining:
            response.force_close()
            # aiohttp has written its own headers by now.
            response.headers["Connection"] = "close"

    async def _answered(self, request: web.Request, jobs: list[Job]) -> web.StreamResponse:
        """Answer with one choice for each job."""
        for index, job in enumerate(jobs[1:], start=1):
            self.records.add(f"{client_id()}-{index}", job.record)
        try:
            return await (self._stream(request, jobs) if jobs[0].options.stream else self._whole(jobs))
        except PrfaasError as error:
            _note_failure(jobs, error)
            raise
        finally:
            for job in jobs:
                if job.record.policy is not None:
                    self._account(job.record)

    def _account(self, record: RequestRecord) -> None:
        """Count and log a request that was decided on and is over."""
        cluster = record.prefilled_in
        for tell in self.on_end:
            tell(record)
        self._instruments.served(record, self._lifecycle.services.router.state.kind_of(cluster) if cluster else None)
        with about(request_id=record.request_id):
            log.info(
                "%d prompt tokens prefilled in %s, %d tokens answered, ttft %s, %s",
                record.prompt_tokens,
                cluster,
                record.output_tokens,
                "none" if record.ttft_s is None else format_duration(record.ttft_s),
                record.error or record.finish_reason or "given up",
            )

    @contextmanager
    def _admitted(self, n: int) -> Iterator[None]:
        _check_bound("", self._in_flight + n, self._config.max_concurrent_requests)
        key = client_key()
        name = "" if key is None else key.name
        if key is not None:
            _check_bound(f" with key {name!r}", self._in_flight_of[name] + n, key.max_concurrent_requests)
        self._count(n)
        self._in_flight_of[name] += n
        try:
            yield
        finally:
            self._count(-n)
            self._in_flight_of[name] -= n

    def _count(self, n: int) -> None:
        self._in_flight += n
        self._instruments.in_flight.set(self._in_flight)
        if self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _answer(self, run: Run, job: Job) -> Answer:
        return Answer(run, self._tokenizer.stream(), job.stops, job.options.min_tokens or 0)

    async def _whole(self, jobs: list[Job]) -> web.Response:
        choices = Choices(jobs)

        async def one(job: Job) -> dict[str, Any]:
            pieces: list[Piece] = []
            async with self._lifecycle.serve(job.request, job.record) as run:
                async for together in self._answer(run, job):
                    choices.began()
                    pieces += together
                if job.explain:
                    await run.settle(REPORT_WAIT_S)
            return job.shape.whole(pieces, job.record, job.request.token_ids)

        bodies = await choices.run(one)
        body = bodies[0]
        if len(jobs) > 1:
            body["choices"] = [choice for other in bodies for choice in other["choices"]]
            body["usage"] = usage_of(*(job.record for job in jobs))
        if jobs[0].explain:
            body["prfaas"] = _explained(jobs)
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _stream(self, request: web.Request, jobs: list[Job]) -> web.StreamResponse:
        """Headers leave with the first token, so that whatever fails before it still gets a status of its own.

        Where that takes long, they leave with the first ping.
        """
        response = web.StreamResponse(headers=STREAM_HEADERS)
        options, shape = jobs[0].options, jobs[0].shape
        with_usage = options.include_usage or options.continuous_usage
        pings, choices = Pings(request, response), Choices(jobs)

        async def one(job: Job) -> None:
            async with self._lifecycle.serve(job.request, job.record) as run:
                async for together in self._answer(run, job):
                    # The other choices begin when this is set: by then the headers are the first one's to write.
                    await pings.stop()
                    if not response.prepared:
                        await response.prepare(request)
                    choices.began()
                    data = b""
                    for piece in together:
                        usage = usage_after(job.record, piece.output_tokens) if options.continuous_usage else None
                        data += sse(job.shape.chunk(piece, usage, with_usage=with_usage))
                    await response.write(data)
                if job.explain:
                    await run.settle(REPORT_WAIT_S)

        try:
            async with pings:
                await choices.run(one)
        except PrfaasError as error:
            if not response.prepared:
                raise
            _note_failure(jobs, error)
            set_outcome(status_of(error))
            await _last_words(request, response, sse(error_body(error)))
            return response
        closing = b""
        if options.include_usage or jobs[0].explain:
            body = shape.closing(*(job.record for job in jobs))
            closing = sse({**body, "prfaas": _explained(jobs)} if jobs[0].explain else body)
        await _last_words(request, response, closing + DONE)
        return response


def _check_bound(whose: str, n: int, bound: int | None) -> None:
    """
    Raises:
        ApiError: so many requests are too many.
    """
    if bound is not None and n > bound:
        raise ApiError(
            f"too many requests{whose} at once",
            status=429,
            api_code="too_many_requests",
            expected=f"at most {bound} in flight",
            do="try again later",
        )


def _note_failure(jobs: list[Job], error: PrfaasError) -> None:
    """One choice that fails fails them all."""
    for job in jobs:
        job.record.error = job.record.error or error.line()


def _explained(jobs: list[Job]) -> dict[str, Any] | list[dict[str, Any]]:
    """The record of the one choice, or those of all."""
    records = [job.record.to_json() for job in jobs]
    return records[0] if len(records) == 1 else records


async def _last_words(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write the end of a stream; a client that does not take it is cut off."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await response.write(data)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
