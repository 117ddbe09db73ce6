"""A leader that was frozen while it wrote: another one takes over and comes to rest, and only then the write arrives.

Done at every write of the scenarios in which data keys are drawn and dropped, because a key that is lost or drawn twice
makes blocks unreadable for good. What the late write may not do is read off the history of the API server (`history`),
and the end must be the one that a single leader comes to.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.support.memory_kube import MemoryKube
from tests.support.worlds import Killed, Simulation

from .history import replay
from .normal import differences, normal
from .scenarios import SCENARIOS
from .test_crashes import reference

NAMES = (
    "a tier comes that requires encryption",
    "epochs roll where data keys are",
)


def successor(frozen: Simulation) -> Simulation:
    """Return another leader of the same API server, which read everything and came to rest."""
    other = Simulation()
    other.now, other.acks, other.boots = frozen.now, dict(frozen.acks), frozen.boots
    other.random.seed(frozen.random.random())
    other.kube = MemoryKube(frozen.kube.api)
    other.restart()
    other.come_to_rest()
    return other


@pytest.mark.parametrize("name", NAMES)
def test_a_write_that_arrives_after_the_next_leader_is_done_loses_no_key_and_draws_none_twice(name: str) -> None:
    scenario, expected = SCENARIOS[name], reference(name)
    assert expected.effects.data_keys
    for number in range(1, expected.writes + 1):
        leader = frozen = expected.start.clone()
        successors: list[Simulation] = []
        count = 0

        def freeze(
            verb: str,
            kind: str,
            name: str,
            frozen: Simulation = frozen,
            successors: list[Simulation] = successors,
            number: int = number,
        ) -> None:
            nonlocal count
            count += 1
            if count == number:
                frozen.kube.before_write = _kill
                frozen.kube.after_write = _kill
                successors.append(successor(frozen))

        frozen.kube.before_write = freeze
        for step in scenario.steps:
            step(leader)
            with suppress(Killed):
                leader.come_to_rest()
            if leader is frozen and successors:
                (leader,) = successors
                leader._deliver()
                leader.come_to_rest()
        assert leader is not frozen, "the write at which it was to freeze never came"
        assert differences(expected.end, normal(leader)) == [], f"frozen at write {number} of {expected.writes}"
        replay(expected.start.kube.objects, leader.kube.api.history).counts()
        assert leader.unsettled() == {}


def _kill(verb: str, kind: str, name: str) -> None:
    raise Killed
