"""Dependencies shared by the parts of one Redis tier."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstrata.contract.store.redis_keys import member_of, resolved
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.redis.client.nodes import FullNodes, Topology
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.redis.revoked import RevokedSet
from kvstrata_sidecar.adapter.redis.sweep.inbox import Inbox
from kvstrata_sidecar.adapter.redis.terms import ScopeTerms
from kvstrata_sidecar.adapter.tier.blocks import Deps
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.sealer import Sealer


@dataclass(frozen=True, slots=True)
class TierDeps(Deps[TierParams, Place]):
    """`terms` are read at the last moment, because work may have waited. `sealer` returns the calling thread's own.
    `usage` has bytes and blocks of scopes when this process last swept them; once in `interval_s` it sweeps all.
    `written` has the hashes of places that this process wrote a block to, the last 65,536 of them; `unread` has blocks,
    by keyspace and member, that could not be read just now, as later versions write them. `token` names this process in
    claims and reservations, `jitter` returns a number from 0 to 1."""

    topology: Topology
    terms: ScopeTerms
    ledgers: Ledgers
    revoked: RevokedSet
    inbox: Inbox
    full: FullNodes
    usage: Recent[str, tuple[int, int]]
    written: Recent[int, bool]
    unread: Recent[tuple[str, bytes], bool]
    sealer: Callable[[], Sealer]
    token: bytes
    interval_s: float
    clock: Callable[[], float]
    jitter: Callable[[], float]

    def member(self, block: Block) -> str:
        """Return the block's name in its bucket."""
        identity = resolved(self.params.identity, block.fingerprint)
        return member_of(identity, block.rank, block.group, block.chunk_hash)

    def keyspace_at(self, place: Place) -> str:
        return place.keyspace

    def refusal(self, keyspace: str, *, storing: bool = False) -> Refusal | None:  # noqa: ARG002
        refusal = self.enforcement.refusal(keyspace, tier=self.tier.name)
        if refusal is None and keyspace in self.revoked.revoked:
            return Refusal.REVOKED
        return self.sealer().refusal(keyspace) if refusal is None else refusal

    def refuse(self, keyspace: str, refusal: Refusal, amount: int = 1) -> None:
        """Count blocks that the tier may not be used for; urge a sweep if that can repair the scope."""
        self.counters.refuse(refusal, amount, keyspace)
        if refusal is Refusal.RETENTION:
            self.inbox.urge(keyspace)

    def listed(self) -> Collection[str]:
        """Return the keyspaces of the policy in force."""
        view = self.enforcement.view
        return view.keyspaces.keys() if view is not None else ()

    @property
    def claim_ms(self) -> int:
        """Life of a claim that keeps other pods from the same work for an interval."""
        return int(self.interval_s * 750)

    def next_round_s(self) -> float:
        """Return when work is due that was begun now and is done once an interval."""
        return self.clock() + self.interval_s * (0.8 + 0.4 * self.jitter())
