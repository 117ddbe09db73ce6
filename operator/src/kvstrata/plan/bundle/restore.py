"""Restore of an API server from a backup: detected by pods that hold newer bundles.

Every keyspace derives from the domain's key, so a new key makes all cached data unreachable, including data of epochs
that came back. Revisions continue far above any that a pod can hold, so that pods accept bundles again. The record in
the domain's status is written first; no bundle is written until its id is at the key's Secret.

A pod may lie: its report counts only if the API server, read after it, holds less. Absurd revisions are rejected, and
one pod cannot trigger two restores within an hour, because honest pods accept the new bundle.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from kvstrata.api.cachedomain import CacheDomain, Restored
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import DomainReason, SharedReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Root
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.bundle.enforcement import Coverage, coverage
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.keys.data_keys import last_restore

MAX_LEAD = 1 << 32
"""Maximum lead of a pod over the API server: at ten commits a second, more than a decade."""
MARGIN = 1 << 20
"""Distance of new revisions from the highest reported one: unheard pods may hold more."""
MAX_REVISION = 1 << 52
"""Maximum credible revision: status holds integers up to 2**53."""
BELIEVED_AGAIN_AFTER = timedelta(hours=1)
MAX_WITNESSES = 16
ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Claim:
    pod: str
    uid: str
    model: str
    revision: int
    term: int
    known_revision: int
    known_term: int


def contradicts(state: PodState, model_uid: str, root: Root | None, root_digest: str) -> bool:
    """Whether a pod's root cannot precede this one: newer, or another of its revision.

    Revisions and terms only grow, so a root that was read after the pod's report must be as new. Pods of another
    CachedModel of that name, or of a version without this report, contradict nothing.
    """
    if not state.revision or state.model_uid != model_uid:
        return False
    if root is None or root.model_uid != model_uid:
        return root is None
    if state.revision > root.revision or state.term > root.term:
        return True
    return state.revision == root.revision and state.root != root_digest


def claims(world: World) -> tuple[Claim, ...]:
    """Return revisions that live pods hold beyond the present bundles, highest revision first.

    If the model's status names a newer bundle than exists, only the bundle was lost or replaced: epochs are in
    statuses, so no old epoch came back.
    """
    found = []
    for name, model in world.models.items():
        committed = world.bundles.get(name)
        root = committed.bundle.root if committed is not None else None
        reported = model.status.bundle_revision or 0
        newest = root if root is not None and root.revision >= reported else None
        revision = newest.revision if newest is not None else reported
        term = root.term if root is not None else 0
        for pod in world.live_pods(name):
            verified = world.states.get(pod.uid)
            if verified is None or not verified.contradicted:
                continue
            state = verified.state
            other = newest is not None and (state.revision == newest.revision or state.term > newest.term)
            if state.revision > revision or other:
                found.append(Claim(pod.name, pod.uid, name, state.revision, state.term, revision, term))
    return tuple(sorted(found, key=lambda claim: (-claim.revision, claim.model, claim.pod)))


def discovered(world: World, domain: CacheDomain, now: datetime) -> dict[str, Any] | None:
    """Return the record of a new restore in API form; None if there is none."""
    known = domain.status.restored
    fresh = _believed(world, known, now)
    if not fresh:
        return None
    held = [claim.revision for claim in fresh]
    held += [committed.bundle.root.revision for committed in world.bundles.values()]
    held += [known.revision] if known is not None else []
    recent = [
        witness.to_kubernetes()
        for witness in (known.witnesses if known is not None else ())
        if now - witness.at < BELIEVED_AGAIN_AFTER
    ]
    witnesses = [
        {
            "pod": claim.pod,
            "uid": claim.uid,
            "model": claim.model,
            "revision": claim.revision,
            "known": claim.known_revision,
            "at": format_timestamp(now),
        }
        for claim in fresh
    ]
    return {
        "id": world.entropy[32 : 32 + ID_BYTES].hex(),
        "detectedAt": format_timestamp(now),
        "settledAt": None,
        "revision": max(held) + MARGIN,
        "term": max(claim.term for claim in fresh),
        "witnesses": (witnesses + recent)[:MAX_WITNESSES],
    }


def key_is_old(world: World) -> bool:
    restored, secret = last_restore(world), world.secrets.get(names.DOMAIN_KEY_SECRET)
    return restored is not None and (secret is None or secret.drawn_for != restored.id)


def holds_back(world: World) -> bool:
    """Whether no bundle may be written, because of a restore that is not in the domain's status or key yet."""
    return key_is_old(world) or bool(_believed(world, last_restore(world), None))


def restored_finding(world: World, domain: CacheDomain, now: datetime) -> Finding | None:
    """Return the progress after the last restore; None without one."""
    kind, known = ConditionType.RESTORED, domain.status.restored
    for claim in claims(world):
        why = _objection(claim, known, now)
        if why is not None and not _covered(claim, known):
            message = (
                f"pod {claim.pod} reports revision {claim.revision} of the bundle of CachedModel {claim.model}, and "
                f"the API server has {claim.known_revision}; it is not believed, because {why}: delete the pod"
            )
            return false(kind, DomainReason.WITNESS_NOT_BELIEVED, message)
    if known is None:
        return None
    behind = sorted(
        name
        for name, model in world.models.items()
        if not model.metadata.deleting
        and ((committed := world.bundles.get(name)) is None or committed.bundle.root.revision <= known.revision)
    )
    if behind:
        message = f"the bundle of CachedModel {', '.join(behind[:3])} is being written under the new key"
        return false(kind, SharedReason.NOT_COMMITTED, message)
    total = sum((coverage(world, name, known.revision) for name in world.models), Coverage())
    if known.settled_at is None and not total.complete:
        message = f"{total} enforce the new bundles; the others refuse all reuse until they do"
        return false(kind, SharedReason.AWAITING_ACKS, message)
    return true(kind, DomainReason.KEY_REPLACED, story_of(known))


def record(domain: CacheDomain, finding: Finding | None, now: datetime) -> dict[str, Any] | None:
    known = domain.status.restored
    if known is None:
        return None
    settled = known.settled_at is None and finding is not None and finding.status == "True"
    return known.to_kubernetes() | ({"settledAt": format_timestamp(now)} if settled else {})


def story_of(known: Restored) -> str:
    at = format_timestamp(known.detected_at)
    if not known.witnesses:
        return f"at {at} the API server was found to be older than pods; the domain's key is new since"
    first = known.witnesses[0]
    return (
        f"at {at} pod {first.pod} held revision {first.revision} of the bundle of CachedModel {first.model}, and the "
        f"API server only {first.known} or another of that number: it was restored from a backup, or an old "
        "bundle was put back. The domain's key is replaced, so nothing that was cached before can be read"
    )


def _believed(world: World, known: Restored | None, now: datetime | None) -> list[Claim]:
    return [claim for claim in claims(world) if not _covered(claim, known) and _objection(claim, known, now) is None]


def _covered(claim: Claim, known: Restored | None) -> bool:
    return known is not None and claim.revision <= known.revision and claim.term <= known.term


def _objection(claim: Claim, known: Restored | None, now: datetime | None) -> str | None:
    """Return why a pod is not believed, or None. Without `now` no time has passed since it was last believed."""
    if claim.revision - claim.known_revision > MAX_LEAD or claim.term - claim.known_term > MAX_LEAD:
        return "no operator commits that often"
    if claim.revision + MARGIN > MAX_REVISION:
        return "there is no revision left above it"
    for witness in known.witnesses if known is not None else ():
        if witness.uid == claim.uid and (now is None or now - witness.at < BELIEVED_AGAIN_AFTER):
            return f"everything was replaced after its report at {format_timestamp(witness.at)} already"
    return None
