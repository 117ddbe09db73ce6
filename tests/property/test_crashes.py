"""The operator dies at any write of any plan, and the end is the same.

Every scenario runs once without a fault, which counts its writes. Then it runs twice for each of them: the process is
gone before the API server has the write, and after it but before the answer. A fresh process, which knows nothing but
what the API server and the pods say, goes on. The end must be the same but for chance (`normal`), nothing may have
happened twice and no moment on the way may have been unsafe (`history`), and another pass must write nothing.

The API server is the one in memory, which `tests/apiserver/test_memory_api.py` holds against the real one;
`tests/apiserver/test_crashes.py` does this with the real process and server, for a sample. To Redis the operator of
this version writes nothing, so there is no write to die at: it asks with PING and INFO only, which
`test_redis_is_only_read.py` tests against a server that records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.support.worlds import Killed, Simulation

from .history import Effects, replay
from .normal import differences, normal
from .scenarios import CLAIMED, SCENARIOS, Scenario, prepared

CLAIM = pytest.mark.claim("wherever the operator dies, the end is the same and nothing is done twice")
HISTORIES = [pytest.param(name, marks=CLAIM if name in CLAIMED else ()) for name in SCENARIOS]


@dataclass(frozen=True, slots=True)
class Reference:
    """A scenario without faults: where it begins, its writes, its end and what happened on the way."""

    start: Simulation
    writes: int
    end: dict[str, Any]
    effects: Effects


@cache
def reference(name: str) -> Reference:
    scenario = SCENARIOS[name]
    start = prepared(scenario)
    simulation = start.clone()
    written = 0

    def count(verb: str, kind: str, name: str) -> None:
        nonlocal written
        written += 1

    simulation.kube.after_write = count
    run(scenario, simulation)
    effects = replay(start.kube.objects, simulation.kube.api.history, by_hand=scenario.by_hand)
    return Reference(start, written, normal(simulation), effects)


def run(scenario: Scenario, simulation: Simulation) -> int:
    """Go through the steps; return how often the operator died. Each death is followed by a restart."""
    deaths = 0
    for step in scenario.steps:
        for attempt in range(100):
            try:
                if attempt == 0:
                    step(simulation)
                simulation.come_to_rest()
                break
            except Killed:
                deaths += 1
                simulation.restart()
        else:
            raise AssertionError("the operator dies for ever without getting on")
    return deaths


def check(scenario: Scenario, simulation: Simulation, expected: Reference) -> None:
    """Assert that the end is the expected one, that nothing happened twice, and that all is at rest."""
    assert differences(expected.end, normal(simulation)) == []
    effects = replay(expected.start.kube.objects, simulation.kube.api.history, by_hand=scenario.by_hand)
    assert effects.counts() == expected.effects.counts()
    rollouts, allowed = effects.rollouts(), expected.effects.rollouts()
    assert all(rollouts[name] <= allowed[name] for name in rollouts), (rollouts, allowed)
    writes = simulation.kube.writes
    simulation.enqueue_all()
    simulation.settle()
    assert simulation.kube.writes == writes, simulation.kube.log[writes - simulation.kube.writes :]


def crashes(name: str) -> Iterator[tuple[int, bool, Simulation]]:
    """Yield a world for every write, before and after it."""
    expected = reference(name)
    for number in range(1, expected.writes + 1):
        for after in (False, True):
            simulation = expected.start.clone()
            simulation.kill_at(number, after=after)
            yield number, after, simulation


@pytest.mark.parametrize("name", HISTORIES)
def test_an_operator_that_dies_at_any_write_ends_where_it_would_have_without(name: str) -> None:
    scenario, expected = SCENARIOS[name], reference(name)
    assert expected.writes > 0
    for number, after, simulation in crashes(name):
        try:
            deaths = run(scenario, simulation)
            assert deaths == 1, "the write at which it was to die never came"
            check(scenario, simulation, expected)
        except AssertionError as error:
            error.add_note(f"killed {'after' if after else 'before'} write {number} of {expected.writes}")
            raise


@pytest.mark.parametrize("name", HISTORIES)
def test_an_operator_that_dies_again_and_again_gets_there_all_the_same(name: str) -> None:
    """Each process has three writes: a bundle's shard and root are two, and a process that had one never got on."""
    scenario, expected = SCENARIOS[name], reference(name)
    simulation = expected.start.clone()
    restart = simulation.restart

    def restart_to_die_again() -> None:
        restart()
        simulation.kill_at(3, after=True)

    simulation.restart = restart_to_die_again  # type: ignore[method-assign]
    simulation.kill_at(3, after=True)
    run(scenario, simulation)
    simulation.kube.after_write = lambda verb, kind, name: None
    check(scenario, simulation, expected)
