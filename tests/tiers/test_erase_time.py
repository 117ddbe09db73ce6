"""A script that deletes has a time, and leaves what it has no time for to the next: on real servers.

That it is over at once stands for a server that is too slow for its work, which no test could wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstrata.contract.messages.erase_report import Erased, Outcome
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store import redis_scripts as scripts
from kvstrata.contract.store.redis_keys import bucket_prefix
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.delete import TOMBSTONE_KEEP_MS
from kvstrata_sidecar.delete_job.run import COMMANDS_SEEN, FIRST_AT_ONCE, GOAL_S
from kvstrata_sidecar.delete_job.servers import Primary, Servers
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import VALUE, erase, look, name_of, order, put, reserve, summed
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import on_every_server

pytestmark = needs_redis
OLD, NEW = "01d" + 13 * "0", "2e3" + 13 * "0"
STEP = 32
"""Blocks that a script takes out between two looks at the clock."""

LARGE = 9 << 20
"""Bytes of a value of which two are as many as go between two looks."""


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    source = scripts.source

    def hurried(name: str) -> bytes:
        text = source(name)
        return text.replace(b"local longest_us = 2000\n", b"local longest_us = 0\n") if name == "_bucket" else text

    monkeypatch.setattr(scripts, "source", hurried)
    scripts.script.cache_clear()
    assert b"longest_us = 0" in scripts.script("drop").text
    yield
    scripts.script.cache_clear()


def bucket(blocks: int) -> list[int]:
    """Return numbers of so many blocks of one bucket."""
    return [16 * number for number in range(blocks)]


def drop(connection: Connection, count: int) -> list[int]:
    """Take one step in that bucket; return how many it took out, how many are left, and what the tombstone tells."""
    base, _ = name_of(KEYSPACE_A, 0)
    command = call("drop", state_key(base), reads_numbers(6), count=count, keep_ms=TOMBSTONE_KEEP_MS)
    return list(connection.ask([command])[0])


@on_every_server
def test_time_passes_in_a_script(redis_server: RedisProcess) -> None:
    waits = "for number = 1, 10000000 do if is_over() then return number end end return 0"
    admin, text = redis_server.admin(), scripts.common("bucket") + waits.encode()
    # On a busy machine all the time may pass before the first look.
    until(lambda: admin.eval(text, 1, "k:#s") > 1, "it is over from the beginning, or never")


@on_every_server
@pytest.mark.usefixtures("no_time")
def test_a_step_begins_and_leaves_the_rest_to_the_next(connection: Connection) -> None:
    put(connection, KEYSPACE_A, bucket(STEP + 5))
    connection.ask([reserve(KEYSPACE_A, 16 * 1000), reserve(KEYSPACE_A, 16 * 1001)])
    assert drop(connection, 0)[:2] == [0, STEP + 6], "one of two reservations ends with the tombstone"
    assert drop(connection, 256)[:2] == [STEP, 5]
    assert drop(connection, 256)[:5] == [5, 0, 0, STEP + 5, (STEP + 5) * len(VALUE)]


@pytest.mark.usefixtures("no_time")
def test_of_large_values_fewer_go_in_a_step(redis_server: RedisProcess, connection: Connection) -> None:
    put(connection, KEYSPACE_A, bucket(5))
    for number in bucket(5):
        redis_server.admin().setrange(b":".join(name_of(KEYSPACE_A, number)), LARGE - 1, "x")
    assert drop(connection, 8)[:2] == [2, 3]


@pytest.mark.usefixtures("no_time")
def test_without_time_all_goes_and_is_counted_all_the_same(redis_server: RedisProcess, connection: Connection) -> None:
    put(connection, KEYSPACE_A, range(200))
    for number, index in enumerate(("#x", "#a", "#m", "#s")):
        redis_server.admin().delete(f"{bucket_prefix(DOMAIN, KEYSPACE_A, number)}:{index}")
    report = erase(order(redis_server.port))
    assert report.end.outcome is Outcome.ERASED
    assert report.sums[1] == Amount(200, 200 * len(VALUE))
    assert look(redis_server.port).empty


@pytest.mark.usefixtures("no_time")
def test_of_a_former_identity_all_goes_one_by_one(redis_server: RedisProcess, connection: Connection) -> None:
    # So many that a server keeps them in a table, and few enough that it gives all of them in one step of a walk.
    put(connection, KEYSPACE_A, bucket(140), OLD)
    put(connection, KEYSPACE_A, [16 * number for number in range(140, 150)], NEW)
    report = erase(order(redis_server.port, identities=[OLD]))
    assert report.end.outcome is Outcome.ERASED
    deleted = summed([line.deleted for line in report.lines if isinstance(line, Erased)])
    assert deleted == Amount(140, 140 * len(VALUE))
    base, _ = name_of(KEYSPACE_A, 0)
    assert redis_server.admin().hlen(base + b":#m") == 10
    assert int(redis_server.admin().hget(state_key(base), "used")) == 10 * len(VALUE)


def test_entries_that_nothing_else_names_are_found_however_many_went_before(redis_server: RedisProcess) -> None:
    base, _ = name_of(KEYSPACE_A, 0)
    record = f"{len(VALUE)}:1"
    members = [name_of(KEYSPACE_A, number)[1] for number in bucket(20_000)]
    redis_server.admin().hset(base + b":#m", mapping=dict.fromkeys(members, record))
    assert erase(order(redis_server.port)).end.outcome is Outcome.ERASED
    assert look(redis_server.port).empty


def test_the_last_few_blocks_of_a_bucket_make_no_later_step_too_large(
    redis_server: RedisProcess, connection: Connection
) -> None:
    put(connection, KEYSPACE_A, range(40 * 16))
    each_s, clock_s, steps = GOAL_S / 10, 0.0, list[int]()

    class SlowServers(Servers):
        """Needs so long for every block that it takes out."""

        def ask_one(self, primary: Primary, commands: Sequence[Command]) -> list[Any]:
            nonlocal clock_s
            answers = super().ask_one(primary, commands)
            if len(commands) == 1 and commands[0].key.endswith(b":#s"):
                (removed, *_), *_ = answers
                clock_s += each_s * removed
                steps.append(removed)
            return answers

    report = erase(order(redis_server.port), SlowServers, sleeps=[], clock=lambda: clock_s)
    assert report.sums[1].keys == sum(steps) == 40 * 16
    assert max(steps[:1]) <= FIRST_AT_ONCE
    assert max(steps[COMMANDS_SEEN:]) == 10
