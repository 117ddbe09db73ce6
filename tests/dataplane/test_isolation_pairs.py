"""Lookups in pairs on a real LMCache server with memory, files and Redis: one must hit, one must miss, while policies
change.

`KVSTRATA_LMCACHE_PAIRS` says how many pairs there are at least.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from kvstrata.contract.messages.adapter import ChunkHashes, HashRequest
from kvstrata.contract.policy.keyspace import Scope
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, pack_hashes
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.fresh import CHUNKS, fresh_sequence, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.dataplane.moving_scopes import Cast, Fault, Pair, Play
from tests.support.amounts import LMCACHE_PAIRS, SEED
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.pool_gate import PoolGate
from tests.tiers.redis_process import RedisProcess

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.redis,
    pytest.mark.claim(
        "no tenant, group, pool or former epoch finds what another has, and a wrong policy is seen by its hits"
    ),
]

PAIRS = int(LMCACHE_PAIRS)
MOST = max(2 * PAIRS, 20_000)
"""After how many nobody waits any more for a kind of pair that has not been drawn."""

AT_ONCE = 48
PROMPTS = 4
"""What each scope has stored."""

EMPTIED_EVERY = 4
"""In how many batches the memory is emptied, so that tiers have to answer."""

KINDS = {
    *(
        f"{who} / {whose}"
        for who in ("Tenant", "Group", "Pool", "Former epoch")
        for whose in ("Tenant", "Group", "Pool")
    ),
    "Former member / Group",
    "Former reader / Pool",
}
"""Who asks, and whose prompt it is."""

SEEN_BY = {
    Fault.ONE_KEYSPACE: {"Tenant / Tenant"},
    Fault.FORMER_EPOCH: {"Former epoch / Tenant", "Former epoch / Group"},
    Fault.FORMER_READER: {"Former reader / Pool"},
}


@dataclass
class Found:
    """What came of pairs: how many count, by kind, and what should not be."""

    pairs: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    set_aside: int = 0


class Pod:
    """A cache container with memory, files and Redis, in this order, and the gate of a play."""

    def __init__(self, server: LMCacheServer, gate: GateStandIn) -> None:
        self.server, self.gate = server, gate
        self._pools = PoolGate(gate)
        self._owners: dict[Scope, int] = {}
        self._names: dict[Scope, bytes] = {}

    def run(self, play: Play, done: Callable[[Found], bool]) -> Found:
        """Look pairs of a play up, in batches, until it is done; a policy changes during each batch."""
        found = Found()
        self._enforce(play, play.now)
        with ThreadPoolExecutor(1) as other:
            for batch in itertools.count():
                if done(found) or found.pairs.total() >= MOST:
                    break
                self._furnish(play)
                if batch % EMPTIED_EVERY == 0:
                    self.server.forget_memory()
                drawn = play.draw(AT_ONCE)
                changing = other.submit(self._change, play)
                self._look_up(play, drawn, found)
                changing.result()
        return found

    def _look_up(self, play: Play, pairs: list[Pair], found: Found) -> None:
        asked = [one for pair in pairs for one in (pair.own, pair.other)]
        random.shuffle(asked)
        lookups = [(self._sequence(one.owner, one.prompt), one.keyspace) for one in asked]
        hits = dict(zip(asked, self.server.lookups(lookups), strict=True))
        for pair in pairs:
            if not play.counts(pair.relies_on):
                found.set_aside += 1
                continue
            found.pairs[pair.kind] += 1
            found.missed[pair.kind] += not hits[pair.own]
            found.foreign[pair.kind] += hits[pair.other]

    def _furnish(self, play: Play) -> None:
        """Have stored what those lack who came or have a new epoch, and pools that are warm then published."""
        for scope, space in play.missing():
            self._store(play, scope, space)
            play.stored(scope, space)
        with play.publish() as cast:
            if cast is not None:
                self._enforce(play, cast)

    def _store(self, play: Play, scope: Scope, space: str) -> None:
        before, tiers = self._stored(), play.tiers(scope) - {"dram"}
        for prompt in range(PROMPTS):
            assert self.server.store(self._sequence(scope, prompt), space, 7)["stored"]
        until(lambda: all(self._stored()[name] - before[name] >= PROMPTS * CHUNKS for name in tiers), self._stored)

    def _stored(self) -> dict[str, int]:
        return {one.name: one.stored for one in self.gate.state().tiers}

    def _change(self, play: Play) -> None:
        with play.change() as cast:
            self._enforce(play, cast)

    def _enforce(self, play: Play, cast: Cast) -> None:
        self._pools.publish(play.entries(cast), **play.versions(cast, self._hashes))

    def _hashes(self, scope: Scope) -> bytes:
        """What the cache server names the chunks of a scope's prompts."""
        if scope not in self._names:
            named = b"".join(self._hashes_of(self._sequence(scope, prompt)) for prompt in range(PROMPTS))
            every = range(0, len(named), CHUNK_HASH_BYTES)
            self._names[scope] = pack_hashes({named[at : at + CHUNK_HASH_BYTES] for at in every})
        return self._names[scope]

    def _hashes_of(self, sequence: int) -> bytes:
        tokens = self.server.tokens(sequence)
        return self.gate.put(HashRequest(struct.pack(f"<{len(tokens)}I", *tokens)), ChunkHashes).hashes

    def _sequence(self, scope: Scope, prompt: int) -> int:
        return self._owners.setdefault(scope, fresh_sequence()) + prompt


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate, redis, disk = GateStandIn(directory), RedisProcess(directory), directory / "disk"
    redis.start()
    disk.mkdir()
    try:
        # None is given up, which would be a miss.
        tiers = [file_tier(disk, **PATIENT_FILES), tier(redis.port, **PATIENT)]
        server = start_server(directory, gate, tiers, memory={"tier": "dram"})
        until(lambda: all(one.breaker == "closed" and not one.recovering for one in gate.state().tiers), gate.state)
        yield Pod(server, gate)
    finally:
        redis.kill()


def test_no_tenant_group_pool_or_former_epoch_finds_what_another_has_while_policies_change(pod: Pod) -> None:
    play = Play(random.Random(1 + SEED), PROMPTS)

    def over(found: Found) -> bool:
        return found.pairs.total() >= PAIRS and set(found.pairs) == KINDS and min(play.moved.values()) > 1

    found = pod.run(play, over)
    assert found.pairs.total() >= PAIRS
    assert (+found.foreign, +found.missed) == (Counter(), Counter())
    assert set(found.pairs) == KINDS
    assert min(play.moved.values()) > 1, play.moved


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_a_policy_that_is_wrong_is_seen_by_its_foreign_hits_and_by_nothing_else(pod: Pod, fault: Fault) -> None:
    play = Play(random.Random(fault.value), PROMPTS, fault)
    found = pod.run(play, lambda found: SEEN_BY[fault] <= set(+found.foreign))
    assert set(+found.foreign) == SEEN_BY[fault]
    assert +found.missed == Counter()
