"""vLLM's OpenAI server: ``/v1/completions`` with token ids in and out, ``kv_transfer_params`` between a pair.

Two ways to hand a prompt's KVCache over. With any connector that answers the prefill with ``kv_transfer_params`` (NIXL,
Mooncake, LMCache, ours) these are copied into the decode request, unread and unchanged. With our own connector, whose
address is configured, both servers are asked in the same moment under one ``transfer_id`` (docs/vllm.md).
"""

from __future__ import annotations

import uuid
from collections import deque
from typing import Any

from prfaas_net.errors import IncompatibleError, PeerError, ProtocolError
from prfaas_net.gateway.engines.dialect import Call, Chunk, Dialect, Handover, finish_of, token_list, unreadable
from prfaas_net.gateway.engines.scrape import MetricNames
from prfaas_net.gateway.engines.settings import EngineFields
from prfaas_net.gateway.request import ServingRequest
from prfaas_net.nodes.messages import LogprobsModel
from prfaas_net.scheduling import Alone

__all__ = ["VllmDialect"]

PATH = "/v1/completions"
_TOKEN = "token_id:"
# vLLM's seed is a signed 64-bit number.
_SEED_BITS = 63


class VllmDialect(Dialect):
    """vLLM 0.10.2 and later (``return_token_ids``)."""

    metrics = MetricNames(
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:prompt_tokens_total",),
        ("vllm:request_success_total",),
    )
    decodes_alone = Alone.SPARE
    client_fields = frozenset(
        ("allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
         "repetition_detection", "stop_token_ids", "structured_outputs", "thinking_token_budget", "vllm_xargs")
    )  # fmt: skip

    def whole(self, request: ServingRequest, model: str) -> Call:
        return Call(PATH, _body(request, model) | {"stream": True, "stream_options": {"include_usage": True}})

    def pair(self, request: ServingRequest, model: str, prefill: EngineFields, deadline_s: float) -> Handover:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        nothing = {f"remote_{name}": None for name in ("engine_id", "block_ids", "host", "port")}
        if prefill.connector is None:
            return Handover(self._prefill(request, model, params | nothing), None)
        shared = {"transfer_id": str(uuid.uuid4()), "transfer_deadline_s": deadline_s}
        host, port = prefill.connector
        there = {"do_remote_decode": False, "do_remote_prefill": True, "remote_host": host, "remote_port": port}
        decode = self.whole(request, model)
        decode.body["kv_transfer_params"] = there | shared
        return Handover(self._prefill(request, model, params | shared), decode)

    def _prefill(self, request: ServingRequest, model: str, params: dict[str, Any]) -> Call:
        """The first token is computed again by the decode server, and thrown away here: the cheapest one will do."""
        body = _body(request, model) | {"stream": False, "max_tokens": 1, "min_tokens": 1, "temperature": 0.0}
        body["kv_transfer_params"] = params
        for name in ("logprobs", "seed"):
            body.pop(name, None)
        return Call(PATH, body, streamed=False)

    def check(self, answer: dict[str, Any], node: str) -> None:
        params = answer.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("error"):
            # What our own connector answers to a request that it cannot serve.
            raise PeerError("a prefill server keeps nothing for a decode server", found=params["error"], node=node)

    def decode_after(self, request: ServingRequest, model: str, answer: dict[str, Any]) -> Call:
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict):
            raise ProtocolError(
                "a prefill server kept nothing for a decode server",
                expected="kv_transfer_params in its answer",
                found=repr(params)[:80],
                do="start it with --kv-transfer-config",
            )
        call = self.whole(request, model)
        call.body["kv_transfer_params"] = params
        return call

    def chunk(self, event: dict[str, Any], request: ServingRequest, n_tokens: int) -> Chunk:
        choices = event.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise unreadable("choices", event)
        if not choices:
            return Chunk(cached_tokens=self.cached_in(event))
        choice = choices[0]
        if choice.get("token_ids") is None and (choice.get("text") or choice.get("finish_reason") is None):
            raise IncompatibleError(
                "an engine does not say which tokens it sends",
                expected="token_ids in every chunk",
                found=repr(choice)[:80],
                do="run vLLM 0.10.2 or later",
            )
        tokens = token_list(choice.get("token_ids") or [], "token_ids")
        if request.sampling.logprobs is None:
            pairs = deque[tuple[int, LogprobsModel | None]]((token, None) for token in tokens)
        else:
            pairs = deque(
                zip(tokens, _logprobs(choice.get("logprobs"), len(tokens), request.sampling.logprobs), strict=True)
            )
        return Chunk(pairs, finish_of(choice.get("finish_reason"), "vLLM"))


def _body(request: ServingRequest, model: str) -> dict[str, Any]:
    """What both servers of a pair are told alike: the same tokens must come out of both."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "return_token_ids": True,
    }
    if request.needs_seed:
        body["seed"] = sampling.seed % (1 << _SEED_BITS)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return {**request.extra, **body}


def _logprobs(raw: object, n_tokens: int, wanted: int) -> list[LogprobsModel]:
    """Four lists side by side, with tokens as ``token_id:17``."""
    if not isinstance(raw, dict):
        raise unreadable("logprobs", raw)
    chosen, tops = raw.get("token_logprobs"), raw.get("top_logprobs") or [None] * n_tokens
    if not isinstance(chosen, list) or not isinstance(tops, list) or len(chosen) != n_tokens or len(tops) != n_tokens:
        raise unreadable(f"logprobs of {n_tokens} tokens", raw)
    try:
        return [
            LogprobsModel(
                logprob=logprob,
                # vLLM adds the chosen token where it is not among the likeliest.
                top=tuple(sorted(((_id(name), value) for name, value in (top or {}).items()), key=_worst)[:wanted]),
            )
            for logprob, top in zip(chosen, tops, strict=True)
        ]
    except (ValueError, TypeError, AttributeError):
        raise unreadable("logprobs by token id", raw) from None


def _worst(entry: tuple[int, float]) -> float:
    return -entry[1]


def _id(name: str) -> int:
    if not name.startswith(_TOKEN):
        raise ValueError(name)
    return int(name.removeprefix(_TOKEN))
