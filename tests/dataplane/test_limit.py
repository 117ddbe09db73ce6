"""Four real LMCache servers store one keyspace at its limit; an observer in Redis watches, and then they are killed."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS
from kvstrata_sidecar.adapter.runtime import acquire, release
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import stop, sweep
from tests.tiers.tier_driver import Driver

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]
SERVERS = 4
BLOCKS_AT_THE_LIMIT = 200
"""Several times what the servers have reserved at any moment: a block that was never written counts as unused."""
WATCHED_S = 6.0
OBSERVATIONS = 100
"""How often the books are looked at, at least."""
PATIENCE_S = 120.0


class Pod:
    """One server with its gate, and a thread that has it store one sequence after the other until it is killed."""

    def __init__(self, directory: Path, start_server: StartServer, redis: RedisProcess, number: int) -> None:
        directory.mkdir()
        self.gate = GateStandIn(directory)
        self.server: LMCacheServer = start_server(directory, self.gate, [tier(redis.port, **PATIENT)])
        self._sequences = itertools.count(number * 100_000)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._store, daemon=True)

    def stored(self) -> int:
        """How many blocks the tier has taken from this server."""
        return sum(state.stored for state in self.gate.state().tiers)

    def begin(self) -> None:
        """Store until `kill`."""
        self._thread.start()

    def kill(self) -> None:
        """Kill the server, whatever it does."""
        self._over.set()
        self.server.kill_server()

    def _store(self) -> None:
        while not self._over.is_set():
            try:
                self.server.store(next(self._sequences), KEYSPACE_A, 7)
            except AssertionError:
                if not self._over.is_set():  # its engine stand-in may see the server go
                    raise
                return


@contextmanager
def sweeper(directory: Path, port: int, budget: EnforcedBudget) -> Iterator[tuple[Driver, GateStandIn]]:
    """The adapter of a fifth pod, without an LMCache, to have it sweep when the test wants it to."""
    directory.mkdir()
    gate = GateStandIn(directory)
    params = TierParams("shared", endpoints=(Endpoint("127.0.0.1", port),), **PATIENT)
    whole = AdapterParams(DOMAIN, IDENTITY, params, gate.policy_dir, gate.link_dir)
    driver = Driver(acquire(whole), whole, params)
    try:
        driver.until("closed")
        gate.allow(KEYSPACE_A, budgets=(budget,))
        yield driver, gate
    finally:
        driver.tier.close()
        release(driver.runtime)


def test_the_limit_holds_at_every_instant_and_killed_servers_leave_nothing(
    tmp_path: Path, start_server: StartServer
) -> None:
    redis = RedisProcess(tmp_path)
    redis.start()
    books = Books(redis, KEYSPACE_A)
    chance = random.Random(5)
    try:
        pods = [Pod(tmp_path / f"pod-{number}", start_server, redis, number) for number in range(SERVERS)]
        for pod in pods:
            until(lambda pod=pod: pod.gate.state().tiers[0].breaker == "closed", pod.gate.state)  # type: ignore[misc]
        pods[0].gate.allow(KEYSPACE_A)
        pods[0].server.store(99_000_000, KEYSPACE_A, 7)
        until(books.entries, pods[0].gate.state)
        limit = BLOCKS_AT_THE_LIMIT * max(books.entries().values())
        budget = EnforcedBudget("shared", limit_bytes=limit)
        with sweeper(tmp_path / "sweeper", redis.port, budget) as (fifth, gate):
            for pod in pods:
                pod.gate.allow(KEYSPACE_A, budgets=(budget,))
            # What was stored before there was a limit has no lease yet.
            until(lambda: books.totals().holds(limit), books.totals)
            for pod in pods:
                pod.begin()
            observations = 0
            enough_at_s = time.monotonic() + WATCHED_S
            while (
                time.monotonic() < enough_at_s
                or observations < OBSERVATIONS
                or not all(pod.stored() > BLOCKS_AT_THE_LIMIT for pod in pods)
            ):
                assert time.monotonic() < enough_at_s + PATIENCE_S, "each of them stores more than fits"
                totals = books.totals()
                assert totals.holds(limit), totals
                observations += 1
            for pod in pods:
                until_s = time.monotonic() + chance.random()
                while time.monotonic() < until_s:
                    assert books.totals().holds(limit)
                pod.kill()
            redis.outlast_clients()
            stop(fifth.tier)
            time.sleep(WRITE_WINDOW_MS / 1000 + 0.1)
            gate.allow(KEYSPACE_A, budgets=(budget,))  # its word has grown stale meanwhile
            sweep(fifth.tier, KEYSPACE_A)
            books.assert_consistent()
            assert books.totals().used > limit / 2, "and most of the limit is in use"
            assert books.totals().holds(limit)
    finally:
        redis.kill()
