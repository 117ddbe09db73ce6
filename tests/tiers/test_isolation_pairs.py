"""Lookups in pairs, one that must hit and one that must miss, while the policy changes under them.

`KVSTRATA_PAIRS` says how many; 100,000 take a few minutes.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata_sidecar.adapter.tier.interface import Block
from tests.support.amounts import SEED, TIER_PAIRS
from tests.tiers.gate_stand_in import FINGERPRINT, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver

pytestmark = pytest.mark.redis

PAIRS = int(TIER_PAIRS)
AT_ONCE = 100
CHUNKS = 8
SCOPES = tuple(
    Scope(kind, f"{kind}-{number}".lower())
    for kind, count in ((ScopeKind.TENANT, 12), (ScopeKind.GROUP, 5), (ScopeKind.POOL, 3))
    for number in range(count)
)
KEY = hashlib.sha256(b"a domain's key").digest()
EPOCH = "5" * 32
ROLLED = tuple(derive_keyspace(KEY, Scope(ScopeKind.TENANT, "rolled"), f"{epoch:032x}") for epoch in range(8))


def space(scope: Scope) -> str:
    return derive_keyspace(KEY, scope, EPOCH)


def chunk(owner: int, number: int) -> bytes:
    """The name of a chunk that one scope alone has computed."""
    return hashlib.sha256(f"{owner}/{number}".encode()).digest()


def asked(keyspace: str, name: bytes) -> Block:
    return Block((keyspace, name), keyspace, 0x01000100, 0, name, FINGERPRINT)


@contextmanager
def changing(gate: GateStandIn, spaces: list[str]) -> Iterator[Callable[[], int]]:
    """Put other policies in force for as long as it lasts: a scope's epochs roll beside those that are looked up."""
    ended, revisions = threading.Event(), [0]

    def change() -> None:
        while not ended.is_set():
            gate.allow(*spaces, ROLLED[revisions[0] % len(ROLLED)])
            revisions[0] += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield lambda: revisions[0]
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("workers", [1, 4])
def test_nobody_finds_what_another_scope_has_while_policies_change(
    start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, workers: int
) -> None:
    driver = start(redis_server.port, workers=workers)
    driver.until("closed")
    spaces = [space(scope) for scope in SCOPES]
    assert len(set(spaces)) == len(SCOPES)
    gate.allow(*spaces)
    for owner, keyspace in enumerate(spaces):
        driver.store([asked(keyspace, chunk(owner, number)) for number in range(CHUNKS)])
    chance = random.Random(workers + SEED)
    foreign = missed = 0
    with changing(gate, spaces) as revisions:
        for _ in range(0, PAIRS, AT_ONCE):
            own, other = list[Block](), list[Block]()
            for _ in range(AT_ONCE):
                owner, reader = chance.sample(range(len(spaces)), 2)
                name = chunk(owner, chance.randrange(CHUNKS))
                own.append(asked(spaces[owner], name))
                other.append(asked(chance.choice((spaces[reader], ROLLED[chance.randrange(len(ROLLED))])), name))
            order = [*own, *other]
            chance.shuffle(order)
            found = dict(zip(map(id, order), driver.lookup(order), strict=True))
            missed += sum(not found[id(one)] for one in own)
            foreign += sum(found[id(one)] for one in other)
        assert revisions() > 1, "the policy never changed"
    assert (foreign, missed) == (0, 0)
