"""The Grafana dashboard in ``docs/grafana`` asks for nothing that the daemons do not tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import open_bench
from tests.nodes.conftest import Nodes, nodes

__all__ = ["nodes"]  # a fixture that tests of nodes have too

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "prfaas.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]
# Prometheus itself adds these to what it scrapes.
ADDED = {"instance", "job"}
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def told(exposition: str) -> dict[str, set[str]]:
    """Names of the samples of a ``/metrics``, each with its labels as far as there is a sample."""
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", exposition, re.MULTILINE):
        found |= {name + suffix: set() for suffix in SUFFIXES[kind]}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", exposition, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


async def fetch(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url + "/metrics") as answer:
        assert answer.status == 200
        return await answer.text()


async def test_every_metric_and_label_is_told_by_a_daemon(nodes: Nodes) -> None:
    """By a gateway that answered a request and by two nodes that moved one; as Prometheus would read them."""
    everything: dict[str, set[str]] = {}
    async with open_bench() as bench:
        await bench.complete(prompt="x" * 300, explain=True)
        everything |= told(await fetch(bench.http, bench.gateway.url))
    async with nodes() as hand:
        prompt = list(range(300))
        async with hand.decode(len(prompt)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(prompt, ticket) as prefill:
                await decode.all()
                await prefill.all()
        for node in (hand.prefill_node, hand.decode_node):
            everything |= told(await fetch(hand.session, "http://{}:{}".format(*node.control.address)))
        await hand.settled()
    assert len(QUERIES) > 30
    for query in QUERIES:
        names = set(re.findall(r"\bprfaas_\w+", query))
        assert names, query
        assert names <= everything.keys(), f"nobody tells {names - everything.keys()}"
        known = set.union(*(everything[name] for name in names)) | ADDED
        used = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            used |= {label.strip() for label in group.split(",")}
        assert used <= known, f"{query}: no label {used - known}"


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_panels_have_a_unit_a_description_and_a_place_of_their_own(panel: dict[str, Any]) -> None:
    """No two lie over each other; what a curve is can be read."""
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24
    for other in BOARD["panels"]:
        there = other["gridPos"]
        apart_x = place["x"] + place["w"] <= there["x"] or there["x"] + there["w"] <= place["x"]
        apart_y = place["y"] + place["h"] <= there["y"] or there["y"] + there["h"] <= place["y"]
        assert other is panel or apart_x or apart_y, other["title"]
    if panel["type"] != "row":
        assert panel["description"]
        assert panel["targets"]
        assert panel["type"] == "status-history" or panel["fieldConfig"]["defaults"]["unit"]
        legends = {label for target in panel["targets"] for label in re.findall(r"{{(\w+)}}", target["legendFormat"])}
        for target in panel["targets"]:
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert not grouped or legends <= set(re.split(r",\s*", grouped[0])), "a legend names what was summed away"


def test_ids_are_unique_and_the_data_source_can_be_chosen() -> None:
    """It can be imported anywhere: no panel names a data source of its own."""
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    sources = {panel["datasource"]["uid"] for panel in BOARD["panels"] if panel["type"] != "row"}
    assert sources == {"${datasource}"}
    assert BOARD["templating"]["list"][0]["name"] == "datasource"
