"""Two domains on one Redis server: neither sees, evicts nor erases the other's blocks, even of one keyspace's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.contract.messages.erase_report import Outcome
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS
from kvstrata_sidecar.adapter.runtime import Runtime
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import erase, look, order
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block, spread, stored

pytestmark = needs_redis
OTHER = "e1e1e1e1e1e1e1e1"
COUNT = 8
BLOCKS = [block(KEYSPACE_A, spread(number)) for number in range(COUNT)]
MORE = [block(KEYSPACE_A, spread(number)) for number in range(COUNT, 4 * COUNT)]


@pytest.fixture
def other_gate(tmp_path: Path) -> GateStandIn:
    directory = tmp_path / "other"
    directory.mkdir()
    return GateStandIn(directory, OTHER)


@pytest.fixture
def other(driver: Driver, other_gate: GateStandIn) -> Iterator[Driver]:
    """A pod of another domain on the server of `driver`, with the same keyspace."""
    params = AdapterParams(OTHER, IDENTITY, driver.params, other_gate.policy_dir, other_gate.link_dir)
    found = Driver(Runtime(params), params, driver.params, window_ms=WRITE_WINDOW_MS)
    found.until("closed")
    other_gate.allow(KEYSPACE_A)
    yield found
    found.tier.close()
    found.runtime.close()


def by_domain(server: RedisProcess) -> Counter[str]:
    names = map(parse_block_key, stored(server))
    return Counter(name.domain for name in names if name is not None)


def test_a_domain_neither_finds_nor_overwrites_blocks_of_another(driver: Driver, other: Driver) -> None:
    assert driver.store(BLOCKS, fill=1).successful
    assert other.lookup(BLOCKS) == [0] * COUNT
    assert other.store(BLOCKS, fill=2).successful
    for domain, fill in ((driver, 1), (other, 2)):
        hits, buffers = domain.load(BLOCKS)
        assert hits == [1] * COUNT
        assert {byte for buffer in buffers for byte in (buffer[0], buffer[-1])} == {fill}


def test_a_domain_at_its_limit_evicts_its_own_blocks_alone(
    driver: Driver, other: Driver, other_gate: GateStandIn, redis_server: RedisProcess
) -> None:
    driver.store(BLOCKS)
    other_gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=COUNT * VALUE_BYTES),))
    for one in (*BLOCKS, *MORE):
        other.store([one])
    assert other.tier.counters().get("evicted_bytes", 0) > 0
    assert by_domain(redis_server)[OTHER] <= COUNT
    assert driver.lookup(BLOCKS) == [1] * COUNT


def test_a_domain_erases_its_own_blocks_alone_and_revokes_no_keyspace_of_another(
    driver: Driver, other: Driver, other_gate: GateStandIn, redis_server: RedisProcess
) -> None:
    driver.store(BLOCKS)
    other.store(BLOCKS)
    other_gate.allow(KEYSPACE_B)
    report = erase(order(redis_server.port, KEYSPACE_A, domain=OTHER))
    assert (report.end.outcome, report.sums[1].keys) == (Outcome.ERASED, COUNT)
    assert look(redis_server.port, domain=OTHER).empty
    assert by_domain(redis_server) == {DOMAIN: COUNT}
    assert driver.lookup(BLOCKS) == [1] * COUNT
    driver.tier._deps.revoked.forget()
    assert driver.store(MORE).successful
    assert driver.refused("revoked") == 0, "the keyspace is revoked in the other domain alone"
