"""vLLM's KV connector: ``--kv-transfer-config '{"kv_connector": "PrfaasConnector", "kv_connector_module_path":
"prfaas_net.connectors.vllm", ...}'``; see docs/vllm.md.

A thin shell: vLLM makes one object in its scheduler and one in each worker, and calls it. What is decided and moved
lives in the modules beside this one, which do not know vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from prfaas_net.connectors.config import check_engine, read_config
from prfaas_net.connectors.orders import Blocks, StepOrders
from prfaas_net.connectors.pages import HostPages, PagedMemory
from prfaas_net.connectors.scheduler import ScheduledStep, SchedulerSide, SideInfo
from prfaas_net.connectors.vllm_pages import describe
from prfaas_net.connectors.vllm_stats import PrfaasPromMetrics, PrfaasStats
from prfaas_net.connectors.weights import weights_digest
from prfaas_net.connectors.worker import ConnectorWorker, StepResults, WorkerRole
from prfaas_net.errors import InternalError

__all__ = ["PrfaasConnector", "PrfaasMetadata"]

log = logging.getLogger("vllm.prfaas")


@dataclass
class PrfaasMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half tells the workers' each step."""

    orders: StepOrders = field(default_factory=StepOrders)


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill here, decode there, KVCache over plain TCP between them.

    Raises:
        ConfigError: settings that cannot work; says which and what to change.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._config = read_config(transfer.kv_connector_extra_config, default_port=transfer.kv_port)
        parallel = vllm_config.parallel_config
        check_engine(
            self._config, transfer.kv_role, pipeline_ranks=parallel.pipeline_parallel_size,
            context_ranks=getattr(parallel, "decode_context_parallel_size", 1),
            state_mode=getattr(vllm_config.cache_config, "mamba_cache_mode", "none"),
        )  # fmt: skip
        self._side: SchedulerSide | None = None
        self._worker: ConnectorWorker | None = None
        self._begun: PrfaasMetadata | None = None
        self._results = StepResults()
        if role is KVConnectorRole.SCHEDULER:
            host, port = self._config.advertise or self._config.listen
            self._side = SchedulerSide(
                SideInfo(
                    engine_id=str(transfer.engine_id), host=host, port=port,
                    tp_size=parallel.tensor_parallel_size, prefills=transfer.is_kv_producer,
                    decodes=transfer.is_kv_consumer, deadline_s=self._config.deadline,
                )
            )  # fmt: skip

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved one by one, which a graph of the whole model would skip."""
        return True

    # -- the scheduler's half ----------------------------------------------------------------------------------------

    @property
    def _scheduling(self) -> SchedulerSide:
        if self._side is None:
            raise InternalError("a scheduler's call reached a worker's connector")
        return self._side

    def on_new_request(self, request: Any) -> None:
        def shorten() -> None:
            del request.prompt_token_ids[-1:]
            del request._all_token_ids[-1:]
            request.num_prompt_tokens -= 1
            request.max_tokens = 1

        self._scheduling.arrive(request, _adapter(request), shorten)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = self._scheduling.loadable(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All of them: recurrent state comes too, and must not be replayed or zeroed."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        table = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        self._scheduling.allocated(request, _adapter(request), table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PrfaasMetadata:
        self._scheduling.preempted(scheduler_output.preempted_req_ids or ())
        cached = scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        steps = (
            ScheduledStep(name, computed.get(name, 0), count)
            for name, count in scheduler_output.num_scheduled_tokens.items()
        )
        return PrfaasMetadata(self._scheduling.take_orders(steps, self._blocks_of))

    def _blocks_of(self, request_id: str) -> Blocks:
        assert self._kv_cache_manager is not None
        table = self._kv_cache_manager.get_block_ids(request_id)
        return tuple(list(blocks) for blocks in self._kv_cache_config.select_transfer_block_ids(table))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        done = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return self._scheduling.finished(request, completed=request.status in done)

    def has_pending_push_work(self) -> bool:
        return self._scheduling.has_orders

    # -- the workers' half -------------------------------------------------------------------------------------------

    @property
    def _moving(self) -> ConnectorWorker:
        if self._worker is None:
            raise InternalError("the KV cache has not been registered yet")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        model, transfer = self._vllm_config.model_config, self._kv_transfer_config
        weights = self._config.weights or weights_digest(model.model, model.revision)
        layout, pages = describe(self._vllm_config, self._kv_cache_config, kv_caches, weights=weights)
        devices = {page.device.type for page in pages.values()}
        memory: PagedMemory
        if devices == {"cpu"}:
            memory = HostPages(layout, {name: page.numpy() for name, page in pages.items()})
        else:
            from prfaas_net.connectors.device_pages import DevicePages

            memory = DevicePages(layout, pages, chunk_bytes=self._config.chunk)
        role = WorkerRole(
            prefills=transfer.is_kv_producer, decodes=transfer.is_kv_consumer, engine_id=str(transfer.engine_id),
            max_model_tokens=model.max_model_len, vocab_size=model.get_vocab_size(),
        )  # fmt: skip
        self._worker = ConnectorWorker(self._config, role, layout, memory)
        log.info(
            "prfaas connector of rank %d: layout %s, %s%s", layout.tp_rank, layout.fingerprint,
            f"tickets at {self._worker.control_address} " if role.prefills else "",
            f"KVCache lands at {self._worker.kv_address}" if role.decodes else "",
        )  # fmt: skip

    def handle_preemptions(self, kv_connector_metadata: PrfaasMetadata) -> None:
        """Called before anything of a step: before freed blocks are zeroed or written again."""
        self._begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: PrfaasMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    def _begin(self, metadata: PrfaasMetadata) -> None:
        if self._begun is not metadata:
            self._begun = metadata
            self._moving.begin_step(metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin at the end of the step: they are for requests that do not run in it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only after all of its KVCache is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._moving.layer_done(layer_name)

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PrfaasMetadata)
        self._moving.end_step(metadata.orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._results = self._moving.finish(finished_req_ids)
        return results.sent or None, results.loads.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.get_finished(finished_req_ids)
        # With one group vLLM can go on from the first bad block; with several it can only begin again.
        failed = self._results.loads.failed if len(self._kv_cache_config.kv_cache_groups) > 1 else set()
        return KVConnectorTransferResults(sent or set(), received or set(), set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        if len(self._kv_cache_config.kv_cache_groups) > 1:
            return set()
        return self._results.loads.bad_blocks

    def get_kv_connector_stats(self) -> PrfaasStats | None:
        data = self._worker.take_stats() if self._worker is not None else {}
        return PrfaasStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrfaasStats:
        return PrfaasStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PrfaasPromMetrics:
        return PrfaasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _adapter(request: Any) -> str:
    lora = request.lora_request
    return "" if lora is None else str(lora.lora_name)
