"""Who has which slots, by what servers claim: the same as asking of each slot who claims it with the highest epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.model.redis.cluster import SLOTS, SlotRange
from kvstrata.plan.redis.topology.health import uncovered
from kvstrata.plan.redis.topology.view import View, count, ranges
from tests.support.amounts import examples
from tests.topology import looks

pytestmark = pytest.mark.claim("of several owners of a slot the one with the highest epoch counts")

EDGES = (0, 1, 2, 5_000, 5_001, 12_000, SLOTS - 1, SLOTS)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[SlotRange, ...]:
    edges = sorted(draw(st.sets(st.sampled_from(EDGES), max_size=6)))
    return tuple((first, last - 1) for first, last in zip(edges[::2], edges[1::2], strict=False))


@settings(max_examples=examples(60))
@given(claims=st.lists(st.tuples(_ranges(), st.integers(1, 3)), min_size=3, max_size=3))
def test_of_several_claims_the_highest_epoch_counts_and_of_equals_the_first_heard(
    claims: list[tuple[tuple[SlotRange, ...], int]],
) -> None:
    told = looks.cluster([slots for slots, _ in claims])
    by_pod = dict(zip(told.servers, (epoch for _, epoch in claims), strict=True))
    servers = {
        uid: replace(one, peers=tuple(replace(peer, epoch=by_pod[uid]) for peer in one.peers))
        for uid, one in told.servers.items()
    }
    view = View(replace(told, servers=servers), looks.goal(3))

    owners: list[str | None] = [None] * SLOTS
    epochs = [0] * SLOTS
    for server in view.servers.values():
        for first, last in server.itself.slots:
            for slot in range(first, last + 1):
                if server.itself.epoch > epochs[slot]:
                    owners[slot], epochs[slot] = server.node_id, server.itself.epoch
    assert view.owners == owners
    assert view.unowned == ranges(slot for slot, owner in enumerate(owners) if owner is None)
    for node in view.servers:
        assert view.slots.get(node, ()) == ranges(slot for slot, owner in enumerate(owners) if owner == node)


def test_slots_of_nobody_and_of_who_does_not_answer_are_uncovered() -> None:
    whole = looks.cluster(looks.even(3), away=[1])
    assert count(uncovered(View(whole, looks.goal(3)))) == count(looks.even(3)[1])
    assert uncovered(View(replace(whole, servers={}), looks.goal(3))) == ((0, SLOTS - 1),)
