"""Keyspaces are deleted from a Redis Cluster, and their absence is shown on every server of it: real ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.clients.redis.key_names import Names, slot_of
from kvstrata.clients.redis.probe import Failure
from kvstrata.clients.redis.verifier import SLOT_MAP_CHANGED, SLOTS_MOVING, Standing, TierLook, TierVerifier
from kvstrata.contract.messages.erase_report import Erased, Outcome, StopReason
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import bucket_prefix
from kvstrata_sidecar.adapter.redis.client import slots
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.delete_job.servers import Layout, Servers
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import (
    VALUE,
    KilledError,
    MortalServers,
    Report,
    chunk_of,
    erase,
    look,
    name_of,
    order,
    reserve,
    write,
)
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster, raw, until
from tests.tiers.server_kinds import DEFAULT

pytestmark = needs_redis
COUNT = 32
WHOLE = Amount(COUNT, COUNT * len(VALUE))
NOTHING = Amount(0, 0)
Connect = Callable[..., Connection]


@pytest.fixture(scope="module")
def formed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(
        tmp_path_factory.mktemp("cluster"), 3, 3, command=DEFAULT.command(), node_timeout_ms=PATIENT_MS
    )
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def cluster(formed: RedisCluster) -> RedisCluster:
    for node in formed.primaries:
        node.ask("FLUSHALL")
    return formed


def fill(cluster: RedisCluster, connect_to: Connect, *keyspaces: str) -> None:
    """Store blocks where their slots are, and have replicas read them."""
    asked = slots.Address("127.0.0.1", cluster.nodes[0].port)
    owners = slots.read_slots(raw(cluster.nodes[0], "CLUSTER", "SLOTS"), asked)
    connections = [connect_to(primary.port) for primary in owners.primaries]
    for keyspace, number in itertools.product(keyspaces, range(COUNT)):
        connection = connections[owners.owners[slots.slot_of(name_of(keyspace, number)[0])]]
        assert connection.ask([reserve(keyspace, number)])[0].outcome is True
        assert write(connection, keyspace, number) == "ok"
    for primary, replica in zip(cluster.primaries, cluster.replicas, strict=False):
        written = primary.admin().info("replication")["master_repl_offset"]
        until(lambda: replica.admin().info("replication")["slave_repl_offset"] >= written)  # noqa: B023


def delete(cluster: RedisCluster, *keyspaces: str) -> Report:
    return erase(order(cluster.nodes[0].port, *keyspaces, cluster=True))


def seen(cluster: RedisCluster, *keyspaces: str, **options: int) -> TierLook:
    return look(cluster.nodes[0].port, *keyspaces, cluster=True, **options)


def test_every_primary_is_emptied_and_every_replica_with_it(cluster: RedisCluster, connect_to: Connect) -> None:
    fill(cluster, connect_to, KEYSPACE_A, KEYSPACE_B)
    before = seen(cluster)
    assert sum(one.values for one in before.nodes if one.primary) == COUNT
    report = delete(cluster)
    assert (report.end.outcome, report.end.reason) == (Outcome.ERASED, StopReason.NONE)
    assert report.sums == (WHOLE, WHOLE, NOTHING)
    assert {one.node for one in report.primaries} == {node.node_id for node in cluster.primaries}
    assert [(one.replicas, one.replicas_in_step) for one in report.primaries] == [(1, 1)] * 3
    by_node = {line.node: line.deleted.keys for line in report.lines if isinstance(line, Erased)}
    assert by_node == {one.node: one.values for one in before.nodes if one.primary and one.values}
    after = seen(cluster)
    assert after.empty
    assert after.problems == ()
    assert sorted(one.primary for one in after.nodes) == [False] * 3 + [True] * 3
    assert {one.node for one in after.nodes} == {node.node_id for node in cluster.nodes}
    assert sum(one.values for one in seen(cluster, KEYSPACE_B).nodes if one.primary) == COUNT, "another's stays"


@pytest.mark.parametrize(
    "told", [True, False], ids=["as a cluster", "as a single server, which it was to an earlier Job"]
)
def test_a_cluster_of_one_is_emptied(tmp_path: Path, connect_to: Connect, told: bool) -> None:
    alone = RedisCluster(tmp_path, 1, command=DEFAULT.command(), node_timeout_ms=PATIENT_MS)
    alone.start()
    try:
        fill(alone, connect_to, KEYSPACE_A, KEYSPACE_B)
        report = erase(order(alone.nodes[0].port, cluster=told))
        assert (report.end.outcome, report.end.reason) == (Outcome.ERASED, StopReason.NONE)
        assert report.sums == (WHOLE, WHOLE, NOTHING)
        assert not told or {one.node for one in report.primaries} == {node.node_id for node in alone.primaries}
        assert seen(alone).empty
        assert sum(one.values for one in seen(alone, KEYSPACE_B).nodes) == COUNT, "another's stays"
    finally:
        alone.kill()


def test_chunks_go_from_every_primary_and_its_replica_and_the_rest_stays(
    cluster: RedisCluster, connect_to: Connect
) -> None:
    fill(cluster, connect_to, KEYSPACE_A)
    chunks = [chunk_of(number).hex() for number in range(0, COUNT, 2)]
    before = sum(node.values for node in seen(cluster, KEYSPACE_A).nodes if node.primary)
    report = erase(order(cluster.nodes[0].port, KEYSPACE_A, cluster=True, chunks=chunks))
    assert report.sums[1].keys == len(chunks)
    assert all(one.replicas_in_step == one.replicas == 1 for one in report.primaries)
    found = look(cluster.nodes[0].port, KEYSPACE_A, cluster=True, chunks=chunks)
    assert found.empty, found
    assert sum(node.values for node in seen(cluster, KEYSPACE_A).nodes if node.primary) == before - len(chunks)


def scans(cluster: RedisCluster) -> int:
    """How often the servers were scanned."""
    stats = (node.admin().info("commandstats").get("cmdstat_scan", {}) for node in cluster.nodes)
    return sum(one.get("calls", 0) for one in stats)


def test_names_by_slot_and_names_by_a_walk_are_the_same(cluster: RedisCluster, connect_to: Connect) -> None:
    fill(cluster, connect_to, KEYSPACE_A, KEYSPACE_B)
    before = scans(cluster)
    by_slot = seen(cluster, KEYSPACE_A, KEYSPACE_B)
    assert scans(cluster) == before
    by_walk = seen(cluster, KEYSPACE_A, KEYSPACE_B, names_in_a_slot=2)
    assert scans(cluster) > before
    first, second = (
        [(one.node, one.names, one.index, one.value_bytes) for one in two.nodes] for two in (by_slot, by_walk)
    )
    assert first == second
    assert sum(one.values for one in by_slot.nodes if one.primary) == 2 * COUNT


def test_a_kill_here_and_there_changes_nothing_of_the_report(cluster: RedisCluster, connect_to: Connect) -> None:
    for commands in (12, 40):
        for node in cluster.primaries:
            node.ask("FLUSHALL")
        fill(cluster, connect_to, KEYSPACE_A)
        asked = order(cluster.nodes[0].port, cluster=True, parallelism=1)
        with pytest.raises(KilledError):
            erase(asked, lambda tier, most=commands: MortalServers(tier, most))  # type: ignore[misc]
        assert delete(cluster).sums == (WHOLE, WHOLE, NOTHING), f"killed after {commands} commands"
        assert seen(cluster).empty


def test_a_slot_on_its_way_stops_it_and_then_it_goes_on(cluster: RedisCluster, connect_to: Connect) -> None:
    fill(cluster, connect_to, KEYSPACE_A)
    base, _ = name_of(KEYSPACE_A, 3)
    slot, source = slots.slot_of(base), cluster.owner(base)
    target = next(node for node in cluster.primaries if node is not source)
    cluster.begin_move(slot, source, target)
    cluster.move_keys(slot, source, target, limit=2)
    stopped = delete(cluster)
    assert stopped.end.reason is StopReason.SLOT_MAP_CHANGED
    assert str(source.port) in stopped.end.message
    assert SLOTS_MOVING in {one.reason for one in seen(cluster).problems}
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, target)
    until(lambda: cluster.owner(base) is target)
    report = delete(cluster)
    assert report.end.outcome is Outcome.ERASED
    assert report.sums == (WHOLE, WHOLE, NOTHING)
    until(lambda: seen(cluster).empty, lambda: seen(cluster))


class MovingServers(Servers):
    """Of which one slot, which nothing is stored in, goes to another server while it deletes."""

    def look_again(self) -> Layout:
        now = super().look_again()
        *others, last = now.owners
        return Layout(now.primaries, (*others, (last + 1) % len(now.primaries)))


def test_slots_that_went_elsewhere_meanwhile_end_it_although_nobody_redirected(
    cluster: RedisCluster, connect_to: Connect
) -> None:
    fill(cluster, connect_to, KEYSPACE_A)
    stopped = erase(order(cluster.nodes[0].port, cluster=True), MovingServers)
    assert (stopped.end.outcome, stopped.end.reason) == (Outcome.STOPPED, StopReason.SLOT_MAP_CHANGED)
    assert stopped.sums == (WHOLE, WHOLE, NOTHING)


@pytest.mark.parametrize("changes", [1, 99])
def test_a_look_under_two_maps_is_done_again_and_proves_nothing_if_they_keep_changing(
    cluster: RedisCluster, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete(cluster)
    looks = itertools.count(1)
    whole = TierVerifier._standings

    async def changing(self: TierVerifier, names: Names) -> tuple[tuple[Standing, ...], list[Failure]]:
        standings, problems = await whole(self, names)
        number = next(looks)
        if number % 2 == 0 and number <= 2 * changes:  # the one after a look
            standings = (replace(standings[0], slots=(*standings[0].slots, (1, 1))), *standings[1:])
        return standings, problems

    monkeypatch.setattr(TierVerifier, "_standings", changing)
    found = seen(cluster)
    assert found.empty == (changes == 1)
    assert next(looks) - 1 == (4 if changes == 1 else 6)
    assert (SLOT_MAP_CHANGED in {one.reason for one in found.problems}) == (changes == 99)


def test_what_is_left_where_the_slot_is_not_any_more_is_found(cluster: RedisCluster, connect_to: Connect) -> None:
    delete(cluster)
    base, member = name_of(KEYSPACE_A, 1)
    slot, owner = slots.slot_of(base), cluster.owner(base)
    other = next(node for node in cluster.primaries if node is not owner)
    other.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", owner.node_id)
    with other.admin() as client:
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("ASKING")
        pipeline.execute_command("SET", base + b":" + member, VALUE)
        pipeline.execute()
    other.ask("CLUSTER", "SETSLOT", slot, "STABLE")
    found = seen(cluster)
    assert {one.node for one in found.nodes if one.values and one.primary} == {other.node_id}
    assert found.problems == ()
    assert not found.empty


def test_a_replica_that_is_away_is_no_proof_and_ends_nothing(tmp_path: Path, connect_to: Connect) -> None:
    cluster = RedisCluster(tmp_path, 3, 1, command=DEFAULT.command(), node_timeout_ms=PATIENT_MS)
    cluster.start()
    try:
        fill(cluster, connect_to, KEYSPACE_A)
        cluster.replicas[0].freeze()
        seconds = itertools.count()
        asked = order(cluster.nodes[0].port, cluster=True)
        stopped = erase(asked, sleeps=[], clock=lambda: float(next(seconds)))
        assert stopped.end.reason is StopReason.REPLICAS_BEHIND
        assert stopped.sums == (WHOLE, WHOLE, NOTHING), "what was done is told"
        cluster.replicas[0].kill()
        found = seen(cluster)
        assert "ConnectionRefused" in {one.reason for one in found.problems}
        assert not found.empty
        cluster.replicas[0].start()
        until(lambda: delete(cluster).end.outcome is Outcome.ERASED)
        until(lambda: seen(cluster).empty, lambda: seen(cluster))
    finally:
        cluster.kill()


def test_operator_and_data_plane_agree_on_slots() -> None:
    names = [bucket_prefix(DOMAIN, KEYSPACE_A, number) + ":#s" for number in range(16)] + ["plain", "{}x", "a{b}c{d}"]
    assert [slot_of(name) for name in names[:-2]] == [slots.slot_of(name.encode()) for name in names[:-2]]
    assert slot_of(names[-1]) == slots.slot_of(names[-1].encode())
    assert len(Names(DOMAIN, frozenset({KEYSPACE_A})).slots) == 17


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"kvs1:{DOMAIN}:{{{KEYSPACE_A}:0f}}:#s", "#s"),
        (f"kvs1:{DOMAIN}:{{{KEYSPACE_A}}}:#l", "#l"),
        (f"kvs1:{DOMAIN}:{{{KEYSPACE_A}:0f}}:1d:0:0:ff", "1d:0:0:ff"),
        (f"kvs1:{DOMAIN}:{{{KEYSPACE_A}whatever", "whatever"),
        (f"kvs1:{DOMAIN}:{{{KEYSPACE_B}:0f}}:#s", None),
        (f"kvs1:{'0' * 16}:{{{KEYSPACE_A}:0f}}:#s", None),
        (f"kvs1:{DOMAIN}:{{tier}}:#t", None),
    ],
)
def test_a_name_is_a_keyspaces_by_its_prefix(name: str, part: str | None) -> None:
    assert Names(DOMAIN, frozenset({KEYSPACE_A})).part_of(name) == part
