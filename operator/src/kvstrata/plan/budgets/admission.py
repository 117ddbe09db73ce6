"""Admission of guarantees: an object's status records which are reserved, and bundles follow the record.

Admission follows from all claims on a tier together (`waiting_line`), so plans of different objects agree. It is
recorded before a bundle uses it, because order of arrival does not follow from specs. While a tier has less room than
was admitted, the youngest have nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason, SharedReason
from kvstrata.api.status import Admission
from kvstrata.model.guarantees import GuaranteeClaim, Holder, TierClaims, declared_guarantees, models_digest
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import KIB, binary, readable, round_up
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.actions import Decision, StatusWrite, key_of
from kvstrata.plan.budgets.waiting_line import CapacityRequest, Holders, Waiting, WaitingLine, decide_admission
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.rules import first
from kvstrata.plan.rules import policy as policy_chain

EVERYWHERE = ""
"""The place of a tier that all pods share, and of a per-pod tier in pods of a model that may yet come."""

FIRST_IN_LINE = 8
"""Number of waiting objects with a message that names the holders; messages further back stay constant."""

MOST_EXACT = 10**17


def line_for(world: World, tier: str) -> WaitingLine | None:
    """Return a tier's waiting line, or None if all that is declared or admitted fits, which is nearly always."""
    claims, found = world.claims.tiers.get(tier), world.tiers.get(tier)
    if claims is None or found is None:
        return None
    room = stored_bytes(found.spec)
    pending = {holder: sizes[tier] for holder, sizes in world.granting.items() if tier in sizes}
    if claims.most_bytes + sum(pending.values()) <= room:
        return None
    validity = (*_validity(world), found.spec.per_pod)
    inputs = (claims.version, tuple(sorted(pending.items())), room, validity)
    return world.memo.get(WaitingLine, tier, inputs, lambda: _line(world, found, room, claims, pending, validity))


def held_bytes(world: World, holder: Key, tier: str) -> int:
    """Return the admitted guarantee of an object on a tier that still fits."""
    claims = world.claims.tiers.get(tier)
    claim = claims.by_holder.get(holder) if claims is not None else None
    if claim is None or not claim.recorded_bytes:
        return 0
    line = line_for(world, tier)
    return claim.recorded_bytes if line is None or holder not in line.lost else 0


def is_undecided(resource: Holder | None) -> bool:
    """Whether an object's guarantees are undecided: no entry is compiled before."""
    return resource is not None and resource.status.admission is None and bool(declared_guarantees(resource))


def admitted_bytes(world: World, holder: Holder | None) -> dict[str, int]:
    """Return the admitted guarantees of an object that still fit, by tier."""
    if holder is None:
        return {}
    key = key_of(holder)
    return {tier: held_bytes(world, key, tier) for tier in world.claims.by_holder.get(key, ())}


def lost_everywhere(world: World) -> tuple[Any, ...]:
    """Return all that `admitted_bytes` reads besides the object, for any object."""
    lines = ((tier, line_for(world, tier)) for tier in sorted(world.claims.tiers))
    return tuple((tier, line.lost) for tier, line in lines if line is not None and line.lost)


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The decision about one object's guarantees.

    `admitted` is the decision by tier, None without a status field; `before` are larger amounts in its status. `due`:
    write this before anything follows from it. `finding` is its condition Admitted, None if it declares no guarantee.
    """

    admitted: Mapping[str, int] | None = None
    before: Mapping[str, int] = field(default_factory=dict)
    models: str = ""
    due: bool = False
    finding: Finding | None = None

    @property
    def waiting(self) -> Decision | None:
        """Why a declared guarantee is not reserved; None if all are."""
        return self.finding.failure if self.finding is not None else None

    def status(self, *, let_go: bool = True) -> dict[str, Any] | None:
        """Return the field `admission` of status, always complete because patches merge. Without `let_go` guarantees
        that are no longer declared stay reserved until no bundle promises them. Lost ones go at once."""
        if self.admitted is None:
            return None
        kept = self.admitted if let_go else {**self.admitted, **self.before}
        if not any(kept.values()) and not self.finding:
            return None
        exact = {tier: size if size < MOST_EXACT else round_up(size, KIB) for tier, size in sorted(kept.items())}
        rows = [{"tier": tier, "guaranteed": binary(size)} for tier, size in exact.items() if size]
        return {"models": self.models, "tiers": rows}


def admission_of(world: World, resource: Holder, wrong: Decision | None) -> AdmissionDecision:
    claims = world.claims.by_holder.get(key_of(resource))
    if not claims:
        return AdmissionDecision()
    admitted: dict[str, int] = {}
    before: dict[str, int] = {}
    waiting = []
    due = resource.status.admission is None
    for tier, claim in claims.items():
        had, line = claim.recorded_bytes or 0, line_for(world, tier)
        size = _wanted(claim, wrong)[0] if line is None else line.granted.get(claim.holder, 0)
        if line is not None and (place := line.position(claim.holder)) is not None:
            waiting.append(_shortage(world.tiers[tier], line, *place))
        lost = line is not None and had > 0 and claim.holder in line.lost
        admitted[tier] = size
        if size < had and not lost:
            before[tier] = had
        due = due or size > had or lost or not claim.current
    declared = [tier for tier, claim in claims.items() if claim.declared_bytes]
    finding = _finding(declared, admitted, waiting, wrong) if declared else None
    return AdmissionDecision(admitted, before, models_digest(resource), due, finding)


def admitted_by(writes: Iterable[StatusWrite]) -> dict[Key, dict[str, int]]:
    reported = {write.key: write.status.get("admission") for write in writes}
    return {key: Admission.model_validate(answer).by_tier for key, answer in reported.items() if answer}


def next_in_line(world: World, tier: str) -> tuple[Key, ...]:
    """Return the objects with a status that may change when a claim on the tier changes."""
    claims = world.claims.tiers.get(tier)
    if claims is None:
        return ()
    line = line_for(world, tier)
    if line is None:
        return tuple(claims.waiting)
    served = (holder for holder, size in line.granted.items() if size > (claims.by_holder[holder].recorded_bytes or 0))
    first_ones = (one.request.holder for one in line.waiting[: FIRST_IN_LINE + 1])
    return tuple(dict.fromkeys((*line.lost, *served, *first_ones)))


def waiting_for(world: World, tier: str) -> tuple[int, int]:
    """Return how many objects wait for room in a tier, and for how many more bytes."""
    line = line_for(world, tier)
    if line is None:
        return 0, 0
    return len(line.waiting), sum(one.request.requested_bytes - line.kept[one.request.holder] for one in line.waiting)


def _wanted(claim: GuaranteeClaim, wrong: Decision | None) -> tuple[int, bool]:
    """Return an object's maximum, and whether it may receive more than it holds. While its spec is wrong it keeps its
    admitted amount, because its last valid spec is in force. Of two policies for a tenant the younger has nothing."""
    if wrong is None:
        return claim.declared_bytes, True
    if wrong.reason == PolicyReason.TENANT_CONFLICT:
        return 0, False
    return claim.recorded_bytes or 0, False


def _problem(world: World, holder: Key) -> Decision | None:
    match holder.kind:
        case "TenantCachePolicy":
            return first(policy_chain.BLOCKING, world, world.policies[holder.name])
        case "TenantGroup":
            return policy_chain.budget_problem(world, world.groups[holder.name].spec.budgets, "spec.budgets")
        case "CacheDomain":
            return policy_chain.budget_problem(world, world.domain_spec.public_budgets, "spec.publicBudgets")
        case _:
            return None  # An error of a pool's spec does not change its readers' access.


def _validity(world: World) -> tuple[Any, ...]:
    return (
        tuple((name, tier.spec) for name, tier in sorted(world.tiers.items())),
        tuple((name, model.tier_names, model.metadata.labels) for name, model in sorted(world.models.items())),
        tuple(tuple(world.policies[name] for name in names) for _, names in sorted(world.contested.items())),
    )


def _line(
    world: World, tier: CacheTier, room: int, claims: TierClaims, pending: Mapping[Key, int], validity: tuple[Any, ...]
) -> WaitingLine:
    """Return the line, reusing the previous result of each unchanged object. The line of a crowded tier is recomputed
    with each of thousands of statuses, of which one has changed."""
    places = _places(world, tier)
    known: dict[Key, tuple[GuaranteeClaim, Any, CapacityRequest]] = world.memo.get(
        CapacityRequest, tier.name, validity, dict
    )
    requests = []
    for holder, claim in claims.by_holder.items():
        # The claim depends on the spec, which is the same object while unchanged.
        spec = world.objects(holder.kind)[holder.name].spec if holder.kind != "PrefixPool" else None
        before = known.get(holder)
        if before is None or before[0] is not claim or before[1] is not spec:
            before = known[holder] = (claim, spec, _request(world, claim, places))
        request = before[2]
        requests.append(replace(request, pending_bytes=pending[holder]) if holder in pending else request)
    for gone in known.keys() - claims.by_holder.keys():
        del known[gone]
    return decide_admission(requests, dict.fromkeys(places, room))


def _places(world: World, tier: CacheTier) -> tuple[str, ...]:
    """Return where guarantees on a tier add up: in all of it, or in a pod of each model that lists it. A guarantee on a
    per-pod tier holds in each pod, so the number of pods does not matter."""
    if not tier.spec.per_pod:
        return (EVERYWHERE,)
    return (EVERYWHERE, *(name for name, model in sorted(world.models.items()) if tier.name in model.tier_names))


def _request(world: World, claim: GuaranteeClaim, places: tuple[str, ...]) -> CapacityRequest:
    wanted, eligible = _wanted(claim, _problem(world, claim.holder))
    own = places if len(places) == 1 else _chosen(world, claim, places)
    return CapacityRequest(
        holder=claim.holder,
        since=claim.since,
        requested_bytes=wanted,
        admitted_bytes=claim.recorded_bytes or 0,
        places=own,
        charged_places=own if claim.current else places,
        is_current=claim.current,
        is_eligible=eligible,
    )


def _chosen(world: World, claim: GuaranteeClaim, places: tuple[str, ...]) -> tuple[str, ...]:
    if claim.models is None:
        return places
    names, selector = claim.models.names, claim.models.selector
    listed = (place for place in places if place != EVERYWHERE)
    if names is not None:
        return tuple(place for place in listed if place in names)
    return tuple(name for name in listed if selector and selector.matches(world.models[name].metadata.labels))


def _finding(
    declared: Iterable[str], admitted: Mapping[str, int], shortages: Sequence[str], wrong: Decision | None
) -> Finding:
    kind = ConditionType.ADMITTED
    if wrong:
        return false(kind, *wrong)
    if shortages:
        return false(kind, SharedReason.INSUFFICIENT_CAPACITY, "; ".join(shortages)[:4000])
    sizes = ", ".join(f"{readable(admitted[tier])} on CacheTier {tier}" for tier in sorted(declared))
    return true(kind, SharedReason.GUARANTEES_ADMITTED, f"reserved are {sizes}")


def _shortage(tier: CacheTier, line: WaitingLine, at: int, why: Waiting) -> str:
    room, request = line.capacity_bytes[why.place], why.request
    per_place = (
        f" of each pod of CachedModel {why.place}" if why.place else (" of each pod" if tier.spec.per_pod else "")
    )
    kept = line.kept[request.holder]
    until = f"{readable(kept)} of it stay guaranteed" if kept else "nothing of it is guaranteed"
    remedy = f"lower guarantees or raise {'capacityPerPod' if tier.spec.per_pod else 'capacity'}"
    start = f"{readable(request.requested_bytes)} on CacheTier {tier.name} wait for room, and {until} meanwhile: "
    if at >= FIRST_IN_LINE:
        return f"{start}{FIRST_IN_LINE} or more that are older wait before it for a part of {readable(room)}; {remedy}"
    free = f"of {readable(room)}{per_place} {readable(why.free_bytes) if why.free_bytes else 'nothing'} is free for it"
    queue = f", and {_named(why.behind)}, which is older, waits for it" if why.behind is not None else ""
    return f"{start}{free}{queue}{_held(line.holders[why.place])}; {remedy}"


def _held(holders: Holders) -> str:
    if not holders.count:
        return ""
    rest = holders.count - len(holders.largest)
    sizes = ", ".join(f"{_named(holder)} {readable(size)}" for holder, size in holders.largest)
    return f" (reserved for {sizes}{f' and {rest} more' if rest else ''})"


def _named(holder: Key) -> str:
    return f"{holder.kind} {holder.name}"
