"""Whether declared policy is in force: every live pod must have acknowledged it."""

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


def coverage(world: World, model: str, revision: int) -> Coverage:
    pods = world.serving_pods(model)
    missing = tuple(pod.name for pod in pods if not _enforces(world, pod, revision))
    return Coverage(len(pods) - len(missing), len(pods), missing)


def unenforced(world: World, models: Iterable[str]) -> Coverage:
    """Return the coverage of something that no pod of `models` enforces."""
    names = tuple(pod.name for model in models for pod in world.serving_pods(model))
    return Coverage(0, len(names), names)


def _enforces(world: World, pod: Pod, revision: int) -> bool:
    return world.acked_revision(pod) >= revision


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
        return Enforcement(
            unknown(ENFORCED, PolicyReason.NO_MODELS, "no CachedModel of this namespace is selected by spec.models"),
            committed=True,
        )
    settled = policy.status.enforced_generation == policy.generation
    total, left = Coverage(), Coverage()
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
            total += unenforced(world, [model.name])
            continue
        since = max(entry.since, committed.bundle.root.rules_since)
        if not settled:
            # The generation may have removed an entry, which leaves no `since`.
            since = max(since, committed.holds_since(policy.uid, policy.generation))
        total += coverage(world, model.name, since)
    if not settled:
        # Former contents must be gone everywhere, also from models that the policy no longer selects.
        chosen = {model.name for model in models}
        for name, committed in sorted(world.bundles.items()):
            if name in world.models and name not in chosen:
                left += coverage(world, name, committed.holds_since(policy.uid, policy.generation))
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
    return Enforcement(enforced_finding(total + left), committed=True, coverage=total)


def bundles_lack(world: World, keyspaces: Set[str]) -> bool:
    return all(
        committed is not None
        and committed.whole
        and committed.bundle.root.model_uid == model.uid
        and keyspaces.isdisjoint(committed.bundle.keyspaces)
        for model, committed in ((model, world.bundles.get(name)) for name, model in world.models.items())
    )


def needed_revision(root: Root, since: int, *, settled: bool) -> int:
    """Return the revision that pods must enforce for something that last changed in revision `since`. While its
    generation is not settled, the newest one: a removed entry leaves no `since`."""
    return max(since, root.rules_since) if settled else root.revision


def _bundles_that_still_hold(world: World, policy: TenantCachePolicy, chosen: frozenset[str]) -> list[str]:
    return [
        name
        for name, committed in sorted(world.bundles.items())
        if name in world.models and name not in chosen and not (committed.whole and not holds(committed.bundle, policy))
    ]


def holds(bundle: Bundle, policy: TenantCachePolicy) -> bool:
    """Whether the bundle has an entry of this policy; its tenant never changes."""
    own = bundle.entries.get(policy.spec.tenant)
    return own is not None and own.policy == policy.uid


def enforced_finding(total: Coverage) -> Finding:
    if not total.live:
        return unknown(
            ENFORCED, PolicyReason.NO_LIVE_PODS, "no pod of these models serves: there is nothing to enforce"
        )
    if total.complete:
        return true(ENFORCED, PolicyReason.ALL_PODS_ACKNOWLEDGED, "every serving pod enforces it")
    return false(ENFORCED, PolicyReason.AWAITING_ACKS, f"{total} enforce it; waiting for {_some(total.missing)}")


def _some(names: Iterable[str], most: int = 3) -> str:
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
