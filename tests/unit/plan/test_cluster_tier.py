"""A tier on a cluster that the operator runs: what its conditions say after a look, and when servers may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kvstrata.api.cachetier import CacheTier, CacheTierStatus, SlotLoss
from kvstrata.api.conditions import ConditionType
from kvstrata.model.pods import ClusterReport
from kvstrata.model.redis.cluster import SLOTS, Cluster, Peer, ServerPod
from kvstrata.model.redis.credentials import CredentialLook, ServerCredentials
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.redis.cluster import ClusterState, cluster_state, known_as
from tests.topology.looks import Slots, cluster, even
from tests.unit.objects.builders import redis_tier

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def look(slots: Sequence[Slots], *, replicas: int = 1, **options: Any) -> Cluster:
    """A look at a cluster whose servers have the memory that they should."""
    found = cluster(slots, replicas=replicas, **options)
    return replace(found, servers={uid: replace(one, max_bytes=wanted_bytes()) for uid, one in found.servers.items()})


def wanted_bytes() -> int:
    state = cluster_state(World("demo", 1, bytes(64)), tier())
    assert state is not None
    return state.order.goal.max_bytes_each


def tier(**managed: Any) -> CacheTier:
    return redis_tier(capacity="30Gi", **{"shards": 3, "replicasPerShard": 1, **managed})


def formed(at: datetime, **status: Any) -> CacheTier:
    """A tier whose cluster has served before."""
    return tier().model_copy(update={"status": CacheTierStatus(formed_at=at, **status)})


def empty(of: Cluster) -> Cluster:
    """The same pods with servers that were started just now, and know nobody."""
    fresh = {
        uid: replace(one, peers=(Peer(one.node_id, "", 6379, "", True, None, 0, linked=True),), is_primary=True)
        for uid, one in of.servers.items()
    }
    return replace(of, servers=fresh)


def state_of(
    found: Cluster | None,
    of: CacheTier,
    *,
    failed: tuple[str, str] = ("", ""),
    lost: SlotLoss | None = None,
    locked_out: Sequence[str] = (),
) -> ClusterState:
    known = {} if found is None else {uid: known_as(pod) for uid, pod in found.pods.items()}
    refusing = [known.get(uid, uid) for uid in locked_out]
    refused = {name: ServerCredentials(name, "WrongPassword", "refuses the password") for name in refusing}
    pods = {} if found is None else {pod.name: pod for pod in found.pods.values()}
    reports = {} if found is None else {of.name: ClusterReport(found, NOW, *failed, lost)}
    looks = {of.name: CredentialLook(refused, NOW)}
    world = World("demo", 1, bytes(64), servers={of.name: pods}, clusters=reports, credentials=looks)
    state = cluster_state(world, of)
    assert state is not None
    return state


def condition(state: ClusterState, kind: ConditionType) -> tuple[str, str]:
    found = next(one for one in state.findings if one.type == kind)
    return str(found.status), found.reason


def test_before_the_first_look_nothing_is_claimed() -> None:
    state = state_of(None, tier())
    assert condition(state, ConditionType.SLOTS_COVERED) == ("Unknown", "Progressing")
    assert condition(state, ConditionType.REPLICATION_HEALTHY) == ("Unknown", "Progressing")
    assert state.pending is not None
    assert state.members == {0: 2, 1: 2, 2: 2}


def test_a_cluster_that_is_whole_is_ready_and_told_in_numbers() -> None:
    state = state_of(look(even(3)), tier())
    assert condition(state, ConditionType.SLOTS_COVERED) == ("True", "SlotsCovered")
    assert condition(state, ConditionType.REPLICATION_HEALTHY) == ("True", "ReplicasInStep")
    assert state.pending is None
    numbers = {"shards": 3, "shardsReady": 3, "replicas": 3, "progress": None}
    assert state.fields == {**numbers, "formedAt": "2026-01-01T00:00:00Z"}


def test_a_shard_that_does_not_answer_takes_readiness_away_and_is_counted_in_slots() -> None:
    state = state_of(look(even(3), away=[1]), tier())
    assert condition(state, ConditionType.SLOTS_COVERED) == ("False", "SlotsUncovered")
    assert condition(state, ConditionType.REPLICATION_HEALTHY) == ("False", "ReplicasMissing")
    assert state.pending is not None
    assert state.pending.reason == "SlotsUncovered"


def test_a_shard_that_is_no_longer_wanted_keeps_its_servers_until_it_has_no_slots() -> None:
    of = tier()
    full, empty = look(even(4)), look([*even(3), ()])
    assert state_of(full, of).members == {0: 2, 1: 2, 2: 2, 3: 2}
    assert state_of(empty, of).members == {0: 2, 1: 2, 2: 2}


def test_moving_slots_do_not_take_readiness_away() -> None:
    state = state_of(look(even(4)), tier())
    assert state.pending is None
    assert "moving slots" in str(state.fields["progress"])


def test_replicas_that_are_too_many_go_when_nothing_else_is_left_to_do() -> None:
    found = look(even(3), replicas=2)
    assert state_of(found, tier()).members == {0: 2, 1: 2, 2: 2}
    uid, server = next((uid, one) for uid, one in found.servers.items() if not one.is_primary)
    behind = replace(found, servers={**found.servers, uid: replace(server, link_up=False)})
    assert state_of(behind, tier()).members == {0: 3, 1: 3, 2: 3}


def test_what_a_server_refused_is_told_with_the_progress() -> None:
    state = state_of(look([*even(2), ()]), tier(), failed=("CommandFailed", "CLUSTER MEET: no"))
    assert str(state.fields["progress"]).endswith("; CLUSTER MEET: no")


def test_pods_whose_statefulset_is_gone_are_about_to_go_though_one_of_its_name_is_there() -> None:
    of = tier()
    pods = {
        f"kvs-{of.name}-redis-{shard}-0": ServerPod(
            f"kvs-{of.name}-redis-{shard}-0", f"uid-{shard}", shard, 0, None, True, False, "r", controller=controller
        )
        for shard, controller in enumerate(("first", "first", "second", ""))
    }
    live = {
        ("StatefulSet", names.redis_shard(of.name, shard)): {"metadata": {"uid": "second", "generation": 1}}
        for shard in (1, 2, 3)
    }
    state = cluster_state(World("demo", 1, bytes(64), servers={of.name: pods}, children=live), of)
    assert state is not None
    assert state.order.goal.doomed == {"uid-0", "uid-1"}


class TestLosses:
    """What no look can know, because all-new servers and those that lost everything look alike."""

    def test_servers_that_hold_nothing_are_a_beginning_where_none_served_before(self) -> None:
        state = state_of(empty(look(even(3))), tier())
        assert condition(state, ConditionType.SLOTS_COVERED) == ("False", "Progressing")
        assert "lastLoss" not in state.fields

    def test_servers_that_hold_nothing_are_a_loss_where_some_served_before(self) -> None:
        state = state_of(empty(look(even(3))), formed(NOW - timedelta(hours=1)))
        assert condition(state, ConditionType.SLOTS_COVERED) == ("False", "EverythingLost")
        assert state.pending is not None
        assert state.pending.reason == "EverythingLost"
        assert "since 2025-12-31T23:00:00Z: blocks are misses" in state.pending.message

    def test_pods_that_are_all_gone_are_a_loss(self) -> None:
        gone = replace(look(even(3)), pods={}, servers={})
        state = state_of(gone, formed(NOW - timedelta(hours=1)))
        assert condition(state, ConditionType.SLOTS_COVERED) == ("False", "EverythingLost")

    def test_servers_that_only_do_not_answer_may_have_everything_still(self) -> None:
        state = state_of(look(even(3), away=[0, 1, 2]), formed(NOW - timedelta(hours=1)))
        assert condition(state, ConditionType.SLOTS_COVERED) == ("False", "SlotsUncovered")

    def test_a_cluster_that_was_formed_again_says_since_when_and_what_it_lost(self) -> None:
        lost = SlotLoss(at=NOW - timedelta(seconds=2), slots=SLOTS)
        state = state_of(look(even(3)), formed(NOW - timedelta(hours=1)), lost=lost)
        assert condition(state, ConditionType.SLOTS_COVERED) == ("True", "SlotsCovered")
        assert state.fields["formedAt"] == "2026-01-01T00:00:00Z"
        assert state.fields["lastLoss"] == {"at": "2025-12-31T23:59:58Z", "slots": SLOTS}
        assert "the content of 16384 slots was lost at 2025-12-31T23:59:58Z" in state.findings[0].message

    def test_an_operator_that_has_just_started_keeps_what_the_one_before_told(self) -> None:
        before = formed(NOW - timedelta(hours=1), last_loss=SlotLoss(at=NOW - timedelta(minutes=9), slots=5462))
        state = state_of(look(even(3)), before)
        assert state.fields["lastLoss"] == {"at": "2025-12-31T23:51:00Z", "slots": 5462}
        assert "formedAt" not in state.fields
        assert state_of(None, before).fields["lastLoss"]["slots"] == 5462

    def test_a_shards_loss_is_no_new_formation(self) -> None:
        state = state_of(look(even(3)), formed(NOW - timedelta(hours=1)), lost=SlotLoss(at=NOW, slots=5462))
        assert state.fields["lastLoss"]["slots"] == 5462
        assert "formedAt" not in state.fields


def test_servers_that_let_nobody_in_are_named_as_such_until_the_last_is_replaced() -> None:
    found = look(even(3), away=[0, 1, 2])
    state = state_of(found, formed(NOW - timedelta(hours=1)), locked_out=[*found.pods, "of a pod that is gone"])
    assert condition(state, ConditionType.SLOTS_COVERED) == ("Unknown", "PasswordsLost")
    assert condition(state, ConditionType.REPLICATION_HEALTHY) == ("False", "PasswordsLost")
    assert state.pending is not None
    assert state.pending.reason == "PasswordsLost"
    assert "6 of 6 servers admit no password in a Secret" in state.pending.message
    assert state.order.goal.locked_out == frozenset(found.pods)
