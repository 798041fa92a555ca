"""TTFT of a fleet with nobody in the way: what a threshold costs and saves each request."""

from __future__ import annotations

from prfaas_net.scheduling.profiles import NodeProfile
from prfaas_net.scheduling.throughput import Workload

__all__ = ["zero_load_ttft_s"]

# Quantiles at which a time is evaluated, for its mean and its 90th percentile.
POINTS = 20_000


def zero_load_ttft_s(
    work: Workload, t_tokens: float, *, long: NodeProfile, short: NodeProfile, remote_bps: float, local_bps: float,
    pipelined: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Mean and P90 of the time until decoding can begin, in seconds.

    The paper's table 6 adds prefill and transfer, nothing overlapped (PAPER.md found this to fit all six of its
    numbers); ``pipelined`` is what layer-wise transfer comes to: the longer of the two.

    Args:
        t_tokens: longer prompts are computed on ``long`` and cross ``remote_bps``, others on ``short`` and cross
            ``local_bps``.
    """
    times = []
    for i in range(POINTS):
        tokens = work.lengths.quantile((i + 0.5) / POINTS)
        remote = tokens > t_tokens
        prefill_s = (long if remote else short).prefill_s(tokens)
        transfer_s = 8.0 * work.kv(tokens) / (remote_bps if remote else local_bps)
        times.append(max(prefill_s, transfer_s) if pipelined else prefill_s + transfer_s)
    times.sort()
    return sum(times) / POINTS, times[int(0.9 * POINTS)]
