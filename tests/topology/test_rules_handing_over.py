"""Slots that seem unclaimed because a look is not atomic, and slots that two servers left to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvstrata.model.redis.cluster import Cluster, SlotRange
from kvstrata.plan.redis.topology import StepReason
from kvstrata.plan.redis.topology.view import count
from tests.topology.looks import cluster, even, goal, node, step

pytestmark = pytest.mark.claim("no slot is given away while another server takes it over")

MOVING: SlotRange = (5205, 5243)
LEFT: tuple[SlotRange, ...] = ((0, 5204), (5244, 5460))


def reporting(look: Cluster, uid: str, slots: Mapping[str, tuple[SlotRange, ...]]) -> Cluster:
    """Let one server report these slots of servers, itself included."""
    server = look.servers[uid]
    peers = tuple(replace(peer, slots=slots.get(peer.node_id, peer.slots)) for peer in server.peers)
    return replace(look, servers={**look.servers, uid: replace(server, peers=peers)})


def handing_over() -> Cluster:
    """The target was asked before it owned the slots, and the source after it had given them up."""
    first = cluster([*even(3), ()], importing={3: dict.fromkeys(range(5205, 5244), node(0))})
    return reporting(first, "uid-0-0", {node(0): LEFT, node(3): (MOVING,)})


def test_slots_between_two_answers_of_a_look_wait_for_the_next_look() -> None:
    found = step(replace(handing_over(), unclaimed_before=()), goal(4))
    assert found is not None
    assert found.waits


def test_slots_that_servers_left_to_each_other_are_given_and_not_called_lost() -> None:
    found = step(handing_over(), goal(4))
    assert found is not None
    assert (found.reason, found.lost) == (StepReason.REPAIRING_SLOTS, ())
    assert found.commands


def test_slots_that_one_server_dropped_are_lost_though_others_attribute_them_to_it() -> None:
    """CLUSTER DELSLOTSRANGE on their owner, which may hold keys of them."""
    found = step(reporting(cluster([*even(3), ()]), "uid-0-0", {node(0): LEFT}), goal(4))
    assert found is not None
    assert (found.reason, found.lost) == (StepReason.SLOTS_LOST, (MOVING,))


def test_slots_without_an_owner_in_two_looks_are_lost_and_no_others() -> None:
    look = cluster([*even(3), ()])
    for uid in look.servers:
        look = reporting(look, uid, {node(0): LEFT})
    found = step(replace(look, unclaimed_before=((5205, 5210),)), goal(4))
    assert found is not None
    assert (found.reason, count(found.lost)) == (StepReason.SLOTS_LOST, 6)


def test_a_third_server_gets_no_slots_that_a_drained_one_hands_over() -> None:
    look = reporting(cluster(even(4)), "uid-3-0", {node(3): ((12327, 16383),), node(2): ((8192, 12326),)})
    found = step(replace(look, unclaimed_before=()), goal(3))
    assert found is not None
    assert found.waits
    assert not found.commands
