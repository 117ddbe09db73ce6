"""Some chunks of keyspaces that live on are deleted: those, whoever computed them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.redis.probe import Access
from kvstrata.contract.messages.erase_report import Outcome, StopReason
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import BUCKETS, BlockKey, bucket_prefix, revoked_key
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, user_rules
from kvstrata_sidecar.adapter.redis.client.commands import call, read_text, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.servers import Primary, Servers
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import (
    KEEP_MS,
    LIFE_MS,
    VALUE,
    KilledError,
    MortalServers,
    chunk_of,
    erase,
    look,
    name_of,
    order,
    put,
    reserve,
    reserve_at,
    set_value,
    write,
)
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import on_every_server

pytestmark = needs_redis
COUNT = 40
GOING = (3, 19, 20)
"""Numbers of chunks that are erased; the first two are in one bucket."""

CHUNKS = [chunk_of(number).hex() for number in GOING]
OTHER_IDENTITY = "2e2e2e2e2e2e2e2e"
NOTHING = Amount(0, 0)


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


def put_elsewhere(connection: Connection, number: int) -> None:
    """Store a chunk as another image of the model computed it."""
    base, member = name_of(KEYSPACE_A, number)
    member = OTHER_IDENTITY.encode() + member[len(IDENTITY) :]
    assert connection.ask([reserve_at(base, member)])[0].outcome is True
    commit = call(
        "commit", state_key(base), read_text, member=member, token=b"t", ttl_ms=LIFE_MS, age_ms=0, keep_ms=KEEP_MS
    )
    assert set_value(connection, base + b":" + member, [VALUE], 30_000, commit) == "ok"


def values(server: RedisProcess, keyspace: str = KEYSPACE_A) -> set[str]:
    """Full names of a keyspace's values."""
    return {name.decode() for name in server.admin().scan_iter(f"*{keyspace}*", count=1000) if b":#" not in name}


def named(keyspace: str, *numbers: int) -> set[str]:
    """Names of the blocks of these numbers."""
    return {b":".join(name_of(keyspace, number)).decode() for number in numbers}


def charged(server: RedisProcess, keyspace: str = KEYSPACE_A) -> int:
    """What the buckets say that a keyspace uses or holds, in bytes."""
    names = (f"{bucket_prefix(DOMAIN, keyspace, number)}:#s" for number in range(BUCKETS))
    states = (server.admin().hmget(name, "used", "held") for name in names)
    return sum(int(one or 0) for state in states for one in state)


@on_every_server
def test_chunks_go_whoever_computed_them_and_all_else_of_the_keyspace_stays(
    redis_server: RedisProcess, connection: Connection
) -> None:
    put(connection, KEYSPACE_A, range(COUNT))
    put(connection, KEYSPACE_B, range(COUNT))
    put_elsewhere(connection, GOING[0])
    report = erase(order(redis_server.port, chunks=CHUNKS))
    gone = Amount(len(GOING) + 1, (len(GOING) + 1) * len(VALUE))
    assert report.end.outcome is Outcome.ERASED
    assert report.sums == (gone, gone, NOTHING)
    staying = [number for number in range(COUNT) if number not in GOING]
    assert values(redis_server) == named(KEYSPACE_A, *staying)
    (seen,) = look(redis_server.port, chunks=CHUNKS).nodes
    assert (seen.values, seen.unsought) == (0, len(staying)), "the rest is counted, without another keyspace's"
    assert values(redis_server, KEYSPACE_B) == named(KEYSPACE_B, *range(COUNT))
    assert charged(redis_server) == len(staying) * len(VALUE)


def test_the_keyspace_is_neither_revoked_nor_closed(redis_server: RedisProcess, connection: Connection) -> None:
    put(connection, KEYSPACE_A, range(COUNT))
    erase(order(redis_server.port, chunks=CHUNKS))
    admin = redis_server.admin()
    assert not admin.exists(revoked_key(DOMAIN))
    assert not any(admin.hexists(name, "tombstone") for name in admin.scan_iter("*#s"))
    put(connection, KEYSPACE_A, GOING)
    assert named(KEYSPACE_A, *GOING) <= values(redis_server)


@pytest.mark.parametrize("written", [True, False])
def test_a_writer_that_was_frozen_with_a_reservation_leaves_nothing_when_it_wakes(
    redis_server: RedisProcess, connection: Connection, written: bool
) -> None:
    connection.ask([reserve(KEYSPACE_A, GOING[0]), reserve(KEYSPACE_A, 7)])
    if written:
        base, member = name_of(KEYSPACE_A, GOING[0])
        redis_server.admin().set(base + b":" + member, VALUE, px=30_000)
    report = erase(order(redis_server.port, chunks=CHUNKS))
    assert report.sums[1].keys == int(written)
    assert write(connection, KEYSPACE_A, GOING[0]) == "gone"
    assert values(redis_server) == set()
    assert write(connection, KEYSPACE_A, 7) == "ok"
    assert charged(redis_server) == len(VALUE)


@pytest.mark.parametrize("commands", [1, 2, 3, 5, 8, 10])
def test_wherever_one_is_killed_the_next_one_ends_with_nothing_left(
    redis_server: RedisProcess, connection: Connection, commands: int
) -> None:
    put(connection, KEYSPACE_A, range(COUNT))
    asked = order(redis_server.port, chunks=CHUNKS)
    with pytest.raises(KilledError):
        erase(asked, partial(MortalServers, commands=commands))
    report = erase(asked)
    assert (report.end.outcome, report.sums[2]) == (Outcome.ERASED, NOTHING)
    assert values(redis_server) == named(KEYSPACE_A, *(one for one in range(COUNT) if one not in GOING))
    assert charged(redis_server) == (COUNT - len(GOING)) * len(VALUE)


def test_a_value_without_an_index_goes_by_its_name_and_no_other_does(
    redis_server: RedisProcess, connection: Connection
) -> None:
    stray, other = (
        str(BlockKey(DOMAIN, KEYSPACE_A, OTHER_IDENTITY, 0, 0, chunk_of(number))) for number in (GOING[0], 7)
    )
    for name in (stray, other):
        redis_server.admin().set(name, VALUE)
    assert look(redis_server.port, chunks=CHUNKS).nodes[0].names == (stray,)
    report = erase(order(redis_server.port, chunks=CHUNKS, strays=[stray, other]))
    assert [one.strays for one in report.primaries] == [1]
    assert values(redis_server) == {other}


def test_what_is_stored_again_meanwhile_is_no_whole_deletion(
    redis_server: RedisProcess, connection: Connection
) -> None:
    put(connection, KEYSPACE_A, range(COUNT))

    class Storing(Servers):
        """Somebody stores a chunk again after it was deleted."""

        def ask_one(self, primary: Primary, commands: Sequence[Command]) -> list[Any]:
            if any(command.arguments[0] == b"UNLINK" for command in commands):
                put(connection, KEYSPACE_A, GOING[:1])
            return super().ask_one(primary, commands)

    stray = str(BlockKey(DOMAIN, KEYSPACE_A, OTHER_IDENTITY, 0, 0, chunk_of(GOING[0])))
    report = erase(order(redis_server.port, chunks=CHUNKS, strays=[stray]), Storing)
    assert (report.end.outcome, report.end.reason) == (Outcome.STOPPED, StopReason.NOT_EMPTIED)
    assert report.sums[2] == Amount(1, len(VALUE))


def test_a_look_for_chunks_sees_them_and_nothing_else(redis_server: RedisProcess, connection: Connection) -> None:
    put(connection, KEYSPACE_A, range(COUNT))
    found = look(redis_server.port, chunks=CHUNKS)
    assert set(found.nodes[0].names) == named(KEYSPACE_A, *GOING)
    assert (found.nodes[0].values, found.nodes[0].index) == (len(GOING), 0)
    assert not found.empty
    erase(order(redis_server.port, chunks=CHUNKS))
    assert look(redis_server.port, chunks=CHUNKS).empty
    assert not look(redis_server.port).empty


def test_the_data_planes_user_may_do_it(tmp_path: Path, connect_to: Callable[..., Connection]) -> None:
    users = tmp_path / "users.acl"
    lines = [f"user {user} {' '.join(user_rules(user, DOMAIN, [user]))}" for user in (DATA_USER, ADMIN_USER)]
    users.write_text("\n".join(["user default on nopass ~* &* +@all", *lines]) + "\n")
    (tmp_path / DATA_USER).write_text(DATA_USER)
    server = RedisProcess(tmp_path, "--aclfile", str(users))
    server.start()
    try:
        connection = connect_to(server.port)
        put(connection, KEYSPACE_A, range(COUNT))
        connection.ask([reserve(KEYSPACE_A, GOING[0] + 1000)])
        data = {"username": DATA_USER, "password_file": str(tmp_path / DATA_USER)}
        chunks = [*CHUNKS, chunk_of(GOING[0] + 1000).hex()]
        report = erase(order(server.port, tier=data, chunks=chunks))
        assert (report.end.outcome, report.sums[1].keys) == (Outcome.ERASED, len(GOING))
        assert look(server.port, access=Access(ADMIN_USER, None, ADMIN_USER), chunks=chunks).empty
    finally:
        server.kill()


@pytest.mark.parametrize("chunks", ["x", ["ab"], ["A" * 64], ["0" * 64, "0" * 64], [7]])
def test_an_order_with_malformed_chunks_is_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match="chunks"):
        order(1, chunks=chunks)


def test_without_chunks_an_order_is_for_whole_keyspaces() -> None:
    assert isinstance(order(1), Order)
    assert order(1).chunks == ()
