"""Rules for slots on their way: what is open goes on or is closed, every shard gets its part, empty ones go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.model.redis.cluster import Cluster, SlotJob
from kvstrata.plan.redis.topology.moves import (
    SLOTS_AT_ONCE,
    SLOTS_PER_JOB,
    jobs_under_way,
    open_slots,
    removal,
    spread,
    towards_lost,
)
from kvstrata.plan.redis.topology.steps import MoveOrder, Step, StepReason
from kvstrata.plan.redis.topology.view import View, count
from tests.topology.looks import cluster, even, node, view

pytestmark = pytest.mark.claim("slots move a few at a time, and a move that was begun is finished or taken back")

NOBODY = "f" * 40
FIRST = 5_460
"""A slot of shard 0."""

RULES = (towards_lost, jobs_under_way, open_slots, spread, removal)


def step(look: View) -> Step | None:
    return next((found for rule in RULES if (found := rule(look)) is not None), None)


def order(look: View) -> MoveOrder:
    found = step(look)
    assert found is not None
    assert len(found.moves) == 1, found
    return found.moves[0]


class TestScaling:
    def test_a_cluster_with_equal_parts_is_left_alone(self) -> None:
        assert step(view(cluster(even(3)), 3)) is None

    def test_a_new_shard_is_given_slots_a_few_at_a_time(self) -> None:
        found = step(view(cluster([*even(3), ()]), 4))
        assert found is not None
        assert found.reason is StepReason.MOVING_SLOTS
        assert found.message == "moving slots: 0 of 4,096"
        assert found.moves == (
            MoveOrder(node(0), node(3), ((5205, 5460),), atomic=False, drops=False, movable_bytes=8 << 20),
        )
        assert count(found.moves[0].slots) == SLOTS_AT_ONCE

    def test_who_has_not_heard_of_the_owners_epoch_gets_no_slots_yet(self) -> None:
        found = cluster([*even(3), ()])
        ahead = {
            "uid-0-0": replace(
                found.servers["uid-0-0"],
                peers=tuple(
                    replace(peer, epoch=99) if peer.node_id == node(0) else peer
                    for peer in found.servers["uid-0-0"].peers
                ),
            )
        }
        late = step(view(replace(found, servers={**found.servers, **ahead}), 4))
        assert late is not None
        assert (late.reason, late.moves) == (StepReason.WAITING_FOR_GOSSIP, ())
        heard = {"uid-3-0": replace(found.servers["uid-3-0"], current_epoch=99)}
        moved = step(view(replace(found, servers={**found.servers, **ahead, **heard}), 4))
        assert moved is not None
        assert moved.reason is StepReason.MOVING_SLOTS

    def test_progress_counts_what_a_new_shard_has(self) -> None:
        slots = [((0, 4226),), even(3)[1], even(3)[2], ((4227, 5460),)]
        found = step(view(cluster(slots), 4))
        assert found is not None
        assert found.message == "moving slots: 1,234 of 4,096"

    def test_a_shard_beyond_the_goal_is_drained(self) -> None:
        found = step(view(cluster(even(4)), 3))
        assert found is not None
        assert {(one.source, one.target) for one in found.moves} == {(node(3), node(2))}, "its neighbour gets its part"
        assert found.message == "moving slots: 0 of 4,096"

    def test_progress_counts_what_a_drained_shard_gave(self) -> None:
        slots = [*even(4)[:2], ((8192, 13_287),), ((13_288, 16_383),)]
        found = step(view(cluster(slots), 3))
        assert found is not None
        assert found.message == "moving slots: 1,000 of 4,096"

    def test_two_new_shards_are_filled_at_the_same_time_from_different_ones(self) -> None:
        found = step(view(cluster([*even(3), (), ()]), 5))
        assert found is not None
        ends = [end for one in found.moves for end in (one.source, one.target)]
        assert len(found.moves) == 2
        assert len(set(ends)) == 4

    def test_only_where_both_ends_can_do_so_slots_move_at_one_instant(self) -> None:
        new = order(view(cluster([*even(3), ()], atomic=True), 4))
        assert new.atomic
        assert count(new.slots) == SLOTS_PER_JOB
        mixed = cluster([*even(3), ()], atomic=True)
        servers = mixed.servers | {"uid-3-0": replace(mixed.servers["uid-3-0"], moves_atomically=False)}
        assert not order(view(replace(mixed, servers=servers), 4)).atomic

    def test_slots_that_go_without_what_they_hold_are_not_moved_atomically(self) -> None:
        found = order(view(cluster([*even(3), ()], atomic=True), 4, drops=True))
        assert found.drops
        assert not found.atomic

    def test_nothing_moves_while_a_server_with_slots_is_away_or_a_new_shard_has_none(self) -> None:
        assert step(view(cluster([*even(3), ()], away=[1]), 4)) is None
        assert step(view(cluster(even(3)), 4)) is None

    def test_slots_wait_for_a_server_that_does_not_serve_yet(self) -> None:
        found = cluster([*even(3), ()])
        servers = found.servers | {"uid-3-0": replace(found.servers["uid-3-0"], cluster_ok=False)}
        waiting = step(view(replace(found, servers=servers), 4))
        assert waiting is not None
        assert waiting.waits
        assert "kvs-t-redis-3-0" in waiting.message

    def test_the_slots_of_a_new_shard_go_to_the_server_that_the_others_of_it_replicate(self) -> None:
        found = order(view(cluster([*even(3), ()], replicas=1), 4))
        assert found.target == node(3)


class TestShardsThatGo:
    def test_a_shard_beyond_the_goal_goes_when_it_has_no_slots(self) -> None:
        found = step(view(cluster([*even(3), ()], replicas=1), 3))
        assert found is not None
        assert (found.reason, found.drained) == (StepReason.REMOVING_SHARD, (3,))
        assert not found.waits

    def test_not_while_one_that_does_not_answer_may_have_slots(self) -> None:
        assert step(view(cluster(even(4), away=[3]), 3)) is None

    def test_a_shard_that_never_answers_and_has_no_slots_goes(self) -> None:
        found = step(view(cluster([*even(3), ()], away=[3]), 3))
        assert found is not None
        assert found.drained == (3,)

    def test_one_whose_pods_are_on_their_way_out_is_only_waited_for(self) -> None:
        found = cluster([*even(3), ()])
        pods = {uid: replace(pod, deleting=pod.shard == 3) for uid, pod in found.pods.items()}
        waiting = step(view(replace(found, pods=pods), 3))
        assert waiting is not None
        assert waiting.waits

    def test_all_empty_ones_go_at_once(self) -> None:
        found = step(view(cluster([*even(3), (), ()]), 3))
        assert found is not None
        assert found.drained == (3, 4)


def opened(*, at_source: bool = True, at_target: bool = True, slots: int = 4, **others: object) -> Cluster:
    """Slot FIRST on its way from shard 0 to shard 3."""
    return cluster(
        [*even(3), *([()] * (slots - 3))],
        migrating={0: {FIRST: node(3)}} if at_source else {},
        importing={3: {FIRST: node(0)}} if at_target else {},
        **others,  # type: ignore[arg-type]
    )


class TestOpenSlots:
    @pytest.mark.parametrize(("at_source", "at_target"), [(True, True), (True, False), (False, True)])
    def test_a_move_that_was_begun_at_either_end_goes_on(self, at_source: bool, at_target: bool) -> None:
        for shards in (3, 4):
            found = step(view(opened(at_source=at_source, at_target=at_target), shards))
            assert found is not None
            assert found.reason is StepReason.REPAIRING_SLOTS
            assert [(one.source, one.target, one.slots) for one in found.moves] == [
                (node(0), node(3), ((FIRST, FIRST),))
            ]
            assert found.message == "going on with slot 5460 from kvs-t-redis-0-0 to kvs-t-redis-3-0"

    def test_a_target_that_has_no_owner_for_the_slot_is_told_it_first(self) -> None:
        found = opened()
        target = found.servers["uid-3-0"]
        peers = tuple(replace(one, slots=((0, FIRST - 1),)) if one.node_id == node(0) else one for one in target.peers)
        told = step(view(replace(found, servers={**found.servers, "uid-3-0": replace(target, peers=peers)}), 4))
        assert told is not None
        assert told.reason is StepReason.REPAIRING_SLOTS
        assert [(one.node_id, one.words) for one in told.commands] == [
            (node(3), ("CLUSTER", "SETSLOT", str(FIRST), "NODE", node(0)))
        ]

    def test_it_goes_on_key_by_key_also_where_slots_could_move_at_one_instant(self) -> None:
        assert not order(view(opened(atomic=True), 4)).atomic

    def test_one_whose_target_has_it_already_is_closed_at_the_source(self) -> None:
        slots = [((0, FIRST - 1),), *even(3)[1:], ((FIRST, FIRST),)]
        found = step(view(cluster(slots, migrating={0: {FIRST: node(3)}}), 4))
        assert found is not None
        assert [(one.node_id, one.words) for one in found.commands] == [
            (node(0), ("CLUSTER", "SETSLOT", str(FIRST), "STABLE"))
        ]

    def test_a_source_that_has_not_heard_that_it_gave_the_slot_away_is_told(self) -> None:
        slots = [even(3)[0], *even(3)[1:], ((FIRST, FIRST),)]
        found = step(view(cluster(slots, migrating={0: {FIRST: node(3)}}), 4))
        assert found is not None
        assert [one.words for one in found.commands] == [("CLUSTER", "SETSLOT", str(FIRST), "NODE", node(3))]

    def test_an_owner_that_still_says_it_imports_is_closed(self) -> None:
        found = step(view(cluster(even(3), importing={0: {FIRST: node(1)}}), 3))
        assert found is not None
        assert [one.words[-1] for one in found.commands] == ["STABLE"]

    def test_one_whose_target_is_gone_is_closed_at_the_owner(self) -> None:
        found = step(view(opened(gone=[3]), 3))
        assert found is not None
        assert [(one.source, one.target) for one in found.moves] == [(node(0), node(0))]
        assert "gone" in found.message

    def test_one_whose_target_does_not_answer_is_waited_for(self) -> None:
        found = step(view(opened(away=[3]), 4))
        assert found is not None
        assert found.waits

    def test_one_whose_target_failed_over_goes_on_to_its_heir(self) -> None:
        found = opened(replicas=1)
        promoted = {}
        for uid, server in found.servers.items():
            turned = {node(3): (False, node(3, 1)), node(3, 1): (True, None)}
            peers = tuple(
                replace(peer, is_primary=turned[peer.node_id][0], primary=turned[peer.node_id][1])
                if peer.node_id in turned
                else peer
                for peer in server.peers
            )
            promoted[uid] = replace(server, peers=peers)
        assert order(view(replace(found, servers=promoted), 4)).target == node(3, 1)

    def test_what_was_imported_from_a_lost_server_goes_on_from_whoever_has_its_slots_now(self) -> None:
        found = order(view(cluster([*even(3), ()], importing={3: {FIRST: NOBODY}}), 4))
        assert (found.source, found.target) == (node(0), node(3))

    def test_before_anybody_forgets_a_lost_target_the_slot_is_closed(self) -> None:
        found = towards_lost(view(opened(gone=[3]), 4))
        assert found is not None
        assert [(one.source, one.target) for one in found.moves] == [(node(0), node(0))]

    def test_what_came_from_a_lost_server_stays_with_its_slot_where_it_came_to(self) -> None:
        found = towards_lost(view(opened(gone=[0]), 4))
        assert found is not None
        assert [(one.node_id, one.words) for one in found.commands] == [
            (node(3), ("CLUSTER", "SETSLOT", str(FIRST), "NODE", node(3)))
        ]

    def test_a_lost_target_that_had_the_slot_already_is_nothing_to_rescue(self) -> None:
        slots = [((0, FIRST - 1),), *even(3)[1:], ((FIRST, FIRST),)]
        look = view(cluster(slots, migrating={0: {FIRST: node(3)}}, gone=[3]), 4)
        assert towards_lost(look) is None

    def test_what_was_imported_from_another_than_the_owner_is_cleared_away(self) -> None:
        found = order(view(cluster([*even(3), ()], importing={3: {FIRST: node(1)}}), 4))
        assert (found.source, found.target) == (node(0), node(0))

    def test_slots_between_the_same_two_servers_are_one_order(self) -> None:
        both = {FIRST: node(3), FIRST - 1: node(3)}
        found = order(view(cluster([*even(3), ()], migrating={0: both}), 4))
        assert found.slots == ((FIRST - 1, FIRST),)

    def test_a_replica_that_says_it_is_open_is_not_asked_to_close_it(self) -> None:
        found = cluster(even(3), replicas=1)
        server = found.servers["uid-0-1"]
        itself = replace(server.itself, importing={FIRST: node(1)})
        servers = found.servers | {"uid-0-1": replace(server, peers=(itself, *server.peers[1:]))}
        assert step(view(replace(found, servers=servers), 3)) is None


class TestAtomicJobs:
    def test_a_job_that_is_under_way_is_waited_for_whatever_the_goal_is_now(self) -> None:
        job = SlotJob(((5000, 5460),), node(3))
        for shards in (3, 4):
            found = order(view(cluster([*even(3), ()], atomic=True, jobs={0: [job]}), shards))
            assert found.atomic
            assert (found.source, found.target, found.slots) == (node(0), node(3), ((5000, 5460),))
