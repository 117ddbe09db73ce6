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
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata_sidecar.adapter.policy.pools import Readable
from kvstrata_sidecar.adapter.tier.interface import Block, block_of

Names = Callable[[str, Sequence[bytes]], Sequence[Sequence[Any]] | None]
"""Returns LMCache's keys of each chunk's parts under a keyspace, None while no engine has reported its layout."""

Sizes = Callable[[Sequence[Block]], Sequence[int]]
"""Returns each block's bytes in a tier, 0 for one that cannot be read there."""


Lacking = Callable[[str, Sequence[Any]], None]
"""Receives a pool's keyspace and the keys of its blocks that are in memory but not in all other tiers of the pool."""


def holding_of(
    boot: str,
    question: PoolQuestion,
    view: CacheView | None,
    readable: Readable,
    names: Names,
    tiers: Mapping[str, Sizes],
    *,
    memory: tuple[str, Lacking] | None = None,
) -> PoolHolding:
    """`tiers` are this pod's; `memory` names its own among them, and receives blocks that others lack. Raises
    ContractError if no pool has the keyspace."""
    pool = view.pools.get(question.keyspace) if view is not None else None
    if pool is None:
        raise ContractError("no pool of the policy has this keyspace")
    chunks = sorted(_asked(question, readable.chunks.get(question.keyspace, frozenset())))
    parts = names(question.keyspace, chunks)
    if parts is None:
        nothing = tuple(PoolTierState(tier, 0, len(chunks), 0) for tier in pool.tiers)
        return PoolHolding(boot, False, nothing)
    blocks = [[block_of(key) for key in keys] for keys in parts]
    flat = [block for parts in blocks for block in parts]
    taken = {tier: list(tiers.get(tier, _nothing)(flat)) for tier in pool.tiers}
    if memory is not None and memory[0] in taken:
        name, offer = memory
        rows = zip(flat, taken[name], *taken.values(), strict=True)
        offer(question.keyspace, [block.key for block, here, *everywhere in rows if here and not all(everywhere)])
    states, missing = [], dict[bytes, None]()
    for tier in pool.tiers:
        stored, size_bytes, absent = _count(taken[tier], chunks, blocks)
        states.append(PoolTierState(tier, stored, len(chunks), size_bytes))
        missing.update(dict.fromkeys(absent))
    return PoolHolding(boot, True, tuple(states), tuple(chunk.hex() for chunk in missing))


def counted_groups(windows: Sequence[int]) -> list[int]:
    """Return the groups of layers whose parts decide whether a chunk is present; `windows` are LMCache's, by group.

    A window is a number of chunks, -1 the whole prefix. Groups with a window keep parts of the last chunks only;
    engines drop earlier ones while they compute.
    """
    whole = [group for group, window in enumerate(windows) if window < 0]
    return whole or list(range(len(windows)))


def _asked(question: PoolQuestion, known: frozenset[bytes]) -> frozenset[bytes]:
    hashes, size = question.hashes, CHUNK_HASH_BYTES
    if hashes is None:
        return known
    return known.intersection(hashes[at : at + size] for at in range(0, len(hashes), size))


def _count(
    sizes: Sequence[int], chunks: Sequence[bytes], blocks: Sequence[Sequence[Block]]
) -> tuple[int, int, list[bytes]]:
    """Return chunks held, bytes of their parts, and missing chunks; `sizes` are of all parts, in order."""
    remaining = iter(sizes)
    stored, size_bytes, absent = 0, 0, list[bytes]()
    for chunk, parts in zip(chunks, blocks, strict=True):
        taken = [next(remaining) for _ in parts]
        if all(taken):
            stored += 1
            size_bytes += sum(taken)
        else:
            absent.append(chunk)
    return stored, size_bytes, absent


def _nothing(blocks: Sequence[Block]) -> Sequence[int]:
    return [0] * len(blocks)


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
