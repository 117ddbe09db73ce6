"""What was cached under another identity is out of reach, found by a rollback, and deleted alone: on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.erase_report import Erased, Outcome, StopReason
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, declared, parse_block_key, revoked_key
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.runtime import acquire, release
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.servers import Layout, Servers
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import (
    VALUE,
    KilledError,
    MortalServers,
    Report,
    erase,
    name_of,
    order,
    put,
    report_of,
    start_program,
)
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import on_every_server
from tests.tiers.tier_driver import Driver, block, spread

pytestmark = [
    *needs_redis,
    pytest.mark.claim("blocks of a former identity stay for a rollback, and then are deleted alone"),
]
OLD, OLDER, NEW = "01d" + 13 * "0", "01de" + 12 * "0", "2e3" + 13 * "0"
COUNT = 20
WHOLE = Amount(COUNT, COUNT * len(VALUE))
NOTHING = Amount(0, 0)
PATIENT = {"io_timeout_ms": 5000, "lookup_deadline_ms": 10_000, "load_deadline_ms": 10_000, "store_deadline_ms": 10_000}


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


def reclaim(server: RedisProcess, *keyspaces: str, identities: tuple[str, ...] = (OLD,), **options: Any) -> Report:
    return erase(order(server.port, *keyspaces, identities=list(identities)), **options)


def deleted(report: Report) -> Amount:
    """What a run told that it deleted."""
    amounts = [line.deleted for line in report.lines if isinstance(line, Erased)]
    return Amount(sum(one.keys for one in amounts), sum(one.bytes for one in amounts))


def identities(server: RedisProcess, keyspace: str = KEYSPACE_A) -> dict[str, int]:
    """How many values there are of each identity."""
    found: dict[str, int] = {}
    for name in server.admin().scan_iter(f"*{keyspace}*", count=1000):
        key = parse_block_key(name.decode())
        if key is not None:
            name = declared(key.identity)
            found[name] = found.get(name, 0) + 1
    return found


def books_are_right(server: RedisProcess, connection: Connection, keyspace: str, blocks: int) -> None:
    """Assert that index, accounts and values of a keyspace say the same, which is so many blocks."""
    admin, used, entries = server.admin(), 0, 0
    for number in range(BUCKETS):
        base = bucket_prefix(DOMAIN, keyspace, number)
        used += int(admin.hget(f"{base}:#s", "used") or 0)
        entries += admin.hlen(f"{base}:#m")
        assert admin.hlen(f"{base}:#m") == admin.zcard(f"{base}:#x") == admin.zcard(f"{base}:#a")
        audit = call("audit", state_key(base.encode()), reads_numbers(4), cursor=0, count=1000, encrypts=False)
        assert connection.ask([audit])[0] == [0, 0, 0, 0]
    assert (entries, used) == (blocks, blocks * len(VALUE))


class TestNames:
    """A new identity is a new name: nothing has to happen before the first new pod may serve."""

    @contextmanager
    def pod(self, directory: Path, port: int, identity: str) -> Iterator[Driver]:
        """Run a pod's adapter of this identity, as long as the context lasts."""
        directory.mkdir()
        gate = GateStandIn(directory)
        tier = TierParams("shared", endpoints=(Endpoint("127.0.0.1", port),), **PATIENT)
        params = AdapterParams(DOMAIN, identity, tier, gate.policy_dir, gate.link_dir)
        driver = Driver(acquire(params), params, tier)
        try:
            driver.until("closed")
            gate.allow(KEYSPACE_A)
            yield driver
        finally:
            driver.tier.close()
            release(driver.runtime)

    def test_a_new_identity_finds_nothing_of_the_old_and_a_rollback_finds_all_of_it(
        self, redis_server: RedisProcess, tmp_path: Path
    ) -> None:
        blocks = [block(KEYSPACE_A, spread(number)) for number in range(8)]
        everything, nothing = [1] * 8, [0] * 8
        with self.pod(tmp_path / "first", redis_server.port, OLD) as pod:
            pod.store(blocks, fill=1)
            assert pod.lookup(blocks) == everything
        with self.pod(tmp_path / "second", redis_server.port, NEW) as pod:
            assert pod.lookup(blocks) == nothing
            assert pod.load(blocks)[0] == nothing
            pod.store(blocks, fill=2)
        with self.pod(tmp_path / "back", redis_server.port, OLD) as pod:
            hits, buffers = pod.load(blocks)
            assert hits == everything
            assert {bytes(buffer[:1]) for buffer in buffers} == {b"\1"}, "it reads what it wrote, and not the other's"
        assert reclaim(redis_server).end.outcome is Outcome.ERASED
        with self.pod(tmp_path / "late", redis_server.port, OLD) as pod:
            assert pod.lookup(blocks) == nothing, "after its window a rollback finds nothing"
        with self.pod(tmp_path / "again", redis_server.port, NEW) as pod:
            hits, buffers = pod.load(blocks)
            assert hits == everything
            assert {bytes(buffer[:1]) for buffer in buffers} == {b"\2"}


class MovingServers(Servers):
    """Of which the last slot goes to another server meanwhile."""

    def look_again(self) -> Layout:
        now = super().look_again()
        other = replace(now.primaries[0], node="another")
        return Layout((*now.primaries, other), (*now.owners[:-1], len(now.primaries)))


class TestReclaim:
    @on_every_server
    def test_all_of_an_identity_goes_and_nothing_else(self, redis_server: RedisProcess, connection: Connection) -> None:
        for keyspace in (KEYSPACE_A, KEYSPACE_B):
            for identity in (OLD, OLDER, NEW):
                put(connection, keyspace, range(COUNT), identity)
        report = reclaim(redis_server, KEYSPACE_A)
        assert (report.end.outcome, report.end.reason) == (Outcome.ERASED, StopReason.NONE)
        assert deleted(report) == WHOLE
        assert identities(redis_server) == {OLDER: COUNT, NEW: COUNT}
        assert identities(redis_server, KEYSPACE_B) == {OLD: COUNT, OLDER: COUNT, NEW: COUNT}
        books_are_right(redis_server, connection, KEYSPACE_A, 2 * COUNT)
        both = reclaim(redis_server, KEYSPACE_A, KEYSPACE_B, identities=(OLD, OLDER))
        assert deleted(both).keys == 3 * COUNT
        assert identities(redis_server) == identities(redis_server, KEYSPACE_B) == {NEW: COUNT}
        books_are_right(redis_server, connection, KEYSPACE_B, COUNT)

    def test_the_keyspaces_stay_in_use(self, redis_server: RedisProcess, connection: Connection) -> None:
        put(connection, KEYSPACE_A, range(COUNT), OLD)
        reclaim(redis_server)
        admin = redis_server.admin()
        assert not admin.exists(revoked_key(DOMAIN))
        assert not [name for name in admin.scan_iter("*#s") if admin.hexists(name, "tombstone")]
        put(connection, KEYSPACE_A, range(COUNT), NEW)
        books_are_right(redis_server, connection, KEYSPACE_A, COUNT)

    def test_a_bucket_of_thousands_goes_in_steps_and_others_of_it_stay(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        one_bucket = [16 * number for number in range(600)]
        put(connection, KEYSPACE_A, one_bucket, OLD)
        put(connection, KEYSPACE_A, one_bucket[:300], NEW)
        sleeps: list[float] = []
        assert deleted(reclaim(redis_server, sleeps=sleeps)).keys == 600
        assert len(sleeps) > 5, "the server was left to others now and then"
        assert identities(redis_server) == {NEW: 300}
        books_are_right(redis_server, connection, KEYSPACE_A, 300)

    def test_killed_after_any_command_another_run_does_the_rest_and_nothing_more(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        for commands in range(1, 100):
            redis_server.admin().flushall()
            put(connection, KEYSPACE_A, range(COUNT), OLD)
            put(connection, KEYSPACE_A, range(COUNT), NEW)
            try:
                reclaim(redis_server, servers=lambda tier, most=commands: MortalServers(tier, most))
            except KilledError:
                rest = identities(redis_server).get(OLD, 0)
                assert deleted(reclaim(redis_server)).keys == rest, f"killed after {commands} commands"
                assert identities(redis_server) == {NEW: COUNT}
                books_are_right(redis_server, connection, KEYSPACE_A, COUNT)
            else:
                break
        assert 20 < commands < 99, "all of them were tried"

    def test_a_step_under_a_recount_is_a_part_of_what_the_recount_comes_to(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, [16 * number for number in range(COUNT)], OLD)
        put(connection, KEYSPACE_A, [16 * number for number in range(COUNT)], NEW)
        base, _ = name_of(KEYSPACE_A, 0)
        (half,) = connection.ask([call("recount", state_key(base), list, step=COUNT)])
        assert half[0] == b"more"
        reclaim(redis_server)
        answer = half
        while answer[0] == b"more":
            (answer,) = connection.ask([call("recount", state_key(base), list, step=2 * COUNT)])
        assert (answer[0], [int(drift) for drift in answer[1:]]) == (b"ok", [0, 0, 0])
        books_are_right(redis_server, connection, KEYSPACE_A, COUNT)

    def test_slots_that_move_meanwhile_are_told_and_what_was_deleted_too(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT), OLD)
        report = reclaim(redis_server, servers=MovingServers)
        assert (report.end.outcome, report.end.reason) == (Outcome.STOPPED, StopReason.SLOT_MAP_CHANGED)
        assert deleted(report) == WHOLE

    def test_the_program_of_a_job_does_it(
        self, redis_server: RedisProcess, connection: Connection, tmp_path: Path
    ) -> None:
        put(connection, KEYSPACE_A, range(COUNT), OLD)
        put(connection, KEYSPACE_A, range(COUNT), NEW)
        tier = {"name": "shared", "endpoints": [{"host": "127.0.0.1", "port": redis_server.port}]}
        tier |= {"connect_timeout_ms": 5000, "io_timeout_ms": 5000}
        asked = {"domain": DOMAIN, "revision": 0, "keyspaces": [KEYSPACE_A], "tier": tier, "identities": [OLD]}
        program = start_program(tmp_path / "order.json", asked)
        output, _ = program.communicate(timeout=60)
        assert program.returncode == 0
        assert deleted(report_of(output)) == WHOLE
        assert identities(redis_server) == {NEW: COUNT}
        assert KEYSPACE_A not in output.decode()


class TestOrder:
    @pytest.mark.parametrize(
        "change",
        [
            {"identities": []},
            {"identities": ["0" * 15]},
            {"identities": [OLD.upper()]},
            {"identities": OLD},
            {"identities": [OLD], "strays": [f"kvs1:{DOMAIN}:{{{KEYSPACE_A}:00}}:{OLD}:00000000:0:{'00' * 32}"]},
        ],
    )
    def test_one_that_names_no_identity_is_refused_and_deletes_nothing(self, change: dict[str, Any]) -> None:
        asked = {"domain": DOMAIN, "revision": 0, "keyspaces": [KEYSPACE_A], **change}
        tier = {"name": "shared", "endpoints": [{"host": "127.0.0.1", "port": 1}]}
        with pytest.raises(ValueError, match=r"identities|strays"):
            Order.from_json(asked | {"tier": tier})
