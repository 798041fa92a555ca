"""The engine's scheduler's side of a connector: what each request wants, and what the workers are told each step.

Nothing here reads a clock or touches a socket; the engine's request objects are known by what is used of them.

**N-1.** A prompt's last token is always computed by the decode side: it has to run it anyway to get its first output,
and a recurrent state cannot step back by one. So the prefill side drops it, computes N-1 tokens, and both sides mean
exactly those: a window, too, then ends at the same token on both sides.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas_net.connectors.layout import digest_of
from prfaas_net.connectors.orders import Blocks, HoldOrder, LoadOrder, PrefillOrder, ReleaseOrder, StepOrders

__all__ = ["EngineRequest", "ScheduledStep", "SchedulerSide", "SideInfo"]

MAX_ID_CHARS = 128


class EngineRequest(Protocol):
    """What is used of an engine's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int


@dataclass(frozen=True)
class SideInfo:
    """What the prefill side's answers say of it.

    Attributes:
        deadline_s: of loads and of finished prompts; a request may ask for less.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    prefills: bool
    decodes: bool
    deadline_s: float


@dataclass(frozen=True)
class ScheduledStep:
    """Of one request in the step that is being made: tokens computed before it and in it."""

    request_id: str
    computed: int
    scheduled: int


@dataclass
class _Prompt:
    transfer_id: str
    stop: int
    digest: str
    deadline_s: float


class SchedulerSide:
    """Not shared between threads."""

    def __init__(self, info: SideInfo) -> None:
        self._info = info
        self._prompts: dict[str, _Prompt] = {}
        self._by_transfer: set[str] = set()
        self._orders = StepOrders()

    # -- arrival -----------------------------------------------------------------------------------------------------

    def arrive(self, request: EngineRequest, adapter: str, shorten: Callable[[], None]) -> None:
        """A new request.

        Args:
            shorten: drops the request's last prompt token and lets it generate one token.
        """
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return
        refusal = self._refusal_to_offer(request, params)
        if refusal:
            params["_prfaas_refusal"] = refusal
            return
        shorten()
        assert request.prompt_token_ids is not None
        transfer_id = str(params.get("transfer_id") or secrets.token_hex(16))
        stop = request.num_prompt_tokens
        digest = digest_of(request.prompt_token_ids, stop, adapter)
        self._prompts[request.request_id] = _Prompt(transfer_id, stop, digest, self._deadline(params))
        self._by_transfer.add(transfer_id)

    def _refusal_to_offer(self, request: EngineRequest, params: dict[str, Any]) -> str:
        if not self._info.prefills:
            return "wrong role: do_remote_decode was asked of a server with kv_role kv_consumer"
        if params.get("do_remote_prefill"):
            return "do_remote_decode and do_remote_prefill were both asked for"
        if request.prompt_token_ids is None or request.num_prompt_tokens < 2:
            return "nothing to hand over: a prompt of one token, or of embeddings"
        transfer_id = params.get("transfer_id")
        if transfer_id is not None and not _is_id(transfer_id):
            return f"transfer_id is 1 to {MAX_ID_CHARS} printable characters"
        if transfer_id in self._by_transfer:
            return f"transfer_id {transfer_id} is in use: every request needs its own"
        return ""

    def _deadline(self, params: dict[str, Any]) -> float:
        asked = params.get("transfer_deadline_s")
        good = isinstance(asked, (int, float)) and not isinstance(asked, bool) and asked > 0
        return min(self._info.deadline_s, float(asked)) if good and asked is not None else self._info.deadline_s

    # -- loading -----------------------------------------------------------------------------------------------------

    def loadable(self, request: EngineRequest, computed: int) -> int:
        """Tokens beyond those computed that a prefill server has or will have. Changes nothing."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or request.prompt_token_ids is None:
            return 0
        if not self._info.decodes:
            params["_prfaas_refusal"] = "wrong role: do_remote_prefill was asked of a server with kv_role kv_producer"
            return 0
        return max(0, request.num_prompt_tokens - 1 - computed)

    def allocated(self, request: EngineRequest, adapter: str, blocks: Blocks, n_loaded: int) -> None:
        """Blocks are there for ``n_loaded`` tokens to be loaded into; 0: nothing is loaded."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once: after a failure or a preemption the prompt is computed here
        if n_loaded <= 0:
            self._release(params)
            return
        assert request.prompt_token_ids is not None
        stop = request.num_prompt_tokens - 1
        self._orders.loads.append(
            LoadOrder(
                request_id=request.request_id,
                transfer_id=str(params.get("transfer_id")),
                host=str(params.get("remote_host")),
                port=_port(params),
                blocks=blocks,
                start=stop - n_loaded,
                stop=stop,
                digest=digest_of(request.prompt_token_ids, stop, adapter),
                deadline_s=self._deadline(params),
                refusal=_refusal_to_load(params, stop),
            )
        )

    def _release(self, params: dict[str, Any]) -> None:
        if not _refusal_to_load(params, None):
            release = ReleaseOrder(
                params["transfer_id"], params["remote_host"], _port(params), self._deadline(params)
            )  # fmt: skip
            self._orders.releases.append(release)

    # -- steps -------------------------------------------------------------------------------------------------------

    def preempted(self, request_ids: Iterable[str]) -> None:
        self._orders.preempted += (name for name in request_ids if name in self._prompts)

    def take_orders(self, steps: Iterable[ScheduledStep], blocks_of: Callable[[str], Blocks]) -> StepOrders:
        """What the workers are told of the step that was just made."""
        for step in steps:
            prompt = self._prompts.get(step.request_id)
            if prompt is None:
                continue
            self._orders.prefills.append(
                PrefillOrder(
                    request_id=step.request_id, transfer_id=prompt.transfer_id, blocks=blocks_of(step.request_id),
                    before=step.computed, after=step.computed + step.scheduled, stop=prompt.stop, digest=prompt.digest,
                )
            )  # fmt: skip
        orders, self._orders = self._orders, StepOrders()
        return orders

    # -- the end -----------------------------------------------------------------------------------------------------

    def finished(self, request: EngineRequest, *, completed: bool) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended.

        Args:
            completed: by itself, not because it was aborted or failed.

        Returns:
            Whether its blocks must stay until the workers say otherwise, and what the answer carries.
        """
        params = request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            self._release(params)  # it ended before anything was loaded
        refusal = params.get("_prfaas_refusal")
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False, {"error": refusal} if refusal else None
        self._by_transfer.discard(prompt.transfer_id)
        if not completed:
            self._orders.dropped.append(request.request_id)
            return False, None
        self._orders.holds.append(HoldOrder(request.request_id, prompt.deadline_s))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": prompt.transfer_id,
            "remote_host": self._info.host,
            "remote_port": self._info.port,
            "remote_engine_id": self._info.engine_id,
            "remote_request_id": request.request_id,
            "remote_num_tokens": prompt.stop,
            "remote_block_ids": [],
            "tp_size": self._info.tp_size,
        }

    @property
    def has_orders(self) -> bool:
        """Whether the workers have to be told something though no request runs."""
        orders = self._orders
        return bool(orders.loads or orders.releases or orders.holds or orders.dropped)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and value.isprintable()


def _port(params: dict[str, Any]) -> int:
    port = params.get("remote_port")
    return port if isinstance(port, int) and 0 < port <= 0xFFFF else 0


def _refusal_to_load(params: dict[str, Any], stop: int | None) -> str:
    """Why the parameters cannot be used; empty if they can."""
    if not _is_id(params.get("transfer_id")) or not params.get("remote_host") or not _port(params):
        return (
            "kv_transfer_params has no usable transfer_id, remote_host and remote_port; give the decode server what "
            "the prefill server answered"
        )
    said = params.get("remote_num_tokens")
    if stop is not None and isinstance(said, int) and said != stop:
        return (
            f"the prefill server ran another prompt: {said + 1} tokens there, {stop + 1} here; "
            "give both the same prompt and chat template"
        )
    return ""
