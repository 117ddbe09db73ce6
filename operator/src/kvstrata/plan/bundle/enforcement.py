"""Whether what was declared is in force: nothing is, before every live pod said so."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.bundle import Bundle, Entry, Root
from kvstrata.model.pods import Pod
from kvstrata.model.world import World
from kvstrata.plan.bundle.compile import entry_in, rules_of, selects
from kvstrata.plan.conditions import Finding, false, true, unknown
from kvstrata.plan.keys.data_keys import seals

ENFORCED = "Enforced"


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the live pods enforce a revision, and which do not yet."""

    acked: int = 0
    live: int = 0
    missing: tuple[str, ...] = ()

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.acked + other.acked, self.live + other.live, self.missing + other.missing)

    @property
    def complete(self) -> bool:
        """Whether no live pod is missing."""
        return not self.missing

    def __str__(self) -> str:
        return f"{self.acked} of {self.live} pods"


def rules_are_committed(world: World, model: CachedModel) -> bool:
    """Whether the model's bundle carries the rules that its spec and the domain's declare now."""
    committed = world.bundles.get(model.name)
    return committed is not None and committed.bundle.root.rules == rules_of(world, model)


def coverage(world: World, model: str, revision: int) -> Coverage:
    """Return which serving pods of a model enforce at least `revision`."""
    pods = world.serving_pods(model)
    missing = tuple(pod.name for pod in pods if not _enforces(world, pod, revision))
    return Coverage(len(pods) - len(missing), len(pods), missing)


def _enforces(world: World, pod: Pod, revision: int) -> bool:
    return world.acked_revision(pod) >= revision


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The state of one policy in the data plane. `finding` is its condition Enforced."""

    finding: Finding
    committed: bool
    coverage: Coverage = Coverage()


def policy_enforcement(world: World, policy: TenantCachePolicy, desired: Entry) -> Enforcement:
    """Return whether `desired` is what all live pods of the policy's models enforce.

    Enforced is True when every bundle holds the entry and every live pod acknowledged the revision that brought it,
    Unknown/NoLivePods when nobody is there to enforce anything, False otherwise. An entry that lacks the key with which
    a tier of its model encrypts is not what was declared: that tier refuses its keyspace.
    """
    models = [model for _, model in sorted(world.models.items()) if selects(policy, model)]
    if not models:
        return Enforcement(
            unknown(ENFORCED, PolicyReason.NO_MODELS, "no CachedModel of this namespace is selected by spec.models"),
            committed=True,
        )
    settled = policy.status.enforced_generation == policy.generation
    total = Coverage()
    keyless = [model.name for model in models if not (desired.keys or desired.suspended) and seals(world, model)]
    uncommitted = _bundles_that_still_hold(world, policy, frozenset(model.name for model in models))
    for model in models:
        committed = world.bundles.get(model.name)
        entry = committed.bundle.entries.get(desired.tenant) if committed else None
        current = rules_are_committed(world, model)
        if (
            committed is None
            or entry is None
            or not current
            or replace(entry, since=0) != entry_in(world, model, desired)
        ):
            uncommitted.append(model.name)
            continue
        since = max(entry.since, committed.bundle.root.rules_since)
        if not settled:
            # A generation may have taken something out of the bundle, which leaves no `since` behind.
            since = max(since, committed.holds_since(policy.uid, policy.generation))
        total += coverage(world, model.name, since)
    if not settled:
        # What the policy no longer says must be gone everywhere, also from models that it no longer selects.
        chosen = {model.name for model in models}
        for name, committed in sorted(world.bundles.items()):
            if name in world.models and name not in chosen:
                total += coverage(world, name, committed.holds_since(policy.uid, policy.generation))
    if uncommitted:
        names = ", ".join(uncommitted)
        return Enforcement(
            false(
                ENFORCED,
                PolicyReason.NOT_COMMITTED,
                f"the bundle of CachedModel {names} is not up to date with this policy yet",
            ),
            committed=False,
            coverage=total,
        )
    if keyless:
        names = ", ".join(keyless)
        return Enforcement(
            false(
                ENFORCED,
                PolicyReason.AWAITING_KEYS,
                f"the scope's data key is being drawn; until pods of CachedModel {names} have it, tiers that encrypt "
                "refuse its blocks",
            ),
            committed=False,
            coverage=total,
        )
    return Enforcement(enforced_finding(total), committed=True, coverage=total)


def bundles_lack(world: World, keyspaces: Set[str]) -> bool:
    """Whether every model's bundle can be read and holds none of these keyspaces."""
    return all(
        committed is not None
        and committed.whole
        and committed.bundle.root.model_uid == model.uid
        and keyspaces.isdisjoint(committed.bundle.keyspaces)
        for model, committed in ((model, world.bundles.get(name)) for name, model in world.models.items())
    )


def needed_revision(root: Root, since: int, *, settled: bool) -> int:
    """Return the revision that pods must enforce for something that last changed in revision `since`.

    Before its generation was enforced once, the newest one: an entry that was taken out of the bundle leaves no `since`
    behind, and a generation may have taken one out.
    """
    return max(since, root.rules_since) if settled else root.revision


def _bundles_that_still_hold(world: World, policy: TenantCachePolicy, chosen: frozenset[str]) -> list[str]:
    """Return the models that the policy no longer selects and whose bundle has not dropped it yet."""
    return [
        name
        for name, committed in sorted(world.bundles.items())
        if name in world.models and name not in chosen and not (committed.whole and not holds(committed.bundle, policy))
    ]


def holds(bundle: Bundle, policy: TenantCachePolicy) -> bool:
    """Whether the bundle has an entry that was compiled from this policy; its tenant never changes."""
    own = bundle.entries.get(policy.spec.tenant)
    return own is not None and own.policy == policy.uid


def enforced_finding(total: Coverage) -> Finding:
    """Return the condition Enforced for a coverage of committed policy."""
    if not total.live:
        return unknown(
            ENFORCED, PolicyReason.NO_LIVE_PODS, "no pod serves these models, so there is nobody to enforce the policy"
        )
    if total.complete:
        return true(ENFORCED, PolicyReason.ALL_PODS_ACKNOWLEDGED, "every serving pod enforces it")
    return false(ENFORCED, PolicyReason.AWAITING_ACKS, f"{total} enforce it; waiting for {_some(total.missing)}")


def _some(names: Iterable[str], most: int = 3) -> str:
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
