"""Whether declared policy is in force: every live pod must have acknowledged it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.reasons import SharedReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.bundle import Entry
from kvstrata.model.world import World
from kvstrata.plan.bundle.compile import entry_in, held_entry, rules_of, selects, tiers_of
from kvstrata.plan.conditions import Finding, false, listed, true, unknown
from kvstrata.plan.keys.data_keys import seals

ENFORCED = "Enforced"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Acknowledgements of a revision; `missing` names the pods without."""

    acked: int = 0
    live: int = 0
    missing: tuple[str, ...] = ()

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.acked + other.acked, self.live + other.live, self.missing + other.missing)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def shown(self) -> str:
        """The status field `enforcedBy`."""
        return f"{self.acked}/{self.live}" if self.live else "no pods"

    def __str__(self) -> str:
        return f"{self.acked} of {self.live} pods"


def rules_are_committed(world: World, model: CachedModel) -> bool:
    committed = world.bundles.get(model.name)
    return committed is not None and committed.bundle.root.rules == rules_of(world, model)


def tiers_are_committed(world: World, model: CachedModel) -> bool:
    committed = world.bundles.get(model.name)
    return committed is not None and committed.bundle.root.tiers == tiers_of(world, model)


def is_committed(world: World, model: CachedModel, desired: Entry) -> bool:
    """Whether the model's bundle has a policy's entry as desired."""
    committed = world.bundles.get(model.name)
    entry = committed.bundle.entries.get(desired.tenant) if committed is not None else None
    return entry is not None and entry.enforces_the_same_as(entry_in(world, model, desired))


def coverage(world: World, model: str, revision: int) -> Coverage:
    pods = world.serving_pods(model)
    missing = tuple(pod.name for pod in pods if world.acked_revision(pod) < revision)
    return Coverage(len(pods) - len(missing), len(pods), missing)


def unenforced(world: World, models: Iterable[str]) -> Coverage:
    """Return the coverage of something that no pod of `models` enforces."""
    names = tuple(pod.name for model in models for pod in world.serving_pods(model))
    return Coverage(0, len(names), names)


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The state of one policy in the data plane. `finding` is its condition Enforced, `coverage` is of its models."""

    finding: Finding
    committed: bool
    coverage: Coverage = Coverage()


def policy_enforcement(world: World, policy: TenantCachePolicy, desired: Entry) -> Enforcement:
    """Return whether all live pods of the policy's models enforce `desired`.

    Enforced is True when every bundle holds the entry and every live pod acknowledged its revision, False otherwise;
    Unknown without pods, where it does not apply. An entry without the key for a tier that encrypts is not enforced:
    the tier refuses its keyspace.
    """
    models = [model for _, model in sorted(world.models.items()) if selects(policy, model)]
    if not models:
        none = unknown(ENFORCED, SharedReason.NO_MODELS, "no CachedModel of this namespace is selected by spec.models")
        return Enforcement(none, committed=True)
    settled = policy.status.enforced_generation == policy.generation
    chosen = {model.name for model in models}
    others = {name: one for name, one in sorted(world.bundles.items()) if name in world.models and name not in chosen}
    uncommitted = [name for name, one in others.items() if not one.whole or held_entry(one.bundle, policy) is not None]
    total, left = Coverage(), Coverage()
    for model in models:
        committed = world.bundles.get(model.name)
        if committed is None or not (rules_are_committed(world, model) and is_committed(world, model, desired)):
            uncommitted.append(model.name)
            total += unenforced(world, [model.name])
            continue
        since = max(committed.bundle.entries[desired.tenant].since, committed.bundle.root.rules_since)
        if not settled:
            # The generation may have removed an entry, which leaves no `since`.
            since = max(since, committed.holds_since(policy.uid, policy.generation))
        total += coverage(world, model.name, since)
    for name, committed in others.items() if not settled else ():
        # Former contents must be gone everywhere, also from models that the policy no longer selects.
        left += coverage(world, name, committed.holds_since(policy.uid, policy.generation))
    if uncommitted:
        message = f"the bundle of CachedModel {', '.join(uncommitted)} is not up to date with this policy yet"
        return Enforcement(false(ENFORCED, SharedReason.NOT_COMMITTED, message), committed=False, coverage=total)
    keyless = [model.name for model in models if not (desired.keys or desired.suspended) and seals(world, model)]
    if keyless:
        message = (
            f"the scope's data key is being drawn; until pods of CachedModel {', '.join(keyless)} have it, tiers that "
            "encrypt refuse its blocks"
        )
        return Enforcement(false(ENFORCED, SharedReason.AWAITING_KEYS, message), committed=False, coverage=total)
    return Enforcement(enforced_finding(total + left), committed=True, coverage=total)


def bundles_lack(world: World, keyspaces: Set[str], models: Collection[str] | None = None) -> bool:
    """Whether no bundle has these keyspaces; `models` are those with bundles that may have had them, None means all."""
    return all(
        committed is not None
        and committed.whole
        and committed.bundle.root.model_uid == model.uid
        and keyspaces.isdisjoint(committed.bundle.keyspaces)
        for model, committed in ((model, world.bundles.get(name)) for name, model in world.models.items())
        if models is None or model.name in models
    )


def enforced_finding(total: Coverage) -> Finding:
    if not total.live:
        message = "no pod of these models serves: there is nothing to enforce"
        return unknown(ENFORCED, SharedReason.NO_LIVE_PODS, message)
    if total.complete:
        return true(ENFORCED, SharedReason.ALL_PODS_ACKNOWLEDGED, "every serving pod enforces it")
    message = f"{total} enforce it; waiting for {listed(total.missing)}"
    return false(ENFORCED, SharedReason.AWAITING_ACKS, message)
