"""From an HTTP body to a request that was understood: read, checked, tokenized, bounded."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiohttp import web

from prfaas_net.errors import DeadlineError
from prfaas_net.gateway.api_errors import ApiError
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.openai_api import (
    COMPLETION_MAX_TOKENS,
    ChatBody,
    CompletionBody,
    Options,
    fields_of,
    messages_of,
    parse_body,
    prompt_of,
)
from prfaas_net.gateway.openai_shapes import Shape
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.run import Services, ServingRequest
from prfaas_net.nodes.engine_api import TextTokenizer

__all__ = ["Intake", "Job"]

# Below this a text is tokenized faster than a thread is woken (about 1 us a character against 100 us).
INLINE_TOKENIZE_CHARS = 2048
EXPLAIN_HEADER = "X-PrfaaS-Explain"


@dataclass(frozen=True)
class Job:
    """A request that was understood, and the record of how it fares."""

    options: Options
    shape: Shape
    request: ServingRequest
    record: RequestRecord
    explain: bool
    stops: tuple[str, ...]

    def choice(self, index: int) -> Job:
        """The same request, for another choice of its answer: drawn with another seed, recorded by itself."""
        if index == 0:
            return self
        request, record = self.request, RequestRecord(f"{self.request.request_id}-{index}", self.record.key_name)
        record.stages_s.update(self.record.stages_s)
        sampling = replace(request.sampling, seed=(request.sampling.seed + index) % (1 << 64))
        own = replace(request, request_id=record.request_id, sampling=sampling)
        return replace(self, request=own, record=record, shape=self.shape.choice(index))


class Intake:
    """Understands the bodies of both endpoints.

    Args:
        config: may be replaced.
        tokenizer: for the one model that is served.
    """

    def __init__(self, config: GatewayConfig, tokenizer: TextTokenizer, services: Services) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._services = services

    @property
    def max_model_tokens(self) -> int | None:
        """Longest prompt plus output; None while no node could serve one."""
        return self._services.router.state.max_model_tokens

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; no name means the one that is.

        Raises:
            ApiError: with status 404.
        """
        if name is not None and name != self.config.model:
            raise ApiError(
                "no such model",
                status=404,
                param="model",
                api_code="model_not_found",
                expected=self.config.model,
                found=repr(name)[:80],
            )

    async def understand(
        self, request: web.Request, body: type[Options], shape: type[Shape], record: RequestRecord
    ) -> Job:
        """Read, check and tokenize a request that has just arrived.

        Raises:
            ApiError: the client sent what cannot be served.
            DeadlineError: there was no time left after that.
        """
        arrived_s = self._services.clock.now()
        deadline_at = asyncio.get_running_loop().time() + self.config.request_deadline
        try:
            async with asyncio.timeout_at(deadline_at):
                raw = await self._read(request)
                options = parse_body(raw, body)
                self.check_model(options.model)
                token_ids = await self._token_ids(options)
        except TimeoutError as error:
            raise DeadlineError("the deadline passed before the prompt was tokenized") from error
        max_tokens = self._token_bound(options, len(token_ids))
        sampling = options.sampling(max_tokens, secrets.randbits(63))
        record.stages_s["tokenized"] = self._services.clock.now() - arrived_s
        return Job(
            options=options,
            shape=shape(self.config.model, self._tokenizer.token_text, token_ids=bool(options.return_token_ids)),
            request=ServingRequest(
                record.request_id,
                token_ids,
                sampling,
                arrived_s,
                deadline_at,
                options.cache_salt or "",
                seeded=options.seed is not None,
                extra=fields_of(raw, self._services.fleet.client_fields),
            ),
            record=record,
            explain=bool(options.explain) or request.headers.get(EXPLAIN_HEADER) == "1",
            stops=options.stop_strings(),
        )

    async def tokenize(self, request: web.Request) -> list[int]:
        """A prompt, or the messages of a chat, as the tokens that the endpoints would make of it.

        Raises:
            ApiError: it is neither, or for a model that is not served.
            DeadlineError: it took too long.
        """
        raw = await self._read(request)
        options: Options = parse_body(raw, ChatBody)
        if isinstance(options, ChatBody) and options.messages is None:
            options = parse_body(raw, CompletionBody)
        self.check_model(options.model)
        try:
            async with asyncio.timeout(self.config.request_deadline):
                return await self._token_ids(options)
        except TimeoutError as error:
            raise DeadlineError("the deadline passed before the prompt was tokenized") from error

    async def _read(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > self.config.max_body:
            raise web.HTTPRequestEntityTooLarge(self.config.max_body, request.content_length or 0)
        try:
            async with asyncio.timeout(self.config.http.body_timeout):
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
        vocab_size = self._services.fleet.vocab_size
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
        longest = self.config.max_prompt_tokens
        if longest is not None and prompt_tokens > longest:
            raise ApiError(
                "the prompt is longer than this gateway takes",
                param="messages" if chat else "prompt",
                api_code="context_length_exceeded",
                expected=f"at most {longest} tokens",
                found=prompt_tokens,
                do="shorten the prompt",
            )
        asked = options.token_bound
        default = self.config.chat_max_tokens if chat else COMPLETION_MAX_TOKENS
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
