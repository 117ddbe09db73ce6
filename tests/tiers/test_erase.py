"""Keyspaces are deleted from a tier on one server, whoever is killed, frozen or late: on a real Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.redis.probe import Access
from kvstrata.clients.redis.verifier import NODE_UNKNOWN
from kvstrata.contract.messages.erase_report import (
    Erased,
    Outcome,
    StopReason,
    decode_line,
    encode_line,
    keyspace_digest,
)
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import bucket_prefix, capacity_key, ledger_key, revoked_key
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, user_rules
from kvstrata_sidecar.adapter.redis.client.commands import call, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.servers import Primary, Servers
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import (
    VALUE,
    KilledError,
    MortalServers,
    erase,
    look,
    name_of,
    order,
    put,
    report_of,
    reserve,
    start_program,
)
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import on_every_server
from tests.tiers.tier_driver import Driver, block, spread

pytestmark = needs_redis
COUNT = 20
WHOLE = Amount(COUNT, COUNT * len(VALUE))
NOTHING = Amount(0, 0)


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


def left(server: RedisProcess, keyspace: str = KEYSPACE_A) -> set[str]:
    """What the names of a keyspace end with."""
    return {name.decode().rsplit(":", 1)[1] for name in server.admin().scan_iter(f"*{keyspace}*", count=1000)}


class SlowServers(Servers):
    """Takes a while for each exchange."""

    EACH_S = 0.05

    def ask_one(self, primary: Primary, commands: Sequence[Command]) -> list[Any]:
        time.sleep(self.EACH_S)
        return super().ask_one(primary, commands)


class TestDeletion:
    @on_every_server
    def test_all_of_a_keyspace_goes_and_nothing_of_another(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        put(connection, KEYSPACE_B, range(COUNT))
        before = look(redis_server.port)
        assert (before.nodes[0].values, before.nodes[0].value_bytes, before.empty) == (COUNT, WHOLE.bytes, False)
        report = erase(order(redis_server.port))
        assert report.end.outcome is Outcome.ERASED
        assert report.sums == (WHOLE, WHOLE, NOTHING)
        assert left(redis_server) == {"#s"}, "nothing but tombstones"
        assert look(redis_server.port).empty
        assert look(redis_server.port, KEYSPACE_B).nodes[0].values == COUNT
        assert redis_server.admin().zscore(revoked_key(DOMAIN), KEYSPACE_A) is not None

    def test_where_sums_are_ordered_a_primary_has_one_line_for_all_keyspaces(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        put(connection, KEYSPACE_B, range(COUNT))
        report = erase(order(redis_server.port, KEYSPACE_A, KEYSPACE_B, sums=True))
        assert [line.keyspace for line in report.lines if isinstance(line, Erased)] == [None]
        twice = Amount(2 * WHOLE.keys, 2 * WHOLE.bytes)
        assert report.sums == (twice, twice, NOTHING)
        assert [decode_line(encode_line(line)) for line in report.lines] == report.lines

    def test_a_step_under_a_recount_is_a_part_of_what_the_recount_comes_to(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, [16 * number for number in range(COUNT)])
        base, _ = name_of(KEYSPACE_A, 0)
        (half,) = connection.ask([call("recount", state_key(base), list, step=COUNT // 2)])
        assert half[0] == b"more"
        (dropped,) = connection.ask([call("drop", state_key(base), list, count=COUNT // 4, keep_ms=1000)])
        kept = COUNT - COUNT // 4
        assert [int(one) for one in dropped[:3]] == [COUNT // 4, kept, kept * len(VALUE)]
        answer = half
        while answer[0] == b"more":
            (answer,) = connection.ask([call("recount", state_key(base), list, step=COUNT)])
        assert (answer[0], [int(drift) for drift in answer[1:]]) == (b"ok", [0, 0, 0])
        assert int(redis_server.admin().hget(state_key(base), "used")) == kept * len(VALUE)

    def test_tombstones_are_forgotten_after_a_week_and_no_sooner(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, [1])
        erase(order(redis_server.port))
        lives = [redis_server.admin().ttl(name) for name in redis_server.admin().scan_iter(f"*{KEYSPACE_A}*")]
        assert len(lives) == 16
        assert all(6.9 < life_s / 86_400 <= 7 for life_s in lives)

    def test_its_ledger_goes_and_its_room_is_given_back(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, capacity_bytes=1 << 30)
        driver.until("closed")
        gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(EnforcedBudget("shared", limit_bytes=64 << 20),))
        driver.store([block(keyspace, spread(n)) for n in range(20) for keyspace in (KEYSPACE_A, KEYSPACE_B)])
        admin = redis_server.admin()
        other = admin.hget(capacity_key(DOMAIN), KEYSPACE_B)
        assert admin.exists(ledger_key(DOMAIN, KEYSPACE_A))
        gate.allow(KEYSPACE_B, budgets=(EnforcedBudget("shared", limit_bytes=64 << 20),))
        driver.tier.close()
        assert erase(order(redis_server.port)).sums[0].keys == 20
        assert not admin.exists(ledger_key(DOMAIN, KEYSPACE_A))
        assert not admin.hexists(capacity_key(DOMAIN), KEYSPACE_A)
        assert int(admin.hget(capacity_key(DOMAIN), "sum")) == int(other.split(b":")[1]), "only the other is charged"

    def test_a_server_without_any_memory_left_is_emptied_too(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        redis_server.admin().config_set("maxmemory", 1)
        assert erase(order(redis_server.port)).sums == (WHOLE, WHOLE, NOTHING)

    def test_index_entries_without_a_value_are_not_counted_as_values(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        redis_server.admin().delete(b":".join(name_of(KEYSPACE_A, 3)))
        report = erase(order(redis_server.port))
        assert report.sums[1] == Amount(COUNT - 1, WHOLE.bytes - len(VALUE))
        assert look(redis_server.port).empty

    def test_a_damaged_index_is_emptied_as_far_as_it_names_anything(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(64))
        for number, index in enumerate(("#x", "#a", "#m", "#s")):
            redis_server.admin().delete(f"{bucket_prefix(DOMAIN, KEYSPACE_A, number)}:{index}")
        assert erase(order(redis_server.port)).end.outcome is Outcome.ERASED
        assert look(redis_server.port).empty


class TestAKill:
    def test_after_any_command_another_run_goes_on_and_reports_the_same(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        for commands in range(1, 200):
            redis_server.admin().flushall()
            put(connection, KEYSPACE_A, range(COUNT))
            connection.ask([reserve(KEYSPACE_A, COUNT)])
            try:
                erase(order(redis_server.port), lambda tier, most=commands: MortalServers(tier, most))  # type: ignore[misc]
            except KilledError:
                report = erase(order(redis_server.port))
                assert report.end.outcome is Outcome.ERASED
                assert report.sums == (WHOLE, WHOLE, NOTHING), f"killed after {commands} commands"
                assert left(redis_server) == {"#s"}
            else:
                break
        assert 30 < commands < 199, "all of them were tried"

    def test_of_the_program_at_a_moment_of_its_own_loses_no_count(
        self, redis_server: RedisProcess, connection: Connection, tmp_path: Path
    ) -> None:
        put(connection, KEYSPACE_A, range(600))
        tier = {"name": "shared", "endpoints": [{"host": "127.0.0.1", "port": redis_server.port}]}
        asked = {"domain": DOMAIN, "revision": 7, "keyspaces": [KEYSPACE_A], "tier": tier, "window_ms": 0}
        admin = redis_server.admin()
        killed = start_program(tmp_path / "order.json", asked)
        while not admin.exists(revoked_key(DOMAIN)):
            time.sleep(0.001)
        killed.kill()
        killed.communicate()
        output, _ = (last := start_program(tmp_path / "order.json", asked)).communicate(timeout=60)
        assert last.returncode == 0
        assert report_of(output).sums[1] == Amount(600, 600 * len(VALUE))
        assert KEYSPACE_A not in output.decode()
        assert keyspace_digest(KEYSPACE_A) in output.decode()

    def test_in_the_wait_for_late_values_does_not_begin_it_anew(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, [1])
        asked = order(redis_server.port, window_ms=30_000)
        first: list[float] = []
        with pytest.raises(KilledError):
            erase(asked, lambda tier: MortalServers(tier, 17 + 1), first)
        time.sleep(0.2)
        second: list[float] = []
        assert erase(asked, sleeps=second).end.outcome is Outcome.ERASED
        assert 10 < max(second) <= 29.8

    def test_what_the_deletion_took_is_a_part_of_the_wait(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        sleeps: list[float] = []
        report = erase(order(redis_server.port, window_ms=30_000), SlowServers, sleeps)
        assert report.end.outcome is Outcome.ERASED
        assert 0 < max(sleeps) < 30 - 12 * SlowServers.EACH_S

    def test_a_run_after_the_window_does_not_wait(self, redis_server: RedisProcess, connection: Connection) -> None:
        put(connection, KEYSPACE_A, [1])
        erase(order(redis_server.port))
        time.sleep(0.1)
        sleeps: list[float] = []
        report = erase(order(redis_server.port, window_ms=100), sleeps=sleeps)
        assert max(sleeps) < 0.1
        assert report.end.since_revoked_ms >= 100


class TestStrays:
    def test_values_without_an_index_are_found_by_the_look_and_deleted_by_name(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        admin = redis_server.admin()
        admin.delete(*(name for name in admin.scan_iter() if b":#" in name))
        assert erase(order(redis_server.port)).sums[0] == NOTHING, "no index names them"
        found = look(redis_server.port).nodes[0]
        assert (found.values, found.value_bytes) == (COUNT, WHOLE.bytes)
        report = erase(order(redis_server.port, strays=list(found.names)))
        assert [one.strays for one in report.primaries] == [COUNT]
        assert look(redis_server.port).empty

    @pytest.mark.parametrize(
        "name",
        [
            b":".join(name_of(KEYSPACE_B, 1)).decode(),
            b":".join(name_of(KEYSPACE_A, 1)).decode().replace(DOMAIN, "0" * 16),
            f"{bucket_prefix(DOMAIN, KEYSPACE_A, 0)}:#s",
            capacity_key(DOMAIN),
        ],
    )
    def test_no_name_is_taken_that_is_not_a_block_of_the_keyspaces(self, name: str) -> None:
        with pytest.raises(ValueError, match="strays"):
            order(1, strays=[name])


class TestRights:
    @pytest.fixture
    def guarded(self, tmp_path: Path) -> Iterator[RedisProcess]:
        """A server with the users of managed ones."""
        users = tmp_path / "users.acl"
        lines = [f"user {user} {' '.join(user_rules(user, DOMAIN, [user]))}" for user in (DATA_USER, ADMIN_USER)]
        users.write_text("\n".join(["user default on nopass ~* &* +@all", *lines]) + "\n")
        for user in (DATA_USER, ADMIN_USER):
            (tmp_path / user).write_text(user)
        server = RedisProcess(tmp_path, "--aclfile", str(users))
        server.start()
        yield server
        server.kill()

    def test_the_data_planes_user_deletes_and_the_operators_looks(
        self, guarded: RedisProcess, connect_to: Callable[..., Connection], tmp_path: Path
    ) -> None:
        put(connect_to(guarded.port), KEYSPACE_A, range(COUNT))
        operator = Access(ADMIN_USER, None, ADMIN_USER)
        assert look(guarded.port, access=operator).nodes[0].value_bytes == WHOLE.bytes
        data = {"username": DATA_USER, "password_file": str(tmp_path / DATA_USER)}
        assert erase(order(guarded.port, tier=data)).sums == (WHOLE, WHOLE, NOTHING)
        assert look(guarded.port, access=operator).empty

    def test_who_may_not_list_names_proves_nothing(self, guarded: RedisProcess) -> None:
        found = look(guarded.port, access=Access(DATA_USER, None, DATA_USER))
        assert [one.reason for one in found.problems] == ["NoPermission"]
        assert not found.empty


class TestStopping:
    def test_a_server_that_is_away_is_named(self, redis_server: RedisProcess, tmp_path: Path) -> None:
        redis_server.kill()
        tier = {"name": "shared", "endpoints": [{"host": "127.0.0.1", "port": redis_server.port}]}
        asked = {"domain": DOMAIN, "revision": 7, "keyspaces": [KEYSPACE_A], "tier": tier}
        output, _ = (program := start_program(tmp_path / "order.json", asked)).communicate(timeout=60)
        assert program.returncode == 3
        assert report_of(output).end.reason is StopReason.SERVER_AWAY
        assert str(redis_server.port) in report_of(output).end.message
        assert [one.reason for one in look(redis_server.port).problems] == ["ConnectionRefused"]
        assert not look(redis_server.port).empty

    def test_an_order_that_cannot_be_read_is_not_begun(self, tmp_path: Path) -> None:
        program = start_program(tmp_path / "order.json", {"domain": "no"})
        _, errors = program.communicate(timeout=60)
        assert program.returncode == 2
        assert errors.decode().startswith("the order cannot be read: the order lacks keyspaces")

    @pytest.mark.parametrize(
        ("change", "names"),
        [
            ({"domain": "D" * 16}, "domain"),
            ({"keyspaces": []}, "keyspaces"),
            ({"keyspaces": [KEYSPACE_A, KEYSPACE_A]}, "keyspaces"),
            ({"keyspaces": ["*"]}, "keyspaces"),
            ({"revision": "7"}, "revision"),
            ({"parallelism": 0}, "parallelism"),
            ({"more": 1}, "more"),
        ],
    )
    def test_malformed_fields_are_named(self, change: dict[str, object], names: str) -> None:
        raw = {"domain": DOMAIN, "revision": 1, "keyspaces": [KEYSPACE_A]}
        tier = {"name": "shared", "endpoints": [{"host": "h", "port": 1}]}
        assert Order.from_json(raw | {"tier": tier}).keyspaces == (KEYSPACE_A,)
        with pytest.raises(ValueError, match=names):
            Order.from_json(raw | {"tier": tier} | change)


class TestReplicas:
    def test_a_copy_that_only_a_replica_has_is_found(
        self, redis_server: RedisProcess, connection: Connection, tmp_path: Path
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT))
        replica = RedisProcess(tmp_path, "--replicaof", "127.0.0.1", str(redis_server.port))
        redis_server.admin().config_set("repl-diskless-sync-delay", 0)
        replica.start()
        try:
            admin = replica.admin()
            admin.config_set("replica-read-only", "no")
            while admin.info("replication")["master_link_status"] != "up":
                time.sleep(0.02)
            report = erase(order(redis_server.port))
            assert report.end.outcome is Outcome.ERASED
            assert [(one.replicas, one.replicas_in_step) for one in report.primaries] == [(1, 1)]
            whole = look(redis_server.port)
            assert [one.primary for one in whole.nodes] == [True, False]
            assert whole.empty
            admin.set(b":".join(name_of(KEYSPACE_A, 1)), b"copy")
            found = look(redis_server.port)
            assert [one.values for one in found.nodes] == [0, 1]
            assert not found.empty
            assert NODE_UNKNOWN in [one.reason for one in look(replica.port).problems], "its primary was not looked at"
        finally:
            replica.kill()


def test_a_report_is_read_as_it_was_written(redis_server: RedisProcess, connection: Connection) -> None:
    put(connection, KEYSPACE_A, range(3))
    for line in erase(order(redis_server.port)).lines:
        assert decode_line(encode_line(line)) == line
        canonical = json.dumps(json.loads(encode_line(line)), sort_keys=True, separators=(",", ":"))
        assert encode_line(line).decode() == canonical + "\n"
