"""A pinned pool stays while a tenant fills memory and Redis beyond their room; in memory, others make room for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest

from e2e.product.chapters import SPARE, Stage
from e2e.product.direct import DirectReplica
from e2e.product.guest import guest, guests
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.pools import PREFIX_CHUNKS, counts, fresh_prefix, held, pool, pool_keyspaces
from e2e.product.prompts import CHUNK_TOKENS, STORE_SETTLES_S, fresh_prompt
from e2e.product.shared_tier import TIER, empty, make_room
from e2e.product.traffic import Caller, traffic

pytestmark = pytest.mark.cluster

PINNED, PLAIN = "pinned", "plain"
MEMORY = "cpu"
CHUNKS = PREFIX_CHUNKS
SHARED_TOKENS = CHUNKS * CHUNK_TOKENS
LONG_TOKENS = 500
READERS = [f"reader-{letter}" for letter in "abcdef"]
"""So many for each pod that a lookup may be late."""

FILLED_WITHIN_S = 900
"""Two engines compute hundreds of prompts, on a machine of two cores."""


@pytest.fixture
def roomy(near: Stage) -> Iterator[Stage]:
    """The model with room in its tier, before the test and after it: status reports a filled tier late."""
    make_room(near)
    yield near
    empty(near)


def test_a_pinned_pool_stays_where_a_tenant_fills_memory_and_redis_and_others_go(
    roomy: Stage, kubectl: Kubectl
) -> None:
    texts = {PLAIN: fresh_prefix(), PINNED: fresh_prefix()}
    public = {"readers": {"public": True}}
    both = {"pools": [{"name": name} for name in texts]}
    replicas = [where for where in (roomy.first, roomy.second) if isinstance(where, DirectReplica)]
    with (
        guests(roomy, READERS, both) as keys,
        guest(roomy, "hoarder", {}) as hoarder,
        pool(roomy, PINNED, texts[PINNED], **public, pinned=True),
        pool(roomy, PLAIN, texts[PLAIN], **public),
    ):
        keyspaces = {name: pool_keyspaces(kubectl, name)[0] for name in texts}

        def stored(name: str, *tiers: str) -> list[int]:
            """Stored chunks of a pool in these tiers, by each pod's report."""
            rows = [held(where, keyspaces[name]) for where in replicas]
            return [row[tier].stored for row in rows for tier in tiers]

        assert stored(PINNED, MEMORY, TIER) == stored(PLAIN, MEMORY, TIER) == [CHUNKS] * 4
        began, full = time.monotonic(), _out_of_room(replicas)
        callers = [Caller(where, "hoarder", hoarder, _long) for where in replicas for _ in range(2)]
        with traffic(*callers, pause_s=0) as running:
            wait_until("the other pool made room", lambda: not any(stored(PLAIN, MEMORY)), FILLED_WITHIN_S, 1)
            wait_until("Redis is full", lambda: _out_of_room(replicas) > full, FILLED_WITHIN_S, 1)
        time.sleep(STORE_SETTLES_S)
        roomy.report(
            f"{running.account} in {time.monotonic() - began:.0f} s; of the other is left {stored(PLAIN, MEMORY)}"
        )
        assert not running.account.failed
        assert stored(PINNED, MEMORY, TIER) == [CHUNKS] * 4
        asked = iter(keys.values())
        for where in replicas:
            # A lookup may be late.
            found = [where.found(key, texts[PINNED] + fresh_prompt(20)) for key in islice(asked, SPARE)]
            assert SHARED_TOKENS in found, found


def _out_of_room(replicas: Sequence[DirectReplica]) -> int:
    """Return how many blocks Redis had no room for, or made it by evicting others."""
    found = [counts(where) for where in replicas]
    return sum(one.get(f"{TIER}.{what}", 0) for one in found for what in ("refused_over_budget", "evicted"))


def _long() -> str:
    return fresh_prompt(LONG_TOKENS)
