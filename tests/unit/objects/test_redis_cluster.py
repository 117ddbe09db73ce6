"""What a managed Redis Cluster becomes: sizes, placement, who may reach whom, and which shards there are."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.store.redis_keys import BlockKey
from kvstrata.contract.store.redis_scripts import COMMANDS
from kvstrata.objects import names, sizing
from kvstrata.objects.children import redis_tier_children
from kvstrata.objects.quantities import GIB, MIB
from kvstrata.objects.redis.cluster import START_OVER_WAIT_S, cluster_arguments
from kvstrata.objects.redis.users import USERS, user_rules, users_acl, what_users_may
from kvstrata.objects.tier_link import redis_link, servers
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, redis_tier


def cluster(capacity: str = "30Gi", **managed: Any) -> CacheTier:
    return redis_tier(capacity=capacity, **{"shards": 3, "replicasPerShard": 1, **managed})


def built(tier: CacheTier, kind: str, **options: Any) -> list[dict[str, Any]]:
    return [child for child in redis_tier_children(CONTEXT, tier, **options) if child["kind"] == kind]


def pod_spec(tier: CacheTier) -> dict[str, Any]:
    spec: dict[str, Any] = built(tier, "StatefulSet")[0]["spec"]["template"]["spec"]
    return spec


def argument(tier: CacheTier, name: str) -> str:
    arguments = cluster_arguments(tier)
    return arguments[arguments.index(name) + 1]


def test_a_shard_is_a_statefulset_that_only_the_operator_rolls() -> None:
    sets = built(cluster(replicasPerShard=2), "StatefulSet")
    assert [one["metadata"]["name"] for one in sets] == [f"kvs-shared-redis-{shard}" for shard in range(3)]
    assert {one["spec"]["replicas"] for one in sets} == {3}
    assert {one["spec"]["updateStrategy"]["type"] for one in sets} == {"OnDelete"}
    assert {one["spec"]["podManagementPolicy"] for one in sets} == {"Parallel"}


def test_shards_do_not_select_each_others_pods() -> None:
    sets = built(cluster(), "StatefulSet")
    selectors = [one["spec"]["selector"]["matchLabels"] for one in sets]
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in sets]
    chosen = [[number for number, own in enumerate(pods) if wanted.items() <= own.items()] for wanted in selectors]
    assert chosen == [[0], [1], [2]]


def test_a_shard_that_leaves_stays_as_it_is_until_it_is_drained() -> None:
    four = built(cluster(capacity="40Gi", shards=4), "StatefulSet")
    leaving = built(cluster(), "StatefulSet", members=dict.fromkeys(range(4), 2))
    assert [one["metadata"]["name"] for one in leaving] == [one["metadata"]["name"] for one in four]
    assert leaving[3]["spec"] == four[3]["spec"]


def test_more_replicas_or_shards_of_the_same_size_restart_no_server() -> None:
    before = built(cluster(), "StatefulSet")[0]["spec"]["template"]
    assert built(cluster(replicasPerShard=2), "StatefulSet")[0]["spec"]["template"] == before
    assert built(cluster(capacity="40Gi", shards=4), "StatefulSet")[0]["spec"]["template"] == before


def test_one_shard_is_a_cluster_of_one() -> None:
    assert [one["metadata"]["name"] for one in built(redis_tier(), "StatefulSet")] == ["kvs-shared-redis-0"]
    assert argument(redis_tier(), "--cluster-enabled") == "yes"
    assert redis_tier().spec.is_cluster


def test_a_lone_primary_has_neither_backlog_nor_buffers_and_blocks_may_take_more_of_it() -> None:
    spec = redis_tier(capacity="1Gi").spec
    assert sizing.redis_maxmemory_bytes(spec) == GIB
    assert sizing.redis_memory_limit_bytes(spec) == 1344 * MIB
    assert sizing.stored_bytes(spec) == GIB * 80 // 100


def test_a_lone_primary_that_starts_again_waits_for_no_failover() -> None:
    alone, beside = (pod_spec(tier)["containers"][0]["command"] for tier in (redis_tier(), cluster()))
    assert (alone[4], beside[4]) == ("0", str(START_OVER_WAIT_S))


def test_memory_is_the_shards_part_with_room_for_replication_and_fragmentation() -> None:
    spec = cluster().spec
    backlog, buffers = 256 * MIB, 10 * GIB // 8
    assert argument(cluster(), "--maxmemory") == str(10 * GIB + backlog)
    assert argument(cluster(), "--repl-backlog-size") == str(backlog)
    assert argument(cluster(), "--client-output-buffer-limit") == f"replica {buffers} 0 0"
    used = sizing.redis_maxmemory_bytes(spec) * 5 // 4 + buffers
    assert used < sizing.redis_memory_limit_bytes(spec) < used + 128 * MIB
    assert pod_spec(cluster())["containers"][0]["resources"]["limits"]["memory"] == "14464Mi"


def test_all_shards_together_hold_the_capacity_however_it_divides() -> None:
    spec = cluster(capacity="64Mi").spec
    assert sizing.shard_bytes(spec) == 22_369_622


def test_blocks_may_take_as_much_as_in_a_cluster_of_someone_else() -> None:
    assert sizing.stored_bytes(cluster().spec) == 30 * GIB * 65 // 100


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        (None, None),
        ({"limits": {"cpu": "3900m"}}, None),
        ({"limits": {"cpu": "4"}}, "3"),
        ({"requests": {"cpu": "4500m"}}, "3"),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "6"}}, "5"),
        ({"limits": {"cpu": "64"}}, "8"),
    ],
)
def test_io_threads_follow_from_cores_and_leave_one_free(resources: dict[str, Any] | None, threads: str | None) -> None:
    tier = cluster(resources=resources)
    assert ("--io-threads" in cluster_arguments(tier)) == (threads is not None)
    assert threads is None or argument(tier, "--io-threads") == threads


def test_pods_of_a_shard_keep_apart_unless_the_user_said_otherwise() -> None:
    (preferred,) = pod_spec(cluster())["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["labelSelector"]["matchLabels"]["kvstrata.io/shard"] == "0"
    own = {"nodeAffinity": {}}
    assert pod_spec(cluster(podTemplate={"affinity": own}))["affinity"] == own


def test_only_the_tiers_own_pods_reach_its_bus() -> None:
    (policy,) = built(cluster(), "NetworkPolicy")
    bus = [rule for rule in policy["spec"]["ingress"] if 16379 in [port["port"] for port in rule["ports"]]]
    assert [rule["from"] for rule in bus] == [[{"podSelector": policy["spec"]["podSelector"]}]]


def test_one_pod_of_the_whole_tier_may_be_evicted_at_a_time() -> None:
    (budget,) = built(cluster(), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    for one in built(cluster(), "StatefulSet"):
        pods = one["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= pods.items()


def test_servers_see_no_password_of_the_data_user_and_none_in_arguments_or_environment() -> None:
    spec = pod_spec(cluster())
    (auth,) = (volume for volume in spec["volumes"] if volume["name"] == "auth")
    keys = {item["key"] for item in auth["secret"]["items"]}
    assert keys == {"users.acl", "admin-password", "replication-password"}
    assert all("secretKeyRef" not in str(variable) for variable in spec["containers"][0]["env"])


def test_pods_use_a_managed_cluster_as_the_data_user() -> None:
    assert cluster().spec.is_cluster
    link = redis_link(cluster())
    assert link is not None
    assert (link.username, link.password) == ("data", ("kvs-shared-redis-auth", "password"))
    assert (link.operator_username, link.operator_password) == ("admin", ("kvs-shared-redis-auth", "admin-password"))


def test_a_clusters_pods_count_as_its_servers() -> None:
    host = ("kvs-shared-redis-2-1", "kvs-shared-redis", "team")
    assert (host, 6379) in servers(cluster())


def test_the_longest_names_of_shards_fit_what_kubernetes_labels_their_pods_with() -> None:
    for tier, shards in (("n" * 40, 10), ("n" * 39, 64)):
        assert len(names.redis_shard(tier, shards - 1)) + len("-") + 10 <= 63


class TestUsers:
    def test_each_password_in_force_admits_and_none_is_in_the_file(self) -> None:
        acl = users_acl(DOMAIN_ID, {user: (f"new-{user}", f"old-{user}") for user in USERS}).decode()
        lines = {line.split()[1]: line for line in acl.splitlines()}
        assert [lines[user].count(" #") for user in USERS] == [2, 2, 2]
        assert not any(f"{age}-{user}" in acl for age in ("new", "old") for user in USERS)
        assert lines["default"].split()[2] == "off"

    def test_what_they_may_does_not_depend_on_passwords(self) -> None:
        some = users_acl(DOMAIN_ID, dict.fromkeys(USERS, ("x", "y")))
        assert what_users_may(some) == what_users_may(users_acl(DOMAIN_ID, {}))
        assert what_users_may(some) != what_users_may(users_acl("f" * 16, {}))

    def test_a_server_may_take_over_every_write_that_pods_send_while_slots_move(self) -> None:
        writes = {"hdel", "hincrby", "hset", "persist", "pexpireat", "set", "unlink", "zadd", "zrem"}
        assert writes <= set(COMMANDS)
        assert {f"+{write}" for write in writes} <= set(user_rules("replication", DOMAIN_ID, ()))

    def test_keys_of_other_domains_are_nobodys(self) -> None:
        own = str(BlockKey(DOMAIN_ID, "a" * 32, "b" * 16, 0, 0, b"\x01" * 16))
        for user in USERS:
            (pattern,) = (rule[1:] for rule in user_rules(user, DOMAIN_ID, ()) if rule.startswith("~"))
            assert own.startswith(pattern.removesuffix("*"))
            assert DOMAIN_ID in pattern
