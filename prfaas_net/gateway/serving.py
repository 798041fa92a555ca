"""From an HTTP request to a served one: read it, tokenize it, answer it whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
from aiohttp import web

from prfaas_net.clock import Clock
from prfaas_net.errors import DeadlineError, PrfaasError
from prfaas_net.gateway.answer import Answer
from prfaas_net.gateway.api_errors import ApiError, error_body, status_of
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.instruments import GatewayMetrics
from prfaas_net.gateway.lifecycle import Lifecycle, Run, ServingRequest
from prfaas_net.gateway.middleware import client_id, internal_id, set_outcome
from prfaas_net.gateway.openai_api import (
    COMPLETION_MAX_TOKENS,
    ChatBody,
    CompletionBody,
    Options,
    messages_of,
    parse_body,
    prompt_of,
)
from prfaas_net.gateway.openai_shapes import DONE, Shape, sse, usage_of
from prfaas_net.gateway.record import RecentRecords, RequestRecord
from prfaas_net.nodes.engine_api import TextTokenizer
from prfaas_net.units import format_duration

__all__ = ["Serving"]

log = logging.getLogger(__name__)

# Below this a text is tokenized faster than a thread is woken (about 1 us a character against 100 us).
INLINE_TOKENIZE_CHARS = 2048
# How long an explained answer waits, after its last token, for the report of its transfer.
REPORT_WAIT_S = 10.0
# How long a client may take to accept the last bytes of a stream once the request itself is over.
LAST_WORDS_S = 5.0
EXPLAIN_HEADER = "X-PrfaaS-Explain"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Tells nginx not to collect tokens before passing them on.
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True)
class Job:
    """A request that was understood, and the record of how it fares."""

    options: Options
    shape: Shape
    request: ServingRequest
    record: RequestRecord
    explain: bool
    stops: tuple[str, ...]


class Serving:
    """Answers completion requests, of both endpoints.

    Args:
        tokenizer: text to tokens and back, for the one model that is served.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: TextTokenizer,
        lifecycle: Lifecycle,
        instruments: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._lifecycle = lifecycle
        self._instruments = instruments
        self._clock = clock
        self._in_flight = 0
        self.records = RecentRecords()

    @property
    def max_model_tokens(self) -> int | None:
        """Longest prompt plus output; None while no node could serve one."""
        return self._lifecycle.router.state.max_model_tokens

    async def serve(self, request: web.Request, body: type[Options], shape: type[Shape]) -> web.StreamResponse:
        """The whole way of one request.

        Raises:
            PrfaasError: it failed before any of the answer was sent.
        """
        arrived_s = self._clock.now()
        deadline_at = asyncio.get_running_loop().time() + self._config.request_deadline
        with self._admitted():
            job = await self._understand(request, body, shape, arrived_s, deadline_at)
            try:
                if job.options.stream:
                    return await self._stream(request, job)
                return await self._whole(job)
            except PrfaasError as error:
                job.record.error = error.line()
                raise
            finally:
                self._account(job.record)

    def _account(self, record: RequestRecord) -> None:
        """Count and log a request that is over."""
        cluster = record.prefilled_in
        self._instruments.served(record, self._lifecycle.router.state.kind_of(cluster) if cluster else None)
        log.info(
            "request %s: %d prompt tokens prefilled in %s, %d tokens answered, ttft %s, %s",
            record.request_id,
            record.prompt_tokens,
            cluster,
            record.output_tokens,
            "none" if record.ttft_s is None else format_duration(record.ttft_s),
            record.error or record.finish_reason or "given up",
        )

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; no name means the one that is.

        Raises:
            ApiError: with status 404.
        """
        if name is not None and name != self._config.model:
            raise ApiError(
                "no such model",
                status=404,
                param="model",
                api_code="model_not_found",
                expected=self._config.model,
                found=repr(name)[:80],
            )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._in_flight >= self._config.max_concurrent_requests:
            raise ApiError(
                "too many requests at once",
                status=429,
                api_code="too_many_requests",
                expected=f"at most {self._config.max_concurrent_requests} in flight",
                do="try again later",
            )
        self._in_flight += 1
        self._instruments.in_flight.set(self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= 1
            self._instruments.in_flight.set(self._in_flight)

    async def _understand(
        self, request: web.Request, body: type[Options], shape: type[Shape], arrived_s: float, deadline_at: float
    ) -> Job:
        """Read, check and tokenize."""
        record = RequestRecord(internal_id())
        self.records.add(client_id(), record)
        try:
            async with asyncio.timeout_at(deadline_at):
                options = parse_body(await self._read(request), body)
                self.check_model(options.model)
                token_ids = await self._token_ids(options)
        except TimeoutError as error:
            raise DeadlineError("the deadline passed before the prompt was tokenized") from error
        max_tokens = self._token_bound(options, len(token_ids))
        sampling = options.sampling(max_tokens, secrets.randbits(63))
        record.stages_s["tokenized"] = self._clock.now() - arrived_s
        return Job(
            options=options,
            shape=shape(self._config.model, token_ids=bool(options.return_token_ids)),
            request=ServingRequest(record.request_id, token_ids, sampling, arrived_s, deadline_at),
            record=record,
            explain=bool(options.explain) or request.headers.get(EXPLAIN_HEADER) == "1",
            stops=options.stop_strings(),
        )

    async def _read(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > self._config.max_body:
            raise web.HTTPRequestEntityTooLarge(self._config.max_body, request.content_length or 0)
        try:
            async with asyncio.timeout(self._config.http.body_timeout):
                return await request.read()
        except TimeoutError as error:
            raise ApiError("the body took too long to arrive", status=408, api_code="body_timeout") from error
        except web.RequestPayloadError as error:
            raise ApiError("the body could not be read", found=str(error)[:200]) from error

    async def _token_ids(self, options: Options) -> list[int]:
        if isinstance(options, CompletionBody):
            prompt = prompt_of(options.prompt)
            if not isinstance(prompt, str):
                return self._checked_ids(prompt)
            ids = await self._tokenize(len(prompt), lambda: self._tokenizer.encode(prompt))
        else:
            assert isinstance(options, ChatBody)
            messages = messages_of(options.messages)
            size = sum(len(message["content"]) for message in messages)
            ids = await self._tokenize(size, lambda: self._tokenizer.apply_chat_template(messages))
        if not ids:
            raise ApiError("the prompt is empty", expected="at least one token", api_code="empty_prompt")
        return ids

    async def _tokenize(self, chars: int, work: Callable[[], list[int]]) -> list[int]:
        return work() if chars <= INLINE_TOKENIZE_CHARS else await asyncio.to_thread(work)

    def _checked_ids(self, ids: list[int]) -> list[int]:
        vocab_size = self._lifecycle.fleet.vocab_size
        if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
            wrong = next(i for i, t in enumerate(ids) if t < 0 or (vocab_size is not None and t >= vocab_size))
            raise ApiError(
                f"prompt[{wrong}] is not a token of this model",
                param="prompt",
                expected=f"0 to {vocab_size - 1}" if vocab_size is not None else "0 or more",
                found=ids[wrong],
            )
        return ids

    def _token_bound(self, options: Options, prompt_tokens: int) -> int:
        """How many tokens to generate."""
        chat = isinstance(options, ChatBody)
        asked = options.token_bound
        default = self._config.chat_max_tokens if chat else COMPLETION_MAX_TOKENS
        limit = self.max_model_tokens
        if limit is None:
            # Nobody can serve it now; the router will say so.
            return asked or default
        room = limit - prompt_tokens
        if room < (asked or 1):
            raise ApiError(
                "the prompt is too long for this model" if room < 1 else "prompt and max_tokens together are too long",
                param="messages" if chat else "prompt",
                api_code="context_length_exceeded",
                expected=f"at most {limit} tokens of prompt and output",
                found=f"{prompt_tokens} + {asked or 1}",
                do="shorten the prompt or lower max_tokens",
            )
        return asked or min(default, room)

    def _answer(self, run: Run, job: Job) -> Answer:
        return Answer(run, self._tokenizer.stream(), job.stops, job.options.min_tokens or 0)

    async def _whole(self, job: Job) -> web.Response:
        texts: list[str] = []
        tokens: list[int] = []
        async with self._lifecycle.serve(job.request, job.record) as run:
            async for piece in self._answer(run, job):
                texts.append(piece.text)
                if piece.token is not None:
                    tokens.append(piece.token)
            if job.explain:
                await run.settle(REPORT_WAIT_S)
        body = job.shape.whole("".join(texts), tokens, job.record, job.request.token_ids)
        if job.explain:
            body["prfaas"] = job.record.to_json()
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Headers leave with the first token, so that whatever fails before it still gets a status of its own."""
        response = web.StreamResponse(headers=STREAM_HEADERS)
        options, record = job.options, job.record
        with_usage = options.include_usage or options.continuous_usage
        try:
            async with self._lifecycle.serve(job.request, record) as run:
                async for piece in self._answer(run, job):
                    if not response.prepared:
                        await response.prepare(request)
                    usage = usage_of(record) if options.continuous_usage else None
                    await response.write(sse(job.shape.chunk(piece, usage, with_usage=with_usage)))
                if job.explain:
                    await run.settle(REPORT_WAIT_S)
        except PrfaasError as error:
            if not response.prepared:
                raise
            record.error = error.line()
            set_outcome(status_of(error))
            await _last_words(request, response, sse(error_body(error)))
            return response
        closing = b""
        if options.include_usage or job.explain:
            body = job.shape.closing(record)
            closing = sse({**body, "prfaas": record.to_json()} if job.explain else body)
        await _last_words(request, response, closing + DONE)
        return response


async def _last_words(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write the end of a stream; a client that does not take it is cut off."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await response.write(data)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
