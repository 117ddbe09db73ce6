"""Erasure of keyspaces from this pod's own tiers, and the check whether lookups still find their blocks.

After deleting, each tier checks its tables or its directory again and reports the checks it made
(`contract.messages.erase`). The policy deletes blocks that an engine stores under an erased keyspace afterwards, and a
repeated erasure sees them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase import (
    AdapterErased,
    AdapterVerified,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    VerifiedTier,
    VerifyRequest,
)
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.pool_report import Names
from kvstrata_sidecar.adapter.tier.interface import MEMORY, Block, PodTier, block_of

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
    """`memory` returns None while the server's own memory is not governed; `names` the keys of chunks' parts."""

    def __init__(
        self,
        boot: str,
        enforcement: Enforcement,
        memory: Callable[[], PodTier | None],
        tiers: Callable[[], Sequence[PodTier]],
        names: Callable[[], Names],
    ) -> None:
        self._boot = boot
        self._enforcement = enforcement
        self._memory = memory
        self._tiers = tiers
        self._names = names
        self._known = Known()

    def erase(self, question: EraseRequest) -> AdapterErased:
        """Erase the keyspaces and return their remainders. It takes seconds at most."""
        view = self._enforcement.view
        if view is None:
            return AdapterErased(self._boot, 0, 0, EraseOutcome.NOT_ENFORCED)
        if not view.keyspaces.keys().isdisjoint(question.keyspaces):
            return AdapterErased(self._boot, view.revision, view.term, EraseOutcome.IN_FORCE)
        rows, elsewhere = self._erase(question)
        # Read after the tiers were erased, because they use the keys meanwhile.
        erased = AdapterErased(
            self._boot,
            view.revision,
            view.term,
            EraseOutcome.REMAINING,
            self._enforcement.under_way(question.keyspaces),
            self._enforcement.keys.left(question.keyspaces),
            tuple(rows),
            tuple(elsewhere),
        )
        if not erased.nothing_left:
            return erased
        return AdapterErased(
            erased.boot,
            erased.revision,
            erased.term,
            EraseOutcome.COMPLETE,
            tiers=erased.tiers,
            elsewhere=erased.elsewhere,
        )

    def verify(self, question: VerifyRequest) -> AdapterVerified:
        """Return which blocks a lookup finds. Raises ContractError while there is no policy."""
        view = self._enforcement.view
        if view is None:
            raise ContractError("there is no policy yet")
        keyspace, chunks = question.keyspace, self._chunks(question)
        in_force = keyspace in view.keyspaces
        parts = self._names()(keyspace, chunks)
        if parts is None:
            return AdapterVerified(self._boot, view.revision, view.term, False, in_force, len(chunks))
        blocks = [block_of(key) for own in parts for key in own]
        rows = [self._found(keyspace, tier, blocks) for tier in (*self._tiers(), *self._own_memory())]
        return AdapterVerified(self._boot, view.revision, view.term, True, in_force, len(chunks), tuple(rows))

    def forget(self, question: ForgetRequest) -> Forgotten:
        """Delete chunks from every tier. Raises ContractError while the layout of the keyspace's blocks is unknown."""
        parts = self._names()(question.keyspace, _names_in(question.chunks))
        if parts is None:
            raise ContractError("no engine has reported the layout of its blocks yet")
        blocks = [block_of(key) for own in parts for key in own]
        memory = self._own_memory()
        # Memory comes first: blocks may be on their way from there to slower tiers.
        deleted = sum(len(tier.delete(blocks)) for tier in memory)
        in_use = sum(tier.kept(blocks) or 0 for tier in memory)
        deleted += sum(len(tier.delete(blocks)) for tier in self._tiers())
        return Forgotten(self._boot, deleted, in_use)

    def _erase(self, question: EraseRequest) -> tuple[list[ErasedTier], list[str]]:
        keyspaces, wanted = question.keyspaces, question.tiers
        rows, elsewhere, here = list[ErasedTier](), list[str](), set[str]()
        memory = self._own_memory()
        if not memory:
            rows.append(ErasedTier("", MEMORY, problem="this cache server's own memory is not governed"))
        # Memory comes first: blocks may be on their way from there to the files.
        for tier in (*memory, *self._tiers()):
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

    def _own_memory(self) -> tuple[PodTier, ...]:
        memory = self._memory()
        return () if memory is None else (memory,)

    def _chunks(self, question: VerifyRequest) -> list[bytes]:
        if question.chunks is None:
            return self._known.of(question.keyspace)
        return _names_in(question.chunks)

    def _found(self, keyspace: str, tier: PodTier, blocks: Sequence[Block]) -> VerifiedTier:
        state = tier.state()
        # LMCache looks its memory up without asking the policy.
        refusal = "" if state.medium == MEMORY else self._enforcement.refusal(keyspace, tier=state.name) or ""
        found = sum(size > 0 for size in tier.sizes(blocks))
        return VerifiedTier(state.name, state.medium, len(blocks), found, str(refusal), tier.kept(blocks))


def _names_in(chunks: bytes) -> list[bytes]:
    return [chunks[at : at + CHUNK_HASH_BYTES] for at in range(0, len(chunks), CHUNK_HASH_BYTES)]
