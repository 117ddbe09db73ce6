"""Whatever is done to a pool in whichever order: readers only ever get what was warm, and the end follows its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.messages.pools import WarmOutcome
from kvstrata.contract.policy.cache_view import reads_of
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import chunk_hashes
from tests.support.amounts import examples
from tests.support.objects import invalidation
from tests.support.worlds import Killed, Simulation

from .history import replay
from .normal import read_bundle
from .scenarios import MANUAL, POOL, SHARING
from .test_properties import QUICK

TEXTS = ("You are a patient assistant who answers at length.", "You are an assistant without patience, and brief.")
Step = Callable[[Simulation], None]


def _edit(**spec: Any) -> Step:
    return lambda simulation: simulation.edit(POOL, "manual", **spec)


def _lose(simulation: Simulation) -> None:
    for chunks in simulation.renderer.stored.values():
        chunks.clear()


def _outcome(outcome: WarmOutcome) -> Step:
    def act(simulation: Simulation) -> None:
        simulation.renderer.outcome = outcome

    return act


def _invalidate(simulation: Simulation) -> None:
    simulation.put(invalidation(f"now-{len(simulation.kube.objects)}", scope={"pool": "manual"}))


def _check(simulation: Simulation, warm: set[str]) -> None:
    """Assert that readers are only sent to what is all stored, or was; add to `warm` what is."""
    found = read_bundle(simulation.kube.objects, "tiny")
    assert found is not None
    for version in (one for shard in found.pools.values() for one in shard.versions):
        if set(chunk_hashes(version.hashes)) <= simulation.renderer.stored.get(version.keyspace[:SCOPE_DIGITS], set()):
            warm.add(version.keyspace)
    assert {one for read in reads_of(found).values() for one in read} <= warm


steps = st.one_of(
    st.sampled_from(TEXTS).map(lambda text: _edit(prefixes=[{"name": "text", "text": text}])),
    st.sampled_from(("Lazy", "Eager")).map(lambda how: _edit(invalidation=how)),
    st.integers(1, 3).map(lambda generation: _edit(cacheGeneration=generation)),
    st.sampled_from(([{"name": "cpu"}], [{"name": "shared"}], [{"name": "gone"}])).map(
        lambda tiers: _edit(tiers=tiers)
    ),
    st.booleans().map(lambda pinned: _edit(pinned=pinned)),
    st.sampled_from((WarmOutcome.STORED, WarmOutcome.INCOMPLETE)).map(_outcome),
    st.just(_invalidate),
    st.just(_lose),
    st.sampled_from((1.0, 60.0, 400.0)).map(lambda seconds: lambda simulation: simulation.advance(seconds)),
    st.sampled_from(("pod-0", "pod-1")).map(lambda name: lambda simulation: simulation.ack(name)),
    st.just(lambda simulation: simulation.come_to_rest()),
    st.just(lambda simulation: simulation.restart()),
    st.integers(1, 6).map(lambda number: lambda simulation: simulation.kill_at(number, after=True)),
)


@settings(max_examples=examples(25), phases=QUICK)
@given(st.lists(steps, min_size=1, max_size=8))
def test_readers_get_nothing_but_what_is_warm_and_the_end_is_that_of_the_spec(chosen: list[Step]) -> None:
    simulation = Simulation(*SHARING)
    simulation.come_to_rest()
    start = dict(simulation.kube.objects)
    simulation.kube.api.history.clear()
    simulation.put(MANUAL)
    warm: set[str] = set()
    for step in chosen:
        try:
            step(simulation)
            simulation.settle()
        except Killed:
            simulation.restart()
        _check(simulation, warm)
    simulation.kube.before_write = simulation.kube.after_write = lambda verb, kind, name: None
    simulation.restart()
    replay(start, simulation.kube.api.history)
    _outcome(WarmOutcome.STORED)(simulation)
    simulation.edit(POOL, "manual", tiers=[{"name": "shared"}], pinned=None)
    for _ in range(3):
        simulation.advance(700)
        simulation.come_to_rest()
    assert simulation.condition(POOL, "manual", "Ready") == ("True", "Published")
    found = read_bundle(simulation.kube.objects, "tiny")
    assert found is not None
    (version,) = found.pools["manual"].versions
    assert version.manifest == simulation.status(POOL, "manual")["manifestDigest"]
    readers = {found.entries[tenant].keyspace for tenant in "abc"}
    assert reads_of(found) == dict.fromkeys(readers, (version.keyspace,))
    assert simulation.unsettled() == {}
