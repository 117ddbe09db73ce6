"""Erasure of keyspaces from this pod's own tiers, and the check whether lookups still find their blocks.

After deleting, each tier checks its tables or its directory again and reports the checks it made
(`contract.messages.erase`). The policy deletes blocks that an engine stores under an erased keyspace afterwards, and a
repeated erasure sees them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase import (
    REQUIRED,
    AdapterErased,
    AdapterVerified,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    VerifiedTier,
    VerifyRequest,
)
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, split_hashes
from kvstrata_sidecar.adapter.tier.interface import MEMORY, Block, PodTier, block_of

if TYPE_CHECKING:
    from kvstrata_sidecar.adapter.runtime import Runtime

MAX_KNOWN = 64
"""Chunks remembered per erased keyspace."""

MAX_KEYSPACES = 4096
"""Erased keyspaces whose chunks are remembered; the oldest are dropped first."""


class Known:
    """Chunks of erased keyspaces, for verification. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[str, dict[bytes, None]] = {}

    def saw(self, keyspace: str, chunk_hash: bytes) -> None:
        if len(chunk_hash) != CHUNK_HASH_BYTES:
            return
        with self._lock:
            if keyspace not in self._chunks and len(self._chunks) >= MAX_KEYSPACES:
                del self._chunks[next(iter(self._chunks))]
            chunks = self._chunks.setdefault(keyspace, {})
            if len(chunks) < MAX_KNOWN:
                chunks[chunk_hash] = None

    def of(self, keyspace: str) -> list[bytes]:
        with self._lock:
            return list(self._chunks.get(keyspace, ()))


class Erasing:
    """Erases from the tiers of `runtime`, and looks them up."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known = Known()

    def erase(self, question: EraseRequest) -> AdapterErased:
        """Erase the keyspaces and return their remainders. It takes seconds at most."""
        boot, enforcement = self._runtime.boot, self._runtime.enforcement
        view = enforcement.view
        if view is None:
            return AdapterErased(boot, 0, 0, EraseOutcome.NOT_ENFORCED)
        if not view.keyspaces.keys().isdisjoint(question.keyspaces):
            return AdapterErased(boot, view.revision, view.term, EraseOutcome.IN_FORCE)
        rows, elsewhere = self._erase(question)
        # Read after the tiers were erased, because they use the keys meanwhile.
        operations, keys = enforcement.under_way(question.keyspaces), enforcement.keys.left(question.keyspaces)
        erased = AdapterErased(
            boot, view.revision, view.term, EraseOutcome.REMAINING, operations, keys, tuple(rows), tuple(elsewhere)
        )
        return replace(erased, outcome=EraseOutcome.COMPLETE) if erased.nothing_left else erased

    def verify(self, question: VerifyRequest) -> AdapterVerified:
        """Return which blocks a lookup finds. Raises ContractError while there is no policy."""
        runtime, view = self._runtime, self._runtime.enforcement.view
        if view is None:
            raise ContractError("there is no policy yet")
        keyspace = question.keyspace
        chunks = self._known.of(keyspace) if question.chunks is None else split_hashes(question.chunks)
        parts = runtime.names(keyspace, chunks)
        blocks = [block_of(key) for own in parts or () for key in own]
        known, in_force = parts is not None, keyspace in view.keyspaces
        rows = [self._found(keyspace, tier, blocks) for tier in runtime.all_tiers()] if known else []
        return AdapterVerified(runtime.boot, view.revision, view.term, known, in_force, len(chunks), tuple(rows))

    def forget(self, question: ForgetRequest) -> Forgotten:
        """Delete chunks from every tier. Raises ContractError while the layout of the keyspace's blocks is unknown."""
        parts = self._runtime.names(question.keyspace, split_hashes(question.chunks))
        if parts is None:
            raise ContractError("no engine has reported the layout of its blocks yet")
        blocks = [block_of(key) for own in parts for key in own]
        deleted = in_use = 0
        for tier in self._memory_first():
            deleted += len(tier.delete(blocks))
            if tier is self._runtime.memory:
                in_use = tier.kept(blocks) or 0
        return Forgotten(self._runtime.boot, deleted, in_use)

    def _erase(self, question: EraseRequest) -> tuple[list[ErasedTier], list[str]]:
        keyspaces, wanted = question.keyspaces, question.tiers
        rows, elsewhere, here, tiers = list[ErasedTier](), list[str](), set[str](), self._memory_first()
        if (empty := self._runtime.empty_memory) is not None:
            if not wanted or empty in wanted:
                rows.append(ErasedTier(empty, MEMORY, checked=tuple(sorted(REQUIRED[MEMORY]))))
                here.add(empty)
        elif all(tier.state().medium != MEMORY for tier in tiers):
            rows.append(ErasedTier("", MEMORY, problem="this cache server's own memory is not governed"))
        for tier in tiers:
            name = tier.state().name
            if wanted and name not in wanted:
                continue
            here.add(name)
            row = tier.erase(keyspaces, self._known.saw)
            if row is None:
                elsewhere.append(name)
            else:
                rows.append(row)
        return rows, [*elsewhere, *(name for name in wanted if name not in here)]

    def _memory_first(self) -> list[PodTier]:
        """Return all tiers; blocks may be on their way from memory to the others."""
        return sorted(self._runtime.all_tiers(), key=lambda tier: tier is not self._runtime.memory)

    def _found(self, keyspace: str, tier: PodTier, blocks: Sequence[Block]) -> VerifiedTier:
        state = tier.state()
        # LMCache looks its memory up without asking the policy.
        refusal = None if state.medium == MEMORY else self._runtime.enforcement.refusal(keyspace, tier=state.name)
        found = sum(size > 0 for size in tier.sizes(blocks))
        return VerifiedTier(state.name, state.medium, len(blocks), found, str(refusal or ""), tier.kept(blocks))
