"""Index of guarantees, declared and admitted, so that checking a tier's sum does not read thousands of policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.common import Budget
from kvstrata.api.prefixpool import PoolContent, PrefixPool
from kvstrata.api.tenantcachepolicy import Isolation, ModelsSelector, TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.contract.wire import digest
from kvstrata.model.refs import Key

Holder = TenantCachePolicy | TenantGroup | CacheDomain | PrefixPool

HOLDERS = (TenantCachePolicy, TenantGroup, CacheDomain, PrefixPool)


@dataclass(frozen=True, slots=True)
class GuaranteeClaim:
    """Declared and admitted guarantee of one object on one tier.

    `since` orders objects by age: creation time, then UID. `recorded_bytes` is admitted by its status, None if
    undecided; `current` is whether that was for the models that it selects now. `models` None means all.
    """

    holder: Key
    since: tuple[float, str]
    declared_bytes: int
    recorded_bytes: int | None
    current: bool = True
    models: ModelsSelector | None = None

    @property
    def most_bytes(self) -> int:
        return max(self.declared_bytes, self.recorded_bytes or 0)

    @property
    def waits(self) -> bool:
        """Whether it was granted less than it declares."""
        return self.recorded_bytes is not None and self.recorded_bytes < self.declared_bytes


@dataclass(slots=True)
class TierClaims:
    """`version` changes with every claim and never repeats."""

    by_holder: dict[Key, GuaranteeClaim] = field(default_factory=dict)
    waiting: dict[Key, GuaranteeClaim] = field(default_factory=dict)
    most_bytes: int = 0
    version: int = 0


class ClaimIndex:
    def __init__(self) -> None:
        self.tiers: dict[str, TierClaims] = {}
        self.by_holder: dict[Key, Mapping[str, GuaranteeClaim]] = {}
        self._changes = 0

    def replace(self, key: Key, resource: Resource | None) -> None:
        before = self.by_holder.get(key, {})
        after = claims_of(resource)
        if before == after:
            return
        for tier in {**before, **after}:
            if before.get(tier) != after.get(tier):
                self._replace(tier, key, before.get(tier), after.get(tier))
        self.by_holder.pop(key, None)
        if after:
            self.by_holder[key] = after

    def _replace(self, tier: str, key: Key, before: GuaranteeClaim | None, after: GuaranteeClaim | None) -> None:
        claims = self.tiers.setdefault(tier, TierClaims())
        self._changes += 1
        claims.version = self._changes
        claims.most_bytes += (after.most_bytes if after else 0) - (before.most_bytes if before else 0)
        claims.by_holder.pop(key, None)
        claims.waiting.pop(key, None)
        if after is not None:
            claims.by_holder[key] = after
            if after.waits:
                claims.waiting[key] = after
        if not claims.by_holder:
            del self.tiers[tier]


def claims_of(resource: Resource | None) -> Mapping[str, GuaranteeClaim]:
    """Return an object's declared and recorded guarantees by tier; empty for an object under deletion."""
    if not isinstance(resource, HOLDERS) or resource.metadata.deleting:
        return {}
    declared, recorded = declared_guarantees(resource), resource.status.admission
    if not declared and recorded is None:
        return {}
    admitted = recorded.by_tier if recorded is not None else {}
    created = resource.metadata.creation_timestamp
    since = (created.timestamp() if created is not None else 0.0, resource.uid)
    key = Key(resource.INFO.kind, resource.namespace, resource.name)
    current, models = recorded is None or recorded.models == models_digest(resource), _models(resource)

    def claim(tier: str) -> GuaranteeClaim:
        recorded_bytes = admitted.get(tier, 0) if recorded is not None else None
        return GuaranteeClaim(key, since, declared.get(tier, 0), recorded_bytes, current, models)

    return {tier: claim(tier) for tier in sorted(declared.keys() | admitted.keys())}


def declared_guarantees(resource: Holder) -> dict[str, int]:
    """Return an object's guarantees in bytes by tier; of a pinned pool the measured size of its complete contents."""
    match resource:
        case TenantCachePolicy():
            return _guaranteed(resource.spec.budgets if resource.spec.isolation is Isolation.ISOLATED else ())
        case TenantGroup():
            return _guaranteed(resource.spec.budgets if resource.spec.sharing is Sharing.FULL else ())
        case CacheDomain():
            return _guaranteed(resource.spec.public_budgets)
        case PrefixPool():
            sizes = Counter[str]()
            for slot in (resource.status, resource.status.next) if resource.spec.pinned else ():
                if slot is not None and is_whole(slot):
                    sizes.update({row.name: row.bytes for row in slot.tiers if row.bytes})
            return sizes


def is_whole(slot: PoolContent) -> bool:
    """Whether status has the full size of a pool's content."""
    return bool(slot.published) or (bool(slot.tiers) and all(row.stored >= row.expected > 0 for row in slot.tiers))


def models_digest(resource: Holder) -> str:
    """Return a digest of the selected models; empty for all."""
    models = _models(resource)
    return digest(models.to_kubernetes())[:16] if models is not None else ""


def _models(resource: Holder) -> ModelsSelector | None:
    match resource:
        case TenantCachePolicy():
            return resource.spec.models
        case PrefixPool():
            return ModelsSelector(names=(resource.spec.model_ref.name,))
        case _:
            return None


def _guaranteed(budgets: Iterable[Budget]) -> dict[str, int]:
    return {budget.tier: size for budget in budgets if budget.guaranteed and (size := budget.guaranteed_bytes)}
