"""Dependencies shared by the parts of one Redis tier, and the terms of the policy in force for scopes in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from kvstrata.contract.policy.tiers import TierRules
from kvstrata.contract.store.redis_keys import member_of, resolved
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.policy.limits import Bounds, SharedBounds, bounds_in
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client.commands import Place, Terms
from kvstrata_sidecar.adapter.redis.client.nodes import Topology
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.redis.revoked import RevokedSet
from kvstrata_sidecar.adapter.redis.sweep.inbox import Inbox
from kvstrata_sidecar.adapter.tier.blocks import Deps
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.sealer import Sealer


class ScopeTerms:
    """Read at the last moment each time, because another policy may be in force. Thread-safe."""

    def __init__(self, tier: TierParams, enforcement: Enforcement) -> None:
        self._tier = tier
        self._enforcement = enforcement

    @property
    def servers(self) -> tuple[Address, ...]:
        """The addresses of the tier's servers; none while the policy does not name the tier."""
        rules = self._rules()
        return tuple(Address(one.host, one.port) for one in (self._tier.endpoints if rules is None else rules.servers))

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity that scopes divide; None if they do not."""
        rules = self._rules()
        return self._tier.capacity_bytes if rules is None else rules.capacity_bytes

    def of(self, keyspace: str) -> Terms:
        bounds = self._bounds(keyspace)
        return Terms(
            life_ms=1000 * (self._tier.default_ttl_s if bounds.retention_s is None else bounds.retention_s),
            bounds=bounds.shared(self.capacity_bytes),
            encrypts=self._tier.encrypts,
        )

    def retention_ms(self, keyspace: str) -> int | None:
        """None means that neither the policy nor the tier has a retention."""
        return self._bounds(keyspace).retention_ms

    def bounds(self, keyspace: str) -> SharedBounds | None:
        """None means unbounded."""
        return self._bounds(keyspace).shared(self.capacity_bytes)

    def in_tier(self, bounds: Bounds) -> Bounds:
        """Return a scope's bounds with the tier's retention where the scope has none."""
        rules = self._rules()
        if rules is None or bounds.retention_s is not None:
            return bounds
        return replace(bounds, retention_s=rules.retention_s)

    def _bounds(self, keyspace: str) -> Bounds:
        view = self._enforcement.view
        if view is None:
            return Bounds()
        return self.in_tier(bounds_in(view.keyspaces.get(keyspace, ()), self._tier.name))

    def _rules(self) -> TierRules | None:
        view = self._enforcement.view
        return None if view is None or self._tier.endpoints else view.tier(self._tier.name)


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
