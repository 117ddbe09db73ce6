"""Checks of external servers against real ones: what each defect is told as, and that a check leaves nothing behind.

Only a server too old to be had as a package is a stand-in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.redis import probe
from kvstrata.clients.redis.external import CLUSTER_TRIALS, TRIALS, check_external, slots_by_primary
from kvstrata.clients.redis.probe import Access
from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.contract.store.redis_scripts import COMMANDS
from kvstrata.model.pods import BackendAccess, BackendReport
from kvstrata.model.redis.external import ExternalReport
from kvstrata.plan.redis import external
from tests.support.amounts import CLAIMS
from tests.support.objects import redis_tier
from tests.support.worlds import START
from tests.tiers.certificates import SERVER_NAME, Authority
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.hostile_server import HostileServer
from tests.tiers.redis_cluster import RedisCluster, until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import DEFAULT, REDIS_7, ServerKind, on_every_server

pytestmark = [
    pytest.mark.redis,
    pytest.mark.claim("external servers are checked before pods depend on them, and each defect has a reason"),
]

NOBODY = Access(None, None)
DATA = Access("data", None, "data")
CAPACITY_BYTES = 64 << 20
RIGHTS = ("on", "resetpass", ">data", "resetkeys", f"~{domain_pattern(DOMAIN)}", "-@all")
BOUNDED = ("--maxmemory", str(CAPACITY_BYTES))
PATIENCE_S = 30.0
"""How long a check waits for a server that a busy machine starves."""


def check(server: RedisProcess, access: Access = NOBODY, name: str = "127.0.0.1", **options: Any) -> ExternalReport:
    """What the operator hears from a server that a tier names."""
    settings = {"cluster": False, "limit": asyncio.Semaphore(4), "timeout_s": PATIENCE_S} | options
    return asyncio.run(check_external(f"127.0.0.1:{server.port}", name, access, DOMAIN, **settings))


def verdict(checked: ExternalReport, *, cluster: bool = False) -> tuple[str, str]:
    """The reason and the message that a tier of 64Mi gets for it."""
    spec = {"external": {"endpoints": ["a:1"], "cluster": cluster}}
    tier = CacheTier.model_validate(redis_tier(redis=spec, capacity=str(CAPACITY_BYTES)))
    access = BackendAccess("a:1", "a", cluster=cluster)
    said = BackendReport(access, bool(checked.answering), "", "", START, external=checked)
    found = external.missing(tier, said, DOMAIN) or external.warning(tier, said, DOMAIN)
    return (str(found.reason), found.message) if found else ("", "")


def may(server: RedisProcess, *rules: str) -> None:
    """Give the user `data` all that pods need, changed by these rules."""
    needed = (f"+{command}" for command in COMMANDS)
    server.admin().execute_command("ACL", "SETUSER", "data", "reset", *RIGHTS, *needed, *rules)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONNECT_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def bounded(redis_server: RedisProcess) -> RedisProcess:
    redis_server.admin().config_set("maxmemory", CAPACITY_BYTES)
    return redis_server


def test_every_command_of_the_data_plane_is_tried() -> None:
    asked = {"auth", "info", "cluster|slots"}
    assert set(TRIALS) | set(CLUSTER_TRIALS) | asked == set(COMMANDS)


class TestOneServer:
    @on_every_server
    def test_that_is_as_it_should_be_passes_with_no_more_rights_than_pods_have(self, bounded: RedisProcess) -> None:
        may(bounded)
        checked = check(bounded, DATA)
        assert verdict(checked) == ("", "")
        (server,) = checked.servers
        assert (server.in_cluster_mode, server.is_replica, server.max_bytes) == (False, False, CAPACITY_BYTES)
        assert 0 < server.used_bytes < CAPACITY_BYTES

    @on_every_server
    def test_each_command_that_the_user_may_not_run_is_named_and_no_other(self, bounded: RedisProcess) -> None:
        for command in (*TRIALS, "info"):
            may(bounded, f"-{command}")
            (server,) = check(bounded, DATA).servers
            assert (server.refused, server.keys_refused, server.unknown) == ((command,), (), ())

    @on_every_server
    @pytest.mark.parametrize(
        ("patterns", "allowed"),
        [((), ()), (("~kvs1:0000000000000000:*",), ()), (("%R~kvs1:*",), ("get", "zrange"))],
    )
    def test_keys_that_the_user_may_not_touch_are_named_by_the_commands(
        self, bounded: RedisProcess, patterns: Sequence[str], allowed: Sequence[str]
    ) -> None:
        may(bounded, "resetkeys", *patterns)
        (server,) = check(bounded, DATA).servers
        assert {"set", "unlink", "hset", "zadd", "eval"} <= set(server.keys_refused)
        assert not set(allowed) & set(server.keys_refused)
        reason, message = verdict(ExternalReport((server,)))
        assert (reason, domain_pattern(DOMAIN) in message) == ("MissingPermissions", True)

    @on_every_server
    def test_changes_nothing_and_leaves_no_connection_behind(self, bounded: RedisProcess) -> None:
        admin = bounded.admin()
        admin.set(f"kvs1:{DOMAIN}:mine", "value")
        changes = admin.info("persistence")["rdb_changes_since_last_save"]
        for _ in range(3):
            check(bounded)
        assert admin.info("persistence")["rdb_changes_since_last_save"] == changes > 0
        assert admin.keys() == [f"kvs1:{DOMAIN}:mine".encode()]
        until(lambda: len(admin.client_list()) == 1, "connections stay")

    def test_commands_that_the_server_does_not_have_are_missing_too(
        self, tmp_path: Path, server_kind: ServerKind
    ) -> None:
        server = RedisProcess(tmp_path, *BOUNDED, "--rename-command", "EVALSHA", "", command=server_kind.command())
        server.start()
        reason, message = verdict(check(server))
        server.kill()
        assert reason == "MissingPermissions"
        assert "has no command evalsha" in message

    def test_that_is_full_still_tells_what_its_user_may(self, bounded: RedisProcess) -> None:
        may(bounded, "-zmscore")
        bounded.admin().config_set("maxmemory", 1)
        (server,) = check(bounded, DATA).servers
        assert (server.refused, server.keys_refused) == (("zmscore",), ())
        assert verdict(ExternalReport((replace(server, refused=()),)))[0] == "ServerTooSmall"

    @on_every_server
    def test_that_evicts_by_itself_or_has_no_bound_is_warned_of(self, bounded: RedisProcess) -> None:
        bounded.admin().config_set("maxmemory-policy", "allkeys-lru")
        reason, message = verdict(check(bounded))
        assert (reason, "allkeys-lru" in message) == ("NotNoeviction", True)
        bounded.admin().config_set("maxmemory-policy", "noeviction")
        bounded.admin().config_set("maxmemory", 0)
        assert verdict(check(bounded))[0] == "MemoryUnbounded"

    def test_that_is_a_replica_is_told_from_its_primary(
        self, tmp_path: Path, bounded: RedisProcess, server_kind: ServerKind
    ) -> None:
        replica = RedisProcess(tmp_path, *BOUNDED, "--replicaof", f"127.0.0.1 {bounded.port}")
        replica.start()
        reason = verdict(check(replica))[0]
        replica.kill()
        assert (reason, verdict(check(bounded))[0]) == ("ReadOnlyReplica", "")

    def test_with_another_password_says_so_and_tells_none(self, bounded: RedisProcess) -> None:
        may(bounded)
        checked = check(bounded, Access("guess-4711", None, "data"))
        assert checked.servers[0].reason == "WrongPassword"
        assert "4711" not in repr((checked, Access("guess-4711", None, "data")))

    def test_over_tls_has_to_prove_the_name_of_the_endpoint(self, tmp_path: Path, server_kind: ServerKind) -> None:
        files = Authority(tmp_path).issue(SERVER_NAME)
        server = RedisProcess(tmp_path, *BOUNDED, tls=files.redis_options)
        server.start()
        access = Access(None, files.ca.read_bytes())
        named, other = (check(server, access, name=name).servers[0].reason for name in (SERVER_NAME, "other.example"))
        server.kill()
        assert (named, other) == ("Reachable", "CertificateRefused")

    def test_that_is_too_old_is_known_by_what_it_says_of_itself(self) -> None:
        info = b"# Server\r\nredis_version:6.2.14\r\nrole:master\r\ncluster_enabled:0\r\n"
        server = HostileServer(lambda connection, _: connection.sendall(b"-ERR unknown command\r\n"), info=info)
        try:
            reason, message = verdict(check(server))  # type: ignore[arg-type]
        finally:
            server.close()
        assert (reason, "6.2.14" in message) == ("TooOld", True)


PATIENT = (*BOUNDED, "--cluster-node-timeout", "30000")
"""Servers that take nobody for dead because the machine has other work."""


@pytest.fixture(scope="module", params=[DEFAULT if CLAIMS else REDIS_7], ids=str)
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    started = RedisCluster(
        tmp_path_factory.mktemp("cluster"), 3, 1, options=lambda _: PATIENT, command=request.param.command()
    )
    started.start()
    yield started
    started.kill()


class TestACluster:
    def test_is_asked_primary_by_primary_whichever_server_is_named(self, cluster: RedisCluster) -> None:
        for node in cluster.nodes:
            checked = check(node, cluster=True)
            assert verdict(checked, cluster=True) == ("", "")
            assert {one.address for one in checked.servers} == {f"127.0.0.1:{one.port}" for one in cluster.primaries}
            assert (checked.covered, checked.answered) == (16384, 16384)

    def test_that_is_used_as_one_server_and_the_other_way_round_is_a_mismatch(
        self, cluster: RedisCluster, tmp_path: Path
    ) -> None:
        assert verdict(check(cluster.nodes[0]))[0] == "ClusterModeMismatch"
        server = RedisProcess(tmp_path, *BOUNDED)
        server.start()
        reason = verdict(check(server, cluster=True), cluster=True)[0]
        server.kill()
        assert reason == "ClusterModeMismatch"

    def test_one_primary_with_another_policy_or_user_is_named(self, cluster: RedisCluster) -> None:
        odd = cluster.primaries[2]
        odd.admin().config_set("maxmemory-policy", "volatile-lru")
        reason, message = verdict(check(cluster.nodes[0], cluster=True), cluster=True)
        odd.admin().config_set("maxmemory-policy", "noeviction")
        assert (reason, f"127.0.0.1:{odd.port}" in message) == ("NotNoeviction", True)
        for node in cluster.nodes:
            may(node)
        may(odd, "-asking")
        reason, message = verdict(check(cluster.nodes[0], DATA, cluster=True), cluster=True)
        assert reason == "MissingPermissions"
        assert f"127.0.0.1:{odd.port}: its user may not run asking" in message

    def test_with_slots_that_nobody_has_is_not_covered(self, cluster: RedisCluster) -> None:
        holder = cluster.primaries[0]
        holder.ask("CLUSTER", "DELSLOTSRANGE", 100, 149)
        until(lambda: check(holder, cluster=True).covered == 16334, "the slots stay")
        reason, message = verdict(check(holder, cluster=True), cluster=True)
        holder.ask("CLUSTER", "ADDSLOTSRANGE", 100, 149)
        assert reason == "SlotsUncovered"
        assert message.startswith("50 of 16384 slots")

    def test_a_primary_that_hangs_is_away_with_its_slots(self, cluster: RedisCluster) -> None:
        gone = cluster.primaries[2]
        gone.freeze()
        try:
            # Long enough for the others on a busy machine.
            checked = check(cluster.primaries[0], cluster=True, timeout_s=5.0)
        finally:
            gone.thaw()
        reason, message = verdict(checked, cluster=True)
        assert reason == "ServersAway"
        assert message.startswith("1 of 3 primaries, with 5462 of 16384 slots")


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (["10.0.0.1", 7000, "id"], ("10.0.0.1:7000", "10.0.0.1")),
        (["10.0.0.1", 7000, "id", ["hostname", "one.example"]], ("10.0.0.1:7000", "one.example")),
        (["one.example", 7000, "id", ["ip", "10.0.0.1"]], ("one.example:7000", "one.example")),
        (["", 7000, "id"], ("asked:7000", "proves")),
        (["?", 7000, "id", ["ip", "2001:db8::1"]], ("[2001:db8::1]:7000", "2001:db8::1")),
        (["?", 7000, "id", []], None),
        (["a host", 7000, "id"], None),
        (["host", 0, "id"], None),
    ],
)
def test_servers_are_reached_and_believed_by_what_the_map_says(
    server: list[Any], expected: tuple[str, str] | None
) -> None:
    found = slots_by_primary([[0, 9, server], [20, 29, server]], "asked", "proves")
    assert found is not None
    assert [(one.address, one.proves) for one in found] == ([expected] if expected else [])
    assert list(found.values()) == ([20] if expected else [])


@pytest.mark.parametrize("answer", [None, "OK", [[1]], [[0, 16384, ["h", 1]]], [[5, 4, ["h", 1]]], [["x", 1, 2]], [7]])
def test_what_is_no_map_is_not_taken_for_one(answer: Any) -> None:
    assert slots_by_primary(answer, "asked", "proves") is None
