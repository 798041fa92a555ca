"""A connector's numbers in vLLM's log lines and in its ``/metrics``."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from prfaas_net.connectors.stats import COUNTS, SERIES, is_empty, merged, summary
from prfaas_net.metrics import LATENCY_BUCKETS_S

__all__ = ["PrfaasPromMetrics", "PrfaasStats"]


class PrfaasStats(KVConnectorStats):  # type: ignore[misc]
    """Plain data, as vLLM carries it from the workers to its logger."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> PrfaasStats:
        return PrfaasStats(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, Any]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return is_empty(self.data)


class PrfaasPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:prfaas_*``, one a series and count of :mod:`prfaas_net.connectors.stats`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter = metric_types[Histogram], metric_types[Counter]
        self._metrics: dict[str, Any] = {}
        for name, text in (SERIES | COUNTS).items():
            seconds = name.endswith("_s")
            made = (
                histogram(
                    name=f"vllm:prfaas_{name.removesuffix('_s')}_seconds", documentation=text, labelnames=labelnames,
                    buckets=LATENCY_BUCKETS_S,
                )
                if seconds
                else counter(name=f"vllm:prfaas_{name}", documentation=text, labelnames=labelnames)
            )  # fmt: skip
            self._metrics[name] = create_metric_per_engine(made, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, values in transfer_stats_data.items():
            metric = self._metrics.get(name, {}).get(engine_idx)
            if metric is None:
                continue
            if name.endswith("_s"):
                for value in values:
                    metric.observe(value)
            else:
                metric.inc(sum(values))
