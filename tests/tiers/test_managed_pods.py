"""Servers of a managed cluster as their pods start and stop them, on every kind of server."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import redis

from kvstrata.contract.store.redis_keys import KEY_PREFIX
from kvstrata.objects import sizing
from kvstrata.objects.redis.cluster import HAND_OVER_PATIENCE_S
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, REPLICATION_USER
from kvstrata_sidecar.adapter.redis.client.slots import slot_of
from tests.support.redis_binary import needs_redis
from tests.tiers.managed_pod import PASSWORDS, PATIENT_TERMS, SHORT_TERMS, ManagedPod, ManagedPods, Terms
from tests.tiers.redis_cluster import until
from tests.tiers.server_kinds import DEFAULT, KINDS, VALKEY_8, ServerKind
from tests.unit.objects.builders import DOMAIN_ID

pytestmark = needs_redis

CLUSTERS = [pytest.param((kind, kind.tls), id=f"{kind}{'-tls' * kind.tls}") for kind in KINDS]
KEY = f"{KEY_PREFIX}:{DOMAIN_ID}:{{{'a' * 32}:00}}:x"


@pytest.fixture(params=CLUSTERS)
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ManagedPods]:
    """Three primaries and a replica of the one that has KEY's slot."""
    yield from formed(*request.param, tmp_path, PATIENT_TERMS)


@pytest.fixture(params=CLUSTERS)
def failing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ManagedPods]:
    """The same in short terms."""
    yield from formed(*request.param, tmp_path, SHORT_TERMS)


def formed(kind: ServerKind, tls: bool, tmp_path: Path, terms: Terms) -> Iterator[ManagedPods]:
    made = ManagedPods(tmp_path, kind.command(), tls=tls, called=kind.program)
    home = slot_of(KEY.encode()) * 3 // 16384
    try:
        for shard in (home, *(shard for shard in range(3) if shard != home), home):
            pod = made.add(shard)
            pod.terms = terms
            pod.launch()
        for pod in made.pods:
            until(lambda pod=pod: pod.probe() == 0, pod.log.read_text)
        made.form()
        yield made
    finally:
        made.close()


class TestAFormedCluster:
    def test_survives_one_stop_after_the_other_of_a_shards_servers(self, pods: ManagedPods) -> None:
        primary, *_, replica = pods.pods
        primary.run_as(DATA_USER, "SET", KEY, "block")

        assert replica.stop_politely() < HAND_OVER_PATIENCE_S, "a replica has nobody to hand over to"
        replica.start()
        assert replica.role == "master", "it knows nobody any more"
        assert replica.admin("CLUSTER", "NODES").decode().count("\n") == 1
        pods.pods.remove(replica)
        pods.pods.append(replica)
        replica.admin("CLUSTER", "MEET", primary.ip, pods.port)
        until(lambda: primary.node_id in replica.admin("CLUSTER", "NODES").decode(), "they do not meet")
        until(lambda: _follows(replica, primary), "it does not follow")
        until(lambda: all(one.knows_replica(replica.node_id) for one in pods.pods), "no gossip")

        primary.stop_politely()
        assert replica.role == "master", primary.said
        assert replica.run_as(DATA_USER, "GET", KEY) == b"block"
        other = pods.pods[1]
        until(lambda: f" {replica.name}.kvs-shared-redis.team.svc:{pods.port}" in _refusal(other), "no redirection")

    def test_promotes_the_replica_of_a_server_that_starts_over_at_its_address(self, failing: ManagedPods) -> None:
        primary, *_, replica = failing.pods
        primary.run_as(DATA_USER, "SET", KEY, "block")
        until(lambda: primary.replica_offset >= primary.offset, "the replica is behind")
        former = primary.node_id
        began_s = time.monotonic()
        primary.kill()
        primary.start()
        assert time.monotonic() - began_s >= SHORT_TERMS[1]
        until(lambda: replica.role == "master", "nobody was promoted")
        assert replica.run_as(DATA_USER, "GET", KEY) == b"block"
        assert primary.node_id != former
        assert primary.admin("CLUSTER", "NODES").decode().count("\n") == 1
        assert not primary.admin("CLUSTER", "COUNTKEYSINSLOT", slot_of(KEY.encode()))

    def test_moves_slots_with_its_own_users(self, pods: ManagedPods, request: pytest.FixtureRequest) -> None:
        source, target, *_ = pods.pods
        slot = slot_of(KEY.encode())
        source.run_as(DATA_USER, "SET", KEY, "block", "PX", 600_000)
        source.run_as(DATA_USER, "HSET", f"{KEY}h", "field", "1")
        source.run_as(DATA_USER, "ZADD", f"{KEY}z", 7, "member")
        if request.node.callspec.params["pods"][0].atomic_migration:
            source.admin("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.node_id)
            until(lambda: "success" in _jobs(source), lambda: _jobs(target))
        else:
            target.admin("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
            source.admin("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)
            secret = ("AUTH2", ADMIN_USER, PASSWORDS[ADMIN_USER][0])
            keys = source.admin("CLUSTER", "GETKEYSINSLOT", slot, 10)
            source.admin("MIGRATE", target.ip, pods.port, "", 0, 5000, *secret, "KEYS", *(key.decode() for key in keys))
            for one in (target, source):
                one.admin("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)
        assert target.run_as(DATA_USER, "GET", KEY) == b"block"
        assert 0 < target.run_as(DATA_USER, "PTTL", KEY) <= 600_000
        assert target.run_as(DATA_USER, "HGET", f"{KEY}h", "field") == b"1"
        assert target.run_as(DATA_USER, "ZSCORE", f"{KEY}z", "member") in (b"7", 7.0)


@pytest.fixture(params=KINDS, ids=str, scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedPod]:
    kind: ServerKind = request.param
    made = ManagedPods(
        tmp_path_factory.mktemp("alone"), kind.command(), called=kind.program, resources={"limits": {"cpu": "4"}}
    )
    try:
        pod = made.add(0)
        pod.start()
        yield pod
    finally:
        made.close()


class TestAServer:
    def test_is_what_its_arguments_say(self, alone: ManagedPod) -> None:
        said = {
            name: alone.setting(name)
            for name in ("maxmemory", "maxmemory-policy", "save", "appendonly", "cluster-node-timeout", "io-threads")
        }
        assert said == {
            "maxmemory": str(sizing.redis_maxmemory_bytes(alone.pods.tier.spec)),
            "maxmemory-policy": "noeviction",
            "save": "",
            "appendonly": "no",
            "cluster-node-timeout": "5000",
            "io-threads": "3",
        }
        assert alone.info("cluster")["cluster_enabled"] == "1"

    def test_has_no_password_in_its_folder_or_arguments(self, alone: ManagedPod) -> None:
        secret = PASSWORDS[REPLICATION_USER][0]
        assert alone.setting("masterauth") == secret
        words = alone.words([*alone.container["command"], *alone.container["args"]])
        assert not any(secret in word for word in words)
        assert not any(secret.encode() in path.read_bytes() for path in alone.written())


READS = tuple(
    words.replace("KEY", KEY)
    for words in ("GET KEY", "GETRANGE KEY 0 1", "DUMP KEY", "HGETALL KEY", "ZRANGE KEY 0 1", "TYPE KEY")
)
OPERATORS = ("SCAN 0", "SCAN 0 MATCH kvs1:* COUNT 1000")
"""Listing names is the operator's alone: it would show those of other domains."""

NOBODYS = (
    "KEYS *", "RANDOMKEY", "DBSIZE", "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "CLUSTER RESET HARD", "SHUTDOWN",
    "CLUSTER FLUSHSLOTS", "SCRIPT FLUSH", "FUNCTION FLUSH", "MONITOR", "CLIENT LIST", "CLIENT TRACKING ON BCAST",
    "REPLICAOF NO ONE", "SUBSCRIBE x", "MODULE LIST", "GET kvs1:ffffffffffffffff:x", "SET other x", "UNLINK other",
    "ACL DELUSER data",
)  # fmt: skip
TOPOLOGY = (
    "CLUSTER NODES", "CLUSTER MEET 127.0.0.1 1", "CLUSTER GETKEYSINSLOT 0 9", "CLUSTER FAILOVER",
    "CLUSTER SETSLOT 0 STABLE", "CONFIG GET maxmemory", "CONFIG SET maxmemory 100mb", "ACL SETUSER x",
    "MIGRATE 127.0.0.1 1 k 0 1", f"MEMORY USAGE {KEY}",
)  # fmt: skip
ADMINS = (
    "PING", "INFO", "CLUSTER NODES", "CLUSTER INFO", "CLUSTER SHARDS", "CLUSTER MYID", "CLUSTER COUNTKEYSINSLOT 0",
    "CLUSTER GETKEYSINSLOT 0 9", "CLUSTER BUMPEPOCH", "CONFIG GET cluster-node-timeout", "CONFIG SET maxmemory 100mb",
    "CONFIG SET masterauth other", "MEMORY STATS", "MEMORY PURGE", f"MEMORY USAGE {KEY}", f"UNLINK {KEY}",
    "ACL GETUSER data", "ACL SETUSER data >other", "ACL LOAD", "ROLE", "COMMAND INFO get", "WAIT 0 1", "TIME",
    "CLUSTER FORGET x",
    "CLUSTER REPLICATE x", "CLUSTER FAILOVER TAKEOVER", "CLUSTER ADDSLOTSRANGE 1 2", "CLUSTER DELSLOTSRANGE 1 2",
    "CLUSTER SETSLOT 0 STABLE", "CLUSTER SET-CONFIG-EPOCH 1", "CONFIG SET cluster-node-timeout 5000",
)  # fmt: skip


class TestUsers:
    def test_data_reaches_its_domains_blocks_only(self, alone: ManagedPod) -> None:
        assert _permitted(alone, DATA_USER, (*NOBODYS, *OPERATORS, *TOPOLOGY, "PSYNC ? -1", "SELECT 1")) == []
        assert _refused(alone, DATA_USER, (f"GET {KEY}", f"SET {KEY} x", "CLUSTER SLOTS", "PING")) == []

    def test_admin_does_what_running_a_cluster_takes_and_reads_no_block(self, alone: ManagedPod) -> None:
        assert _permitted(alone, ADMIN_USER, (*NOBODYS, *READS, f"SET {KEY} x", "PSYNC ? -1")) == []
        assert _refused(alone, ADMIN_USER, (*ADMINS, *OPERATORS)) == []

    def test_replication_neither_reads_blocks_nor_administers(self, alone: ManagedPod) -> None:
        assert _permitted(alone, REPLICATION_USER, (*NOBODYS, *OPERATORS, *READS, *TOPOLOGY, "INFO", "EVAL x 0")) == []
        assert _refused(alone, REPLICATION_USER, ("PING", "REPLCONF capa eof")) == []

    def test_nobody_comes_in_without_a_name(self, alone: ManagedPod) -> None:
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(host=alone.ip, port=alone.pods.port, retry=None).ping()


def _permitted(pod: ManagedPod, user: str, commands: Iterable[str]) -> list[str]:
    """Those of the commands that a user is let to try."""
    return [words for words in commands if not _is_refused(pod, user, words)]


def _refused(pod: ManagedPod, user: str, commands: Iterable[str]) -> list[str]:
    return [words for words in commands if _is_refused(pod, user, words)]


def _is_refused(pod: ManagedPod, user: str, words: str) -> bool:
    try:
        pod.run_as(user, *words.split())
    except redis.exceptions.NoPermissionError:
        return True
    except redis.exceptions.RedisError:
        pass
    return False


class TestAnImage:
    def test_with_valkeys_names_will_do(self, tmp_path: Path) -> None:
        made = ManagedPods(tmp_path, VALKEY_8.command(), called=VALKEY_8.program)
        assert {path.name for path in made.image.iterdir()} == {"valkey-server", "valkey-cli"}
        try:
            made.add(0).start()
        finally:
            made.close()

    def test_that_is_no_redis_says_so_as_it_ends(self, tmp_path: Path) -> None:
        pod = ManagedPods(tmp_path, []).add(0)
        assert pod.launch().wait(60) == 127
        assert "neither redis-server nor valkey-server" in pod.log.read_text()
        assert pod.container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_server_that_waits_to_start_over_can_be_stopped(tmp_path: Path) -> None:
    pod = ManagedPods(tmp_path, DEFAULT.command()).add(0)
    (pod.folder / "tmp/started").touch()
    process = pod.launch()
    until(lambda: "sleep" in _children(process.pid), pod.log.read_text)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


def _follows(replica: ManagedPod, primary: ManagedPod) -> bool:
    try:
        replica.admin("CLUSTER", "REPLICATE", primary.node_id)
    except redis.ResponseError:
        return False
    return primary.has_replica


def _refusal(pod: ManagedPod) -> str:
    """What a server answers to the data plane that asks for KEY, if it is an error."""
    try:
        pod.run_as(DATA_USER, "GET", KEY)
    except redis.ResponseError as error:
        return str(error)
    return ""


def _children(pid: int) -> list[str]:
    """The programs that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/comm").read_text().strip() for child in found]


def _jobs(pod: ManagedPod) -> str:
    return str(pod.admin("CLUSTER", "GETSLOTMIGRATIONS"))
