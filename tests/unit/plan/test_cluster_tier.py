"""A tier on a cluster that the operator runs: what its conditions say after a look, and when servers may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.conditions import ConditionType
from kvstrata.model.facts import ClusterReport
from kvstrata.model.topology import Cluster
from kvstrata.model.world import World
from kvstrata.plan.cluster import ClusterState, cluster_state
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


def state_of(found: Cluster | None, of: CacheTier, *, failed: tuple[str, str] = ("", "")) -> ClusterState:
    pods = {} if found is None else {pod.name: pod for pod in found.pods.values()}
    reports = {} if found is None else {of.name: ClusterReport(found, NOW, *failed)}
    state = cluster_state(World("demo", 1, bytes(64), servers={of.name: pods}, clusters=reports), of)
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
    assert state.fields == {"shards": 3, "shardsReady": 3, "replicas": 3, "progress": None}


def test_a_shard_that_does_not_answer_takes_readiness_away_and_is_counted_in_slots() -> None:
    state = state_of(look(even(3), away=[1]), tier())
    assert condition(state, ConditionType.SLOTS_COVERED) == ("False", "SlotsUncovered")
    assert condition(state, ConditionType.REPLICATION_HEALTHY) == ("False", "ReplicasMissing")
    assert state.pending is not None
    assert state.pending.reason == "SlotsUncovered"


def test_without_replicas_the_spec_is_kept_and_its_price_is_named() -> None:
    state = state_of(look(even(3), replicas=0), tier(replicasPerShard=0))
    assert condition(state, ConditionType.REPLICATION_HEALTHY) == ("True", "NoReplicas")


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
