"""A node's cache and the manager that only hears of it answer the same, whatever happens in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from prfaas_net.cache.changes import deltas_of, runs_of
from prfaas_net.cache.events import Snapshot
from prfaas_net.cache.manager import CacheManager
from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.prefix_tree import CacheChange
from tests.cache import test_prefix_model as model


class ToldCache(PrefixCache):
    """Whoever takes its changes also tells the manager of them, as a node does."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kinds = frozenset(given[2])
        self.manager = CacheManager("layout", model.TOKENS, self.kinds)
        self.seq = 0
        self.start()

    def start(self) -> None:
        """A listener comes (again): a snapshot."""
        stored = tuple(runs_of(self.snapshot_changes(), model.SCOPE.root))
        self.tell(Snapshot("n", "b", "layout", model.TOKENS, self.seq, self.kinds, stored))

    def drain_changes(self) -> list[CacheChange]:
        changes = super().drain_changes()
        for delta in deltas_of(changes, self.seq + 1, model.SCOPE.root):
            self.seq = delta.seq
            self.tell(delta)
        return changes

    def tell(self, event: Any) -> None:
        outcome = self.manager.apply("n", "x", event.to_json(), now=0)
        assert outcome.applied, outcome


def told(machine: type[model.CacheMachine]) -> type[model.CacheMachine]:
    class Told(machine):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.cache = ToldCache(
                model.POOL_BLOCKS, model.BLOCK_BYTES, self.groups, model.TOKENS, rows_alone=self.rows_alone
            )

        @rule()
        def listen_again(self) -> None:
            self._follow()
            self.cache.start()

        @invariant()
        def the_manager_answers_the_same(self) -> None:
            self._follow()
            for prompt in model.LONGEST:
                keys, n_tokens = model.keys_of(prompt), len(prompt) * model.TOKENS + 1
                found = self.cache.manager.match(keys, n_tokens=n_tokens).node("n")
                usable, rows = (found.usable_tokens, found.rows_tokens) if found else (0, 0)
                assert usable == self._expected_tokens(prompt, n_tokens, True)
                assert rows == self._expected_tokens(prompt, n_tokens, False)

    return Told


MACHINES = [model.HybridMachine, model.ThreeKindsOnDecodeMachine, model.DenseMachine, model.LinearMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_manager_knows_what_the_node_holds(machine: type[model.CacheMachine]) -> None:
    case = told(machine).TestCase
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True)
    case().runTest()
