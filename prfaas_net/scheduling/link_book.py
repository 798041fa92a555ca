"""From the links between nodes to the link between two clusters, which is what the router plans with."""

from __future__ import annotations

from typing import Any

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.scheduling.events import LinkSeen

__all__ = ["LinkBook", "LinkReport", "parse_links"]

LinkReport = dict[str, Any]

# Which state speaks for the whole, the worst first. A link that is down counts only if all are: the others carry on.
_WORST = (
    LinkState.CONGESTED, LinkState.BUILDING, LinkState.HOST_LIMITED, LinkState.CLEAR, LinkState.APP_LIMITED,
    LinkState.IDLE,
)  # fmt: skip


def parse_links(body: object) -> list[LinkReport] | None:
    """A node's ``links``, with the fields that are used here; None if it is not that."""
    if not isinstance(body, list):
        return None
    reports = []
    for row in body:
        if not isinstance(row, dict) or not isinstance(row.get("peer"), str) or row.get("state") not in _STATES:
            return None
        rates = [row.get(name) for name in ("available_bps", "budget_bps", "configured_budget_bps", "base_rtt_s")]
        if not all(rate is None or (isinstance(rate, int | float) and 0 <= rate < 1e15) for rate in rates):
            return None
        reports.append(row)
    return reports


_STATES = frozenset(state.value for state in LinkState)


class LinkBook:
    """What each node last said of its links."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], dict[tuple[str, str], LinkReport]] = {}
        self._last: dict[tuple[str, str], LinkSeen] = {}

    def note(self, node_id: str, cluster: str, reports: list[tuple[str, LinkReport]]) -> list[LinkSeen]:
        """Take in all links of one node.

        Args:
            cluster: of that node.
            reports: each with the cluster of its peer.

        Returns:
            The links between clusters of which something has changed.
        """
        touched = set()
        for pair, links in self._reports.items():
            for key in [key for key in links if key[0] == node_id]:
                del links[key]
                touched.add(pair)
        for peer_cluster, report in reports:
            pair = (cluster, peer_cluster)
            self._reports.setdefault(pair, {})[node_id, report["peer"]] = report
            touched.add(pair)
        return [seen for pair in sorted(touched) if (seen := self._changed(pair)) is not None]

    def _changed(self, pair: tuple[str, str]) -> LinkSeen | None:
        seen = self._sum(pair)
        if self._last.get(pair) == seen:
            return None
        self._last[pair] = seen
        return seen

    def _sum(self, pair: tuple[str, str]) -> LinkSeen:
        reports = list(self._reports[pair].values())
        up = [report for report in reports if report["state"] != LinkState.DOWN.value]
        if not up:
            # Nobody has a link now. If all that were there are down it is; with none at all it may yet be dialled.
            return LinkSeen(*pair, LinkState.DOWN if reports else LinkState.IDLE)
        states = {report["state"] for report in up}
        state = next(state for state in _WORST if state.value in states)
        known = [report["available_bps"] for report in up if report.get("available_bps")]
        paced = [report.get("budget_bps") for report in up]
        # A node that says only what it is paced to now is taken to be configured so.
        budgets = [report.get("configured_budget_bps") or report.get("budget_bps") for report in up]
        rtts = [report["base_rtt_s"] for report in up if report.get("base_rtt_s")]
        return LinkSeen(
            *pair,
            state,
            # A link that was not measured is taken for as good as those that were.
            sum(known) * len(up) / len(known) if known else None,
            sum(budget for budget in budgets if budget) if all(budgets) else None,
            min(rtts) if rtts else None,
            sum(pace for pace in paced if pace) if all(paced) else None,
        )
