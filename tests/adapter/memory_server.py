"""The real policy of the memory on top of a stand-in for LMCache's manager; turns and time are the test's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvstrata.contract.messages.erase import ErasedTier
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.memory.tier import MemoryTier
from kvstrata_sidecar.adapter.policy.pools import NOTHING_READABLE, Readable
from kvstrata_sidecar.upstream.pool import Batch, Pool
from tests.adapter.memory_stand_in import (
    MISSING,
    NO_MEMORY,
    STORE_TAG,
    SUCCESS,
    Entry,
    Key,
    Lock,
    Manager,
    marker,
)

A, B, C = "a" * 32, "b" * 32, "c" * 32
TIER = "dram"
PATIENCE_S = 60.0
"""How long a thread is waited for that a busy machine holds up."""


@dataclass
class Server:
    """A stand-in of the manager with the real policy on top, whose turns and time are the test's."""

    blocks: int = 16
    now_s: float = 1000.0
    high_percent: int = 100
    tier: str | None = TIER
    view: CacheView | None = None
    passes_on: bool = False
    stale: bool = False
    gone: list[Any] = field(default_factory=list)
    manager: Manager = field(init=False)

    def __post_init__(self) -> None:
        self.manager = Manager(self.blocks, lambda: self.now_s)
        self.pool = Pool(self.manager, SUCCESS, NO_MEMORY, STORE_TAG)
        enforcement: Any = SimpleNamespace(
            view=None, readable=NOTHING_READABLE, refusal=self._refusal, denies=self._denies
        )
        self.enforcement = enforcement
        self.memory = MemoryTier(
            self.pool,
            enforcement,
            name=self.tier,
            high_watermark_percent=self.high_percent,
            gone=self.gone.append,
            passes_on=lambda _: self.passes_on,
            clock=lambda: self.now_s,
        )
        self.pool.guard()
        self.memory.lend(
            entry_of=lambda memory: Entry(memory, read_lock=Lock(lambda: self.now_s), is_temporary=True),
            missing=(MISSING, None),
        )
        self.pool.listen(self.memory)

    def allow(self, **budgets: EnforcedBudget | None) -> None:
        """Put a policy in force: `allow(a=None, b=EnforcedBudget(…))`."""
        keyspaces = {name * 32: (budget,) if budget else () for name, budget in budgets.items()}
        self.enforcement.view = CacheView("d" * 16, 1, 1, Rules(), keyspaces)
        self.memory.policy_changed()

    def share(self, pool: str, readers: str, numbers: Iterable[int]) -> None:
        """Let readers read the pool's chunks: `share("p", "ab", range(4))`; replaces what was shared before."""
        chunks = frozenset(Key("", number).chunk_hash for number in numbers)
        reads = {reader * 32: (pool * 32,) for reader in readers}
        self.enforcement.readable = Readable(reads, {pool * 32: chunks}, {pool * 32: frozenset({TIER})})

    def _refusal(self, keyspace: str, pools: tuple[str, ...] = ()) -> str | None:
        return "stale" if self.stale else None

    def _denies(self, keyspace: str, tier: str) -> bool:
        budgets = self.enforcement.view.keyspaces.get(keyspace, ()) if self.enforcement.view else ()
        return any(budget.denied for budget in budgets if budget.tier == tier)

    def lack(self, blocks: int) -> None:
        """Let a batch of so many blocks wait for memory."""
        self.pool.room._waiting.append(Batch(blocks))

    def turn(self) -> float:
        """One turn, and all that it freed overwritten."""
        wait_s = self.memory.evictor.turn()
        assert self.pool.settle(PATIENCE_S)
        return wait_s

    def erase(self, *keyspaces: str) -> ErasedTier:
        """Erase keyspaces, and look what is left."""
        return self.memory.erase(keyspaces, lambda _keyspace, _chunk: None)

    def held_bytes(self, keyspace: str) -> int:
        scope = self.memory._index.scope(keyspace)
        return 0 if scope is None else scope.used_bytes

    def resident(self) -> list[Key]:
        return list(self.manager._objects)

    def has_bytes_of(self, key: Key) -> bool:
        return marker(key) in self.manager._memory_manager.buffer.raw

    def free_blocks(self) -> int:
        return len(self.manager._memory_manager.free_blocks)

    def close(self) -> None:
        self.memory.close()
        self.pool.close()


def keys_of(keyspace: str, count: int, first: int = 0) -> list[Key]:
    return [Key(keyspace, number) for number in range(first, first + count)]


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    give_up_at_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.002)
