"""One vLLM or SGLang server: what it is and how it fares, as far as it says so and the configuration knows the rest."""

from __future__ import annotations

from urllib.parse import urlsplit

import aiohttp
import orjson

from prfaas_net.errors import BusyError, IncompatibleError, LinkError, PrfaasError
from prfaas_net.gateway.engines.client import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, EngineClient
from prfaas_net.gateway.engines.dialect import Dialect
from prfaas_net.gateway.engines.learning import LearntPrefill
from prfaas_net.gateway.engines.scrape import EngineLoad
from prfaas_net.gateway.engines.settings import EngineFields, EngineKind, EngineRole
from prfaas_net.gateway.engines.sglang import SglangDialect
from prfaas_net.gateway.engines.vllm import VllmDialect
from prfaas_net.nodes.messages import MAX_VOCAB, NodeInfo
from prfaas_net.scheduling import Alone, QueueSeen

__all__ = ["LAYOUTS", "EngineServer"]

MAX_METRICS_BYTES = 8 << 20
# Of what servers cache nothing is known but their kind: whether two of them can exchange it, they find out themselves.
LAYOUTS = {kind: f"engine:{kind.value}" for kind in EngineKind}
DIALECTS: dict[EngineKind, Dialect] = {EngineKind.VLLM: VllmDialect(), EngineKind.SGLANG: SglangDialect()}


class EngineServer:
    """One server, as the gateway sees it.

    Args:
        url: base of its paths.
        settings: what the configuration says of it.

    Attributes:
        calls: to it.
        load: as its metrics last said; ``metrics_text``: all of them, for ``/metrics/engines``.
        model: the name of the model there.
        prefill: how long prompts take there, as seen so far.
    """

    def __init__(self, url: str, settings: EngineFields, session: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.name = settings.name or urlsplit(url).netloc
        key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
        self.calls = EngineClient(url, self.name, key, session)
        self.dialect = DIALECTS[settings.kind]
        self.load = EngineLoad()
        self.metrics_text = ""
        self.model = settings.model
        self.prefill = LearntPrefill(self.name)
        self._boots = 0
        self._role_known = False

    @property
    def alone(self) -> Alone:
        """Whether it computes prompts for its own decoding."""
        match self.settings.role:
            case EngineRole.BOTH:
                return Alone.ONLY
            case EngineRole.DECODE:
                return self.dialect.decodes_alone if self.settings.computes_prompts else Alone.NEVER
            case _:
                return Alone.NEVER

    async def info(self, url: str, *, timeout_s: float) -> NodeInfo:
        """Ask it whether it is well, what it serves and how busy it is.

        Args:
            url: its own.

        Raises:
            LinkError: no answer in ``timeout_s`` seconds.
            BusyError: it answers and takes no work now.
            IncompatibleError: it does not serve the model, or does not say how long its sequences may be.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            await self.calls.get("/health", timeout, MAX_ERROR_BYTES)
        except LinkError:
            raise
        except PrfaasError as error:
            raise BusyError("the engine says that it is not ready", found=error.found, node=self.name) from error
        limit = self._served(await self.calls.get("/v1/models", timeout, MAX_ANSWER_BYTES))
        if not self._role_known:
            await self._check_role(timeout)
        try:
            text = (await self.calls.get("/metrics", timeout, MAX_METRICS_BYTES)).decode(errors="replace")
        except LinkError:
            raise
        except PrfaasError:
            # SGLang serves them only with --enable-metrics. Its load is then what this gateway gave to it.
            text = ""
        load = self.dialect.metrics.load(text)
        if load.restarted_since(self.load):
            self._boots, self._role_known = self._boots + 1, False
        self.load, self.metrics_text = load, text
        return self._info(limit)

    def queue(self, own_tokens: int, own_requests: int) -> QueueSeen:
        """What others than this gateway have given to it: what it counts, less our own."""
        waiting_tokens = round(self.load.waiting * self.load.mean_prompt_tokens)
        requests = self.load.running + self.load.waiting
        return QueueSeen(self.name, max(0, waiting_tokens - own_tokens), max(0, requests - own_requests))

    def _info(self, limit_tokens: int) -> NodeInfo:
        """What our own nodes say themselves."""
        settings, events = self.settings, self.settings.kv_events
        return NodeInfo(
            node_id=self.name,
            boot_id=str(self._boots),
            cluster=settings.cluster,
            role="prefill" if settings.role is EngineRole.PREFILL else "decode",
            model=self.model,
            layout=LAYOUTS[settings.kind],
            max_model_tokens=limit_tokens,
            vocab_size=MAX_VOCAB,
            prefill_chunk_tokens=1,
            block_tokens=events.block_tokens if events is not None else 0,
            groups=tuple(sorted({group.kind for group in events.engine_groups().values()})) if events else (),
        )

    async def _check_role(self, timeout: aiohttp.ClientTimeout) -> None:
        """Whether it was started for what the configuration says, where it can be asked."""
        if self.dialect.role_path:
            try:
                said = self.dialect.role_in(await self.calls.get(self.dialect.role_path, timeout, MAX_ANSWER_BYTES))
            except LinkError:
                raise
            except PrfaasError:
                said = None  # a version that does not say
            if said is not None and said is not self.settings.role:
                raise IncompatibleError(
                    "an engine was not started for its role",
                    expected=self.settings.role,
                    found=said,
                    do="correct role of the node, or the server's flags",
                    node=self.name,
                )
        self._role_known = True

    def _served(self, body: bytes) -> int:
        """Find the model; returns its longest sequence."""
        try:
            cards = {card["id"]: card.get("max_model_len") for card in orjson.loads(body)["data"]}
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise IncompatibleError("an engine's list of models cannot be read", found=repr(body[:80])) from None
        model = self.settings.model or next(iter(cards), "")
        if model not in cards:
            known = ", ".join(map(str, cards)) or "none"
            raise IncompatibleError("an engine does not serve the model", expected=model, found=known, node=self.name)
        limit = self.settings.max_model_tokens or cards[model]
        if type(limit) is not int or limit < 1:
            raise IncompatibleError(
                "an engine does not say how long its sequences may be", do="set max_model_tokens", node=self.name
            )
        self.model = model
        return limit
