"""The next step of an erasure: a pure function of the facts, the present state and the time.

No phase is stored. Each rule checks its goal and, if it is not met, returns what to order and wait for; the first such
rule wins. So a new leader reaches the same step, and orders are idempotent: each names its round. Late or early answers
do not count (`evidence`). Conditions follow `claims`, the rules for reading receipts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.receipt.vocabulary import KeyCustody, Standing
from kvstrata.model.erasure.evidence import (
    keys_kept,
    keys_not_destroyed,
    last_moment,
    standing_of,
    tiers_at_hand,
    unreachable_at,
    window_ends,
    witnesses,
)
from kvstrata.model.erasure.facts import KeyNotDestroyed, ReceiptWritten, Rolled, Verdict
from kvstrata.model.erasure.record import Erasure, Observed
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.erasure.orders import (
    DestroyKeys,
    IssueReceipt,
    Order,
    Outstanding,
    RevokeKeys,
    StartDeletion,
    deletions_owed,
    names,
    pods_owed,
    probes_owed,
    reset_owed,
    tiers_to_look_at,
)
from kvstrata.plan.erasure.receipt import facts_of, proven

PATIENCE_S = 600
"""How long unreachable copies are waited for when nothing else is left and the order has no deadline."""

RESIDUE_PATIENCE_S = 60
"""The same if the order allows residue: time for a restarting pod to return."""

STILL_S = 3600
"""How long slots of a tier stay pinned for one erasure, from when no pod reuses anything. If it takes longer, deletions
and looks are repeated when slots move."""

ENDING_LIMIT_S = 900
"""Limit of an erasure in a namespace under deletion, which waits for it."""

LOOK_AGAIN_S = 5.0
"""When to check again without notification."""


class ErasurePhase(StrEnum):
    """Progress for people; decides nothing."""

    ROLLING = "Rolling"
    AWAITING_ACKS = "AwaitingAcks"
    REVOKING = "Revoking"
    WAITING_OUT_WRITES = "WaitingOutWrites"
    ERASING = "Erasing"
    VERIFYING = "Verifying"
    RECEIPTING = "Receipting"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        return self in (ErasurePhase.COMPLETE, ErasurePhase.FAILED)


@dataclass(frozen=True, slots=True)
class Conclude:
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ErasureStep:
    """Orders, their reason, and when to check again without events. Slots of the tiers in `pinned_tiers` must not move
    meanwhile."""

    phase: ErasurePhase
    decision: Decision
    orders: tuple[Order | StartDeletion | Conclude, ...] = ()
    again_s: float | None = None
    pinned_tiers: frozenset[str] = frozenset()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class ErasureCase:
    """Input of the rules. `holds` is what the facts prove."""

    erasure: Erasure
    seen: Observed
    now: datetime
    holds: frozenset[ReceiptClaim]


def next_step(erasure: Erasure, seen: Observed, now: datetime) -> ErasureStep:
    case = ErasureCase(erasure, seen, now, proven(erasure))
    step = next(step for rule in RULES if (step := rule(case)) is not None)
    if not any(isinstance(order, Conclude) for order in step.orders) and erasure.only(Verdict) is None:
        step = _cut_short(case, step)
    return ErasureStep(
        step.phase, step.decision, step.orders, step.again_s, step.pinned_tiers, tuple(_findings(case, step))
    )


def finish(case: ErasureCase) -> ErasureStep | None:
    verdict, receipt = case.erasure.only(Verdict), case.erasure.only(ReceiptWritten)
    if verdict is None:
        return None
    if receipt is not None:
        phase = ErasurePhase.COMPLETE if verdict.complete else ErasurePhase.FAILED
        return ErasureStep(phase, Decision(verdict.reason, verdict.message))
    if case.seen.receipt_problem:
        return _waiting(ErasurePhase.RECEIPTING, Decision(R.RECEIPT_REFUSED, case.seen.receipt_problem))
    why = Decision(R.RECEIPTING, f"the receipt is being written; it ends so: {verdict.message}")
    return ErasureStep(ErasurePhase.RECEIPTING, why, (IssueReceipt(facts_of(case.erasure)),), LOOK_AGAIN_S)


def roll(case: ErasureCase) -> ErasureStep | None:
    """The plan of the invalidation rolls epochs, eager or not."""
    if case.erasure.only(Rolled) is not None:
        return None
    return _waiting(ErasurePhase.ROLLING, Decision(R.ROLLING_EPOCHS, "new epochs go into status and bundles"))


def await_pods(case: ErasureCase) -> ErasureStep | None:
    """Every witness acknowledged, ended, or is fenced."""
    if unreachable_at(case.erasure) is not None:
        return None
    unsettled = [pod.name for pod in witnesses(case.erasure) if standing_of(case.erasure, pod.uid) is None]
    why = f"{names(unsettled)} neither acknowledged nor ended, and could not yet fence themselves off for certain"
    return _waiting(ErasurePhase.AWAITING_ACKS, Decision(R.AWAITING_ACKS, why))


def revoke(case: ErasureCase) -> ErasureStep | None:
    """Data keys are removed when no pod needs them any more, and before any deletion."""
    kept = keys_kept(case.erasure)
    if not kept:
        return None
    why = Decision(R.REVOKING_KEYS, f"{len(kept)} data keys are removed from their custody")
    if case.seen.custody_problem:
        why = Decision(R.CUSTODY_AWAY, f"{len(kept)} data keys are still in their custody: {case.seen.custody_problem}")
    return ErasureStep(ErasurePhase.REVOKING, why, (RevokeKeys(kept),), LOOK_AGAIN_S)


def destroy(case: ErasureCase) -> ErasureStep | None:
    """The KMS is asked for the destruction of keys once every holder may have dropped them."""
    open_keys = keys_not_destroyed(case.erasure, judged=False)
    if not open_keys:
        return None
    why = Decision(R.DESTROYING_KEYS, f"{len(open_keys)} data keys are asked after: whoever had them is to have let go")
    if case.seen.custody_problem:
        why = Decision(R.CUSTODY_AWAY, f"{len(open_keys)} data keys are asked after: {case.seen.custody_problem}")
    return ErasureStep(ErasurePhase.REVOKING, why, (DestroyKeys(open_keys),), LOOK_AGAIN_S)


def wait_out_writes(case: ErasureCase) -> ErasureStep | None:
    """A deletion before the last possible write would have to be repeated. In pods, late writes under a revoked
    keyspace disappear; under the surviving keyspace of a prefix they would stay."""
    end = window_ends(case.erasure)
    if end is None or case.now >= end or not (tiers_at_hand(case.erasure) or case.erasure.order.prefix):
        return None
    left_s = (end - case.now).total_seconds()
    why = Decision(R.WAITING_OUT_WRITES, "writes that had begun before may still arrive for 30 s")
    return ErasureStep(ErasurePhase.WAITING_OUT_WRITES, why, again_s=left_s, pinned_tiers=_pinned_tiers(case))


def finish_verified(case: ErasureCase) -> ErasureStep | None:
    """A proof stays valid when servers change afterwards."""
    if _engines_owed(case):
        return None
    if ReceiptClaim.VERIFIED in case.holds:
        return _judged(case, True, R.ERASED_AND_VERIFIED, "every tier and pod was emptied, looked at, and found empty")
    if _held_nothing(case):
        return _judged(case, True, R.NOTHING_HELD, "nothing was held outside the engines' own memory")
    return None


def erase(case: ErasureCase) -> ErasureStep | None:
    """Each primary by a Job, a few at a time; each pod by itself."""
    outstanding = deletions_owed(case.erasure, case.seen, case.now) + pods_owed(case.erasure, case.seen)
    return _step(case, ErasurePhase.ERASING, R.ERASING, outstanding)


def verify(case: ErasureCase) -> ErasureStep | None:
    """The operator looks itself, after all deletions."""
    outstanding = tiers_to_look_at(case.erasure, case.seen) + probes_owed(case.erasure, case.seen)
    return _step(case, ErasurePhase.VERIFYING, R.VERIFYING, outstanding)


def finish_short(case: ErasureCase) -> ErasureStep:
    """Copies are left and nothing more can be ordered: wait, accept the residue, or fail. In a namespace under deletion
    only reachable copies are waited for: what is gone does not return."""
    outstanding = _owed(case)
    late = next((why for why in outstanding.blocked_by if why.reason == R.LATE_COPIES), None)
    if late is not None:
        return _judged(case, False, late.reason, late.message)
    why = outstanding.blocked_by[0] if outstanding.blocked_by else Decision(R.NOT_VERIFIED, _unproven(case))
    message = "; ".join(dict.fromkeys(one.message for one in outstanding.blocked_by)) or why.message
    allowed, deadline = case.erasure.order.allow_residue or bool(case.seen.unattended), _deadline(case)
    ends = last_moment(case.erasure) + timedelta(seconds=RESIDUE_PATIENCE_S if allowed else PATIENCE_S)
    if deadline is not None:
        ends = min(deadline, ends) if allowed else deadline
    if case.now >= ends or (case.seen.unattended and not outstanding.blocked_by):
        if allowed:
            return _judged(case, True, R.COMPLETE_WITH_RESIDUE, f"what could be reached is erased; left: {message}")
        return _judged(case, False, why.reason, message)
    until = f"{message}; it is waited for until {format_timestamp(ends)}"
    left_s = min((ends - case.now).total_seconds(), LOOK_AGAIN_S)
    # A holder of a key may have ended since.
    late_keys = keys_not_destroyed(case.erasure, judged=True)
    orders = (DestroyKeys(late_keys),) if late_keys else ()
    return ErasureStep(ErasurePhase.ERASING, Decision(why.reason, until), orders, left_s, _pinned_tiers(case))


RULES: tuple[Callable[[ErasureCase], ErasureStep | None], ...] = (
    finish,
    roll,
    await_pods,
    revoke,
    destroy,
    wait_out_writes,
    finish_verified,
    erase,
    verify,
    finish_short,
)


def _owed(case: ErasureCase) -> Outstanding:
    erasing = deletions_owed(case.erasure, case.seen, case.now) + pods_owed(case.erasure, case.seen)
    return erasing + tiers_to_look_at(case.erasure, case.seen) + probes_owed(case.erasure, case.seen)


def _step(case: ErasureCase, phase: ErasurePhase, reason: R, outstanding: Outstanding) -> ErasureStep | None:
    if not (outstanding.orders or outstanding.waiting):
        return None
    # Unusual reasons first.
    whys = sorted(outstanding.waiting, key=lambda why: why.reason == reason)
    shown = list(dict.fromkeys(why.message for why in whys))
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    why = Decision(whys[0].reason, "; ".join(shown[:3]) + more)
    return ErasureStep(phase, why, outstanding.orders, LOOK_AGAIN_S, _pinned_tiers(case))


def _engines_owed(case: ErasureCase) -> bool:
    acked = [
        pod
        for pod in witnesses(case.erasure)
        if (word := standing_of(case.erasure, pod.uid)) and word.standing is Standing.ACKED
    ]
    return any(reset_owed(case.erasure, case.seen, pod) != Outstanding() for pod in acked)


def _held_nothing(case: ErasureCase) -> bool:
    inside = any(witness.tiers for witness in witnesses(case.erasure))
    return ReceiptClaim.UNREACHABLE in case.holds and not case.erasure.order.tiers and not inside


def _judged(case: ErasureCase, complete: bool, reason: str, message: str) -> ErasureStep:
    verdict = Verdict(complete, reason, message, case.now)
    return ErasureStep(ErasurePhase.RECEIPTING, Decision(reason, message), (Conclude(verdict),))


def _waiting(phase: ErasurePhase, why: Decision) -> ErasureStep:
    return ErasureStep(phase, why, again_s=LOOK_AGAIN_S)


def _own_deadline(case: ErasureCase) -> datetime | None:
    own_s = case.erasure.order.deadline_s
    return case.erasure.order.started + timedelta(seconds=own_s) if own_s is not None else None


def _deadline(case: ErasureCase) -> datetime | None:
    own, going = _own_deadline(case), case.seen.unattended
    ends = going + timedelta(seconds=ENDING_LIMIT_S) if going is not None else None
    return min((moment for moment in (own, ends) if moment is not None), default=None)


def _cut_short(case: ErasureCase, step: ErasureStep) -> ErasureStep:
    if case.seen.abandoned:
        message = f"given up by a person, while this was so: {step.decision.message}"
        verdict = Verdict(False, R.ABANDONED, message, case.now, case.seen.abandoned)
        return ErasureStep(ErasurePhase.RECEIPTING, Decision(R.ABANDONED, message), (Conclude(verdict),))
    deadline = _deadline(case)
    if deadline is None:
        return step
    if case.now >= deadline:
        limit = f"{case.erasure.order.deadline_s} s"
        if deadline != _own_deadline(case):
            limit = f"the {ENDING_LIMIT_S} s that a namespace waits for it that is being deleted"
        message = f"not complete within {limit}: {step.decision.message}"
        return _judged(case, False, R.DEADLINE_EXCEEDED, message)
    left_s = (deadline - case.now).total_seconds()
    again_s = left_s if step.again_s is None else min(left_s, step.again_s)
    return ErasureStep(step.phase, step.decision, step.orders, again_s, step.pinned_tiers)


def _pinned_tiers(case: ErasureCase) -> frozenset[str]:
    since = unreachable_at(case.erasure)
    if since is None or case.now >= since + timedelta(seconds=STILL_S):
        return frozenset()
    return frozenset(tier.name for tier in tiers_at_hand(case.erasure))


def _unproven(case: ErasureCase) -> str:
    kinds = [str(item.kind) for item in facts_of(case.erasure).residue if not item.kind.asked and item.kind.denies]
    what = f" ({', '.join(kinds)})" if kinds else ", for example because no pod knew a key to be asked for"
    return f"everything was done, and the facts do not prove that all is gone{what}"


def _findings(case: ErasureCase, step: ErasureStep) -> Iterable[Finding]:
    why = step.decision
    for kind, claim, reason in (
        (ConditionType.LOGICALLY_INVALID, ReceiptClaim.UNREACHABLE, R.LOGICALLY_INVALID),
        (ConditionType.KEYS_REVOKED, ReceiptClaim.KEYS_REVOKED, R.KEYS_REVOKED),
        (ConditionType.KEYS_DESTROYED, ReceiptClaim.KEYS_DESTROYED, R.KEYS_DESTROYED),
        (ConditionType.ERASED, ReceiptClaim.ERASED, R.ERASED),
        (ConditionType.VERIFIED, ReceiptClaim.VERIFIED, R.VERIFIED),
    ):
        lacking = _keys_lacking(case, claim) or why
        holds = claim in case.holds
        yield true(kind, reason, claim.meaning) if holds else false(kind, lacking.reason, lacking.message)
    if step.phase.finished:
        kind = ConditionType.COMPLETE if step.phase is ErasurePhase.COMPLETE else ConditionType.FAILED
        yield true(kind, why.reason, why.message)


def _keys_lacking(case: ErasureCase, claim: ReceiptClaim) -> Decision | None:
    """Return why keys are not revoked or destroyed, if another cause than the present step."""
    rolled = case.erasure.only(Rolled)
    if rolled is None or claim not in (ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED):
        return None
    if case.erasure.order.prefix is not None:
        return Decision(R.KEYS_STAY, "the scopes of a prefix live on, and so do their data keys")
    if not rolled.keys:
        return Decision(R.NO_DATA_KEYS, "nothing of it was encrypted, so there is no data key")
    if claim is ReceiptClaim.KEYS_DESTROYED and any(key.custody is KeyCustody.SECRET for key in rolled.keys):
        return Decision(R.KEYS_IN_SECRETS, "data keys were in Secrets: etcd's history and backups may have copies")
    if claim is ReceiptClaim.KEYS_DESTROYED and ReceiptClaim.KEYS_REVOKED in case.holds:
        said = sorted({one.why for one in case.erasure.of(KeyNotDestroyed)})
        told = f": {'; '.join(said[:3])}" if said else ""
        return Decision(R.NOT_CONFIRMED, f"the custody has not said that no copy of the data keys exists{told}")
    return None
