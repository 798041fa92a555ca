"""SGLang's native ``/generate``: token ids in and out, ``bootstrap_*`` between a pair.

Both servers of a pair get the same body in the same moment: ``bootstrap_host`` and ``bootstrap_port`` name the prefill
server's bootstrap server, ``bootstrap_room`` is a random number that joins the two halves. A decode server cannot
compute a prompt itself. Every call has an id of its own, by which it is cancelled: closing the connection alone is
noticed late by some versions.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

import orjson

from prfaas_net.errors import IncompatibleError, PeerError, PrfaasError, ProtocolError
from prfaas_net.gateway.engines.dialect import Call, Chunk, Dialect, Handover, finish_of, token_list, unreadable
from prfaas_net.gateway.engines.refusals import told
from prfaas_net.gateway.engines.scrape import MetricNames
from prfaas_net.gateway.engines.settings import EngineFields, EngineRole
from prfaas_net.gateway.request import ServingRequest
from prfaas_net.nodes.messages import LogprobsModel
from prfaas_net.scheduling import Alone

__all__ = ["SglangDialect"]

PATH = "/generate"
ROOM_BITS = 63
# SGLang takes numbers of 64 bits, torch seeds of 63.
_SEED_BITS = 63


class SglangDialect(Dialect):
    """SGLang 0.5.3 and later (``output_ids`` beside the text, ``sampling_seed``)."""

    metrics = MetricNames(
        ("sglang:num_running_reqs",),
        ("sglang:num_queue_reqs",),
        ("sglang:token_usage",),
        ("sglang:prompt_tokens_total",),
        ("sglang:num_requests_total",),
    )
    decodes_alone = Alone.NEVER
    client_fields = frozenset(("ebnf", "json_schema", "regex", "stop_token_ids", "structural_tag"))
    # Without --incremental-streaming-output every event repeats all that came before it.
    max_line_bytes = 16 << 20
    role_path = "/get_server_info"

    def role_in(self, body: bytes) -> EngineRole | None:
        try:
            mode = orjson.loads(body).get("disaggregation_mode")
        except (orjson.JSONDecodeError, AttributeError):
            return None
        return {"prefill": EngineRole.PREFILL, "decode": EngineRole.DECODE, "null": EngineRole.BOTH}.get(str(mode))

    def whole(self, request: ServingRequest, model: str) -> Call:
        return _call(_body(request))

    def pair(self, request: ServingRequest, model: str, prefill: EngineFields, deadline_s: float) -> Handover:
        assert prefill.bootstrap is not None
        host, port = prefill.bootstrap
        body = _body(request) | {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
        }
        return Handover(_call(body), _call(body))

    def chunk(self, event: dict[str, Any], request: ServingRequest, n_tokens: int) -> Chunk:
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise unreadable("meta_info", event)
        total = meta.get("completion_tokens")
        if type(total) is not int or total < n_tokens:
            raise unreadable(f"completion_tokens of {n_tokens} or more", meta)
        finish = meta.get("finish_reason")
        reason = finish.get("type") if isinstance(finish, dict) else finish
        if reason == "abort":
            raise _aborted(finish)
        if event.get("output_ids") is None and total > n_tokens:
            raise IncompatibleError(
                "an engine does not say which tokens it sends",
                expected="output_ids in every event",
                found=repr(event)[:80],
                do="run SGLang 0.5.3 or later",
            )
        # Events repeat all tokens, or have the new ones only; either way these are the last.
        new = total - n_tokens
        ids = token_list(event.get("output_ids") or [], "output_ids")
        if len(ids) < new:
            raise unreadable(f"{new} new output_ids", ids)
        tokens = ids[len(ids) - new :]
        cached = meta.get("cached_tokens")
        if request.sampling.logprobs is None:
            pairs = deque[tuple[int, LogprobsModel | None]]((token, None) for token in tokens)
        else:
            pairs = deque(zip(tokens, _logprobs(meta, new), strict=True))
        return Chunk(pairs, finish_of(reason, "SGLang"), cached if type(cached) is int and cached >= 0 else None)


def _call(body: dict[str, Any]) -> Call:
    rid = secrets.token_hex(16)
    return Call(PATH, body | {"rid": rid}, cancel=("/abort_request", {"rid": rid}))


def _body(request: ServingRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        **request.extra,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if request.needs_seed:
        params["sampling_seed"] = sampling.seed % (1 << _SEED_BITS)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    body: dict[str, Any] = {"input_ids": list(request.token_ids), "sampling_params": params, "stream": True}
    if sampling.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}
    if request.cache_salt:
        body["extra_key"] = request.cache_salt
    return body


def _aborted(finish: object) -> PrfaasError:
    """``{"type": "abort", "message", "status_code"}``."""
    if isinstance(finish, dict) and isinstance(finish.get("status_code"), int):
        return told(finish, finish["status_code"], "SGLang")
    return PeerError("the engine gave the request up", found=repr(finish)[:200])


def _logprobs(meta: dict[str, Any], new: int) -> list[LogprobsModel]:
    """Triples of log-probability, token id and text; of all tokens so far or of the new ones."""
    chosen, tops = meta.get("output_token_logprobs"), meta.get("output_top_logprobs") or []
    if not isinstance(chosen, list) or not isinstance(tops, list) or len(chosen) < new:
        raise unreadable(f"output_token_logprobs of {new} tokens", meta)
    padded = [*([None] * max(0, new - len(tops))), *tops]
    try:
        return [
            LogprobsModel(logprob=own[0], top=tuple((entry[1], entry[0]) for entry in top or ()))
            for own, top in zip(chosen[len(chosen) - new :], padded[len(padded) - new :], strict=True)
        ]
    except (ValueError, TypeError, IndexError):
        raise ProtocolError("log-probabilities cannot be read", found=repr(chosen)[:120]) from None
