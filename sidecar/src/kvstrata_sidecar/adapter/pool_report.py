"""This pod's holdings of a pool's version, by chunk. A chunk counts when all its parts are there.

LMCache's own hasher names chunks, so chunk size and algorithm are those in force, not those configured.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import TOKEN_BYTES
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion, PoolTierState
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, split_hashes
from kvstrata_sidecar.adapter.policy.pools import Readable
from kvstrata_sidecar.adapter.tier.interface import Block, block_of

Names = Callable[[str, Sequence[bytes]], Sequence[Sequence[Any]] | None]
"""Returns LMCache's keys of each chunk's parts under a keyspace, None while no engine has reported its layout."""

Lacking = Callable[[str, Sequence[Any]], None]
"""Receives a pool's keyspace and the keys of its blocks that are in memory but not in all other tiers of the pool."""


def holding_of(
    boot: str,
    question: PoolQuestion,
    view: CacheView | None,
    readable: Readable,
    names: Names,
    tiers: Mapping[str, Callable[[Sequence[Block]], Sequence[int]]],
    *,
    memory: tuple[str, Lacking] | None = None,
) -> PoolHolding:
    """`tiers` return blocks' bytes in this pod's tiers, 0 for one that cannot be read. `memory` names its own among
    them, and receives blocks that others lack. Raises ContractError if no pool has the keyspace."""
    pool = view.pools.get(question.keyspace) if view is not None else None
    if pool is None:
        raise ContractError("no pool of the policy has this keyspace")
    known = readable.chunks.get(question.keyspace, frozenset())
    chunks = sorted(known if question.hashes is None else known.intersection(split_hashes(question.hashes)))
    parts = names(question.keyspace, chunks)
    wanted = question.fingerprint
    blocks = [[one for one in map(block_of, keys) if wanted in ("", one.fingerprint)] for keys in parts or ()]
    if parts is None or not all(blocks):
        nothing = tuple(PoolTierState(tier, 0, len(chunks), 0) for tier in pool.tiers)
        return PoolHolding(boot, False, nothing)
    flat = [block for parts in blocks for block in parts]
    taken = {tier: list(tiers[tier](flat)) if tier in tiers else [0] * len(flat) for tier in pool.tiers}
    if memory is not None and memory[0] in taken:
        name, offer = memory
        rows = zip(flat, taken[name], *taken.values(), strict=True)
        offer(question.keyspace, [block.key for block, here, *everywhere in rows if here and not all(everywhere)])
    states, missing = [], dict[bytes, None]()
    for tier in pool.tiers:
        sizes = iter(taken[tier])
        by_chunk = {chunk: [next(sizes) for _ in own] for chunk, own in zip(chunks, blocks, strict=True)}
        held = [sum(own) for own in by_chunk.values() if all(own)]
        states.append(PoolTierState(tier, len(held), len(chunks), sum(held)))
        missing.update(dict.fromkeys(chunk for chunk, own in by_chunk.items() if not all(own)))
    return PoolHolding(boot, True, tuple(states), tuple(chunk.hex() for chunk in missing))


def counted_groups(windows: Sequence[int]) -> list[int]:
    """Return the groups of layers whose parts decide whether a chunk is present; `windows` are LMCache's, by group. A
    window is a number of chunks, -1 the whole prefix. Groups with a window keep parts of the last chunks only; engines
    drop earlier ones while they compute."""
    whole = [group for group, window in enumerate(windows) if window < 0]
    return whole or list(range(len(windows)))


class Hasher:
    """Names chunks of `chunk_tokens` tokens; `compute` takes token ids and returns a hash for each whole chunk."""

    def __init__(self, chunk_tokens: int, compute: Callable[[list[int]], Iterable[bytes]]) -> None:
        self.chunk_tokens = chunk_tokens
        self._compute = compute

    def hashes(self, tokens: bytes) -> bytes:
        """Return the concatenated hashes of the whole chunks. Raises ContractError if they do not have 32 bytes."""
        count = len(tokens) // TOKEN_BYTES // self.chunk_tokens * self.chunk_tokens
        ids = list(struct.unpack(f"<{count}I", tokens[: count * TOKEN_BYTES]))
        names = list(self._compute(ids)) if ids else []
        whole = count // self.chunk_tokens
        if len(names) != whole or not all(isinstance(one, bytes) and len(one) == CHUNK_HASH_BYTES for one in names):
            raise ContractError("this cache server names chunks in a way that pools cannot use")
        return b"".join(names)
