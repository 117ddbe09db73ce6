"""Interfaces of a pod's tiers, for the runtime, the gate's link and metrics: of any tier, and of the server's own
memory. `base` has that of the tiers behind it.

Only `delete`, `sizes`, `erase` and `close` may block: LMCache's two loops serve all tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.messages.engine_identity import fingerprint_in
from kvstrata.contract.messages.erase import ErasedTier
from kvstrata_sidecar.adapter.policy.ages import AgeBook
from kvstrata_sidecar.adapter.tier.counts import Counters

Key = Hashable
"""LMCache's own key object, passed through untouched."""

MEMORY, FILES = "CPU", "NVMe"
"""Media whose blocks are this pod's alone."""


class Block(NamedTuple):
    """LMCache's name of one block, and its own key object `key`, which is handed back untouched. Tiers refuse a block
    whose fingerprint is `UNRESOLVED`."""

    key: Key
    keyspace: str
    rank: int
    group: int
    chunk_hash: bytes
    fingerprint: str


# Both run in C: they are called for every key of every request.
_names = attrgetter("cache_salt", "kv_rank", "object_group_id", "chunk_hash")
_block: Callable[[tuple[Any, ...]], Block] = partial(tuple.__new__, Block)


def block_of(key: Any) -> Block:
    """Return the block that LMCache's key names."""
    return _block((key, *_names(key), fingerprint_in(key.model_name)))


class PodTier(Protocol):
    """A tier of one cache server. If `per_pod`, its blocks are this pod's alone, and usage adds up over pods."""

    per_pod: bool
    counts: Counters

    def holds(self, keyspace: str, block: Block) -> bool:
        """Whether a block could be read here now, as far as known without waiting. Does not count as use."""

    def sizes(self, blocks: Sequence[Block]) -> Sequence[int]:
        """Return each block's bytes here, 0 if it cannot be read or is unknown in time. Does not count as use."""

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks and return the keys of those that were there."""

    def erase(self, keyspaces: Sequence[str], seen: Callable[[str, bytes], None]) -> ErasedTier | None:
        """Erase keyspaces from this pod's own storage and return their remainders; None if it has none here. `seen`
        receives the keyspace and chunk hash of each block that was there. It takes seconds at most, and continues in
        the background."""

    def kept(self, blocks: Sequence[Block]) -> int | None:
        """Return how many of these blocks are present regardless of the policy; None where this pod cannot know it."""

    def state(self) -> TierState:
        """Return the state that the pod reports."""

    def policy_changed(self) -> None:
        """Apply another view's changes to stored blocks soon."""

    def usage(self) -> list[ScopeUsage]:
        """Return the scopes' usage here, as far as this pod knows."""

    def counters(self) -> dict[str, int]:
        """Return all counters, with gauges of the tier."""


class ServerMemory(PodTier, AgeBook, Protocol):
    """The server's own memory; its state has no name without a CPU tier."""

    def offer(self, keyspace: str, keys: Sequence[Hashable]) -> None:
        """Receive a pool's blocks that are here and not in all other tiers of the pool."""

    def fill(self) -> tuple[int, int]:
        """Return the bytes in use, and all bytes."""

    def drift_bytes(self) -> int:
        """Return the bytes in use beyond the counted blocks."""
