"""The next step of an erasure: a pure function of the facts, the present state and the time.

No phase is stored. Each rule checks its goal and, if it is not met, returns orders and the reason to wait; the first
such rule wins. So a new leader reaches the same step, and orders are idempotent: each names its round. Late or early
answers do not count (`evidence`). Conditions follow `claims`, the rules for reading receipts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from kvstrata.api.cacheinvalidation import Phase
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.api.reasons import SharedReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import KeyCustody, Standing
from kvstrata.model.erasure import evidence
from kvstrata.model.erasure.facts import KeyNotDestroyed, ReceiptWritten, Rolled, Verdict
from kvstrata.model.erasure.record import Erasure, Observed
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, listed, true
from kvstrata.plan.erasure import orders as work

PATIENCE_S = 600
"""How long unreachable copies are waited for when nothing else is left and the order has no deadline."""

RESIDUE_PATIENCE_S = 60
"""The same if the order allows residue: time for a restarting pod to return; and time for the new epochs of an erasure
that begins after its deadline, as after an outage of the operator."""

STILL_S = 3600
"""How long slots of a tier stay pinned for one erasure, from when no pod reuses anything. If it takes longer, deletions
and looks are repeated when slots move."""

ENDING_LIMIT_S = 900
"""Limit of an erasure in a namespace under deletion, which waits for it."""


@dataclass(frozen=True, slots=True)
class ErasureStep:
    """Orders or the `verdict` to record, the reason, and when time alone changes the step. Slots of the tiers in
    `pinned_tiers` must not move meanwhile."""

    phase: Phase
    decision: Decision
    orders: tuple[work.Order | work.StartDeletion, ...] = ()
    verdict: Verdict | None = None
    again_s: float | None = None
    pinned_tiers: frozenset[str] = frozenset()
    findings: tuple[Finding, ...] = ()


def next_step(erasure: Erasure, seen: Observed, now: datetime) -> ErasureStep:
    case = work.case_of(erasure, seen, now)
    step = next(step for rule in RULES if (step := rule(case)) is not None)
    if step.verdict is None and erasure.only(Verdict) is None:
        step = _cut_short(case, step)
    return replace(step, findings=tuple(_findings(case, step)))


def finish(case: work.ErasureCase) -> ErasureStep | None:
    verdict, receipt = case.erasure.only(Verdict), case.erasure.only(ReceiptWritten)
    if verdict is None:
        return None
    if receipt is not None:
        phase = Phase.COMPLETE if verdict.complete else Phase.FAILED
        return ErasureStep(phase, Decision(verdict.reason, verdict.message))
    if case.seen.receipt_problem and case.seen.overdue:
        late = f"{case.seen.overdue}: the receipt is not written, because {case.seen.receipt_problem}"
        return ErasureStep(Phase.FAILED, Decision(R.NOT_PROVEN, late))
    if case.seen.receipt_problem:
        return ErasureStep(Phase.RECEIPTING, Decision(R.RECEIPT_REFUSED, case.seen.receipt_problem))
    why = Decision(R.RECEIPTING, f"the receipt is being written; it ends so: {verdict.message}")
    return ErasureStep(Phase.RECEIPTING, why, (work.IssueReceipt(case.facts),))


def roll(case: work.ErasureCase) -> ErasureStep | None:
    """The plan of the invalidation rolls epochs, eager or not."""
    if case.erasure.only(Rolled) is not None:
        return None
    return ErasureStep(Phase.ROLLING, Decision(R.ROLLING_EPOCHS, "new epochs go into status and bundles"))


def await_pods(case: work.ErasureCase) -> ErasureStep | None:
    """Every witness acknowledged, ended, or is fenced."""
    if evidence.unreachable_at(case.erasure) is not None:
        return None
    unsettled = listed(witness.name for witness, pod in case.pods if pod.standing is Standing.OPEN)
    why = f"{unsettled} neither acknowledged nor ended, and could not yet fence themselves off for certain"
    return ErasureStep(Phase.AWAITING_ACKS, Decision(SharedReason.AWAITING_ACKS, why))


def revoke(case: work.ErasureCase) -> ErasureStep | None:
    """Data keys are removed when no pod needs them any more, and before any deletion."""
    kept = evidence.keys_kept(case.erasure)
    if not kept:
        return None
    why = Decision(R.REVOKING_KEYS, f"{len(kept)} data keys are removed from their custody")
    if case.seen.custody_problem:
        why = Decision(R.CUSTODY_AWAY, f"{len(kept)} data keys are still in their custody: {case.seen.custody_problem}")
    return ErasureStep(Phase.REVOKING, why, (work.RevokeKeys(kept),))


def destroy(case: work.ErasureCase) -> ErasureStep | None:
    """The KMS is asked for the destruction of keys once every holder may have dropped them."""
    open_keys = _keys_not_destroyed(case, judged=False)
    if not open_keys:
        return None
    why = Decision(R.DESTROYING_KEYS, f"{len(open_keys)} data keys are being destroyed: every holder must release them")
    if case.seen.custody_problem:
        why = Decision(R.CUSTODY_AWAY, f"{len(open_keys)} data keys are asked after: {case.seen.custody_problem}")
    return ErasureStep(Phase.REVOKING, why, (work.DestroyKeys(open_keys),))


def wait_out_writes(case: work.ErasureCase) -> ErasureStep | None:
    """A deletion before the last possible write would have to be repeated. In pods, late writes under a revoked
    keyspace disappear; under the surviving keyspace of a prefix they would stay."""
    end = evidence.window_ends(case.erasure)
    if end is None or case.now >= end or not (evidence.tiers_at_hand(case.erasure) or case.erasure.order.prefix):
        return None
    left_s = (end - case.now).total_seconds()
    why = Decision(R.WAITING_OUT_WRITES, "writes that had begun before may still arrive for 30 s")
    return ErasureStep(Phase.WAITING_OUT_WRITES, why, again_s=left_s, pinned_tiers=_pinned_tiers(case))


def finish_verified(case: work.ErasureCase) -> ErasureStep | None:
    """A proof stays valid when servers change afterwards."""
    if case.engines:
        return None
    if ReceiptClaim.VERIFIED in case.holds:
        return _judged(case, True, R.ERASED_AND_VERIFIED, "every tier and pod was emptied, looked at, and found empty")
    left = any(item.kind is Residue.TIER_LOST for item in case.facts.residue) or any(
        tier.outlives_pod or pod.standing is not Standing.ENDED for witness, pod in case.pods for tier in witness.tiers
    )
    if ReceiptClaim.UNREACHABLE in case.holds and not evidence.tiers_meant(case.erasure) and not left:
        inside = any(witness.tiers for witness, _ in case.pods)
        ended = "all pods that held blocks in their memory ended"
        message = ended if inside else "nothing was held outside the engines' own memory"
        return _judged(case, True, R.NOTHING_HELD, message)
    return None


def erase(case: work.ErasureCase) -> ErasureStep | None:
    """Each primary by a Job, a few at a time; each pod by itself."""
    return _step(case, Phase.ERASING, SharedReason.ERASING, case.to_erase)


def verify(case: work.ErasureCase) -> ErasureStep | None:
    """The operator looks itself, after all deletions."""
    return _step(case, Phase.VERIFYING, R.VERIFYING, case.to_verify)


def finish_short(case: work.ErasureCase) -> ErasureStep:
    """Copies are left and nothing more can be ordered: wait, accept the residue, or fail. In a namespace under deletion
    only reachable copies are waited for: pods that are gone do not return."""
    blocked = [one for one in (*case.to_erase, *case.to_verify) if one.blocked]
    late = next((one for one in blocked if one.reason is R.LATE_COPIES), None)
    if late is not None:
        return _judged(case, False, late.reason, late.message)
    reason = blocked[0].reason if blocked else R.NOT_VERIFIED
    message = "; ".join(dict.fromkeys(one.message for one in blocked)) or _unproven(case)
    allowed, deadline = case.erasure.order.allow_residue or bool(case.seen.unattended), _deadline(case)
    ends = evidence.last_moment(case.erasure) + timedelta(seconds=RESIDUE_PATIENCE_S if allowed else PATIENCE_S)
    if deadline is not None:
        ends = min(deadline, ends) if allowed else deadline
    late_keys = _keys_not_destroyed(case, judged=True)
    # A lost tier does not return, but a holder of a key may have ended since.
    over = not (blocked or late_keys) and any(item.kind is Residue.TIER_LOST for item in case.facts.residue)
    if case.now >= ends or over or (case.seen.unattended and not blocked):
        if allowed:
            return _judged(case, True, R.COMPLETE_WITH_RESIDUE, f"all reachable copies are erased; left: {message}")
        return _judged(case, False, R.NOT_PROVEN if over else reason, message)
    until = f"{message}; it is waited for until {format_timestamp(ends)}"
    again = (work.DestroyKeys(late_keys),) if late_keys else ()
    left_s = (ends - case.now).total_seconds()
    return ErasureStep(Phase.ERASING, Decision(reason, until), again, again_s=left_s, pinned_tiers=_pinned_tiers(case))


RULES: tuple[Callable[[work.ErasureCase], ErasureStep | None], ...] = (
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


def _step(
    case: work.ErasureCase, phase: Phase, reason: R | SharedReason, every: Iterable[work.Open]
) -> ErasureStep | None:
    # Unusual reasons first.
    waiting = sorted((one for one in every if not one.blocked), key=lambda one: one.reason is reason)
    if not waiting:
        return None
    shown = list(dict.fromkeys(one.message for one in waiting))
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    orders = tuple(one.order for one in every if one.order is not None)
    why = Decision(waiting[0].reason, "; ".join(shown[:3]) + more)
    return ErasureStep(phase, why, orders, pinned_tiers=_pinned_tiers(case))


def _keys_not_destroyed(case: work.ErasureCase, *, judged: bool) -> tuple[str, ...]:
    """Return the fingerprints of removed keys in a KMS that did not confirm their destruction. With `judged`, those for
    which the KMS gave a reason; otherwise those that were not asked about yet."""
    known = {one.fingerprint for one in case.erasure.of(KeyNotDestroyed)}
    left = (key for key in case.facts.keys if key.custody is KeyCustody.KMS and key.removed and not key.destroyed)
    return tuple(key.fingerprint for key in left if (key.fingerprint in known) is judged)


def _judged(case: work.ErasureCase, complete: bool, reason: str, message: str, abandoned: str = "") -> ErasureStep:
    verdict = Verdict(complete, reason, message, case.now, abandoned)
    return ErasureStep(Phase.RECEIPTING, Decision(reason, message), verdict=verdict)


def _own_deadline(case: work.ErasureCase) -> datetime | None:
    own_s = case.erasure.order.deadline_s
    return case.erasure.order.started + timedelta(seconds=own_s) if own_s is not None else None


def _deadline(case: work.ErasureCase) -> datetime | None:
    own, going = _own_deadline(case), case.seen.unattended
    ends = going + timedelta(seconds=ENDING_LIMIT_S) if going is not None else None
    return min((moment for moment in (own, ends) if moment is not None), default=None)


def _cut_short(case: work.ErasureCase, step: ErasureStep) -> ErasureStep:
    if case.seen.abandoned:
        message = f"given up by a person, while this was so: {step.decision.message}"
        return _judged(case, False, R.ABANDONED, message, case.seen.abandoned)
    tried = case.now >= case.erasure.order.started + timedelta(seconds=RESIDUE_PATIENCE_S)
    if case.seen.overdue and (tried or case.erasure.only(Rolled) is not None):
        message = f"{case.seen.overdue}: {step.decision.message}"
        return _judged(case, False, R.NOT_PROVEN, message, case.seen.overdue)
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
    return replace(step, again_s=again_s)


def _pinned_tiers(case: work.ErasureCase) -> frozenset[str]:
    since = evidence.unreachable_at(case.erasure)
    if since is None or case.now >= since + timedelta(seconds=STILL_S):
        return frozenset()
    return frozenset(tier.name for tier in evidence.tiers_at_hand(case.erasure))


def _unproven(case: work.ErasureCase) -> str:
    denying = [item for item in case.facts.residue if not item.kind.asked and item.kind.denies]
    kinds = [f"{item.kind} {item.about}".strip() for item in denying]
    what = f" ({', '.join(kinds)})" if kinds else ", for example because no pod knew a key to be asked for"
    return f"everything was done, and the facts do not prove that all is gone{what}"


def _findings(case: work.ErasureCase, step: ErasureStep) -> Iterable[Finding]:
    why = step.decision
    for kind, claim, reason in (
        (ConditionType.LOGICALLY_INVALID, ReceiptClaim.UNREACHABLE, R.LOGICALLY_INVALID),
        (ConditionType.KEYS_REVOKED, ReceiptClaim.KEYS_REVOKED, R.KEYS_REVOKED),
        (ConditionType.KEYS_DESTROYED, ReceiptClaim.KEYS_DESTROYED, R.KEYS_DESTROYED),
        (ConditionType.ERASED, ReceiptClaim.ERASED, R.ERASED),
        (ConditionType.VERIFIED, ReceiptClaim.VERIFIED, R.VERIFIED),
    ):
        if claim in _OF_KEYS and not _has_keys(case):
            continue
        lacking = _keys_lacking(case, claim) or why
        holds = claim in case.holds
        yield true(kind, reason, claim.meaning) if holds else false(kind, lacking.reason, lacking.message)
    if step.phase.finished:
        kind = ConditionType.COMPLETE if step.phase is Phase.COMPLETE else ConditionType.FAILED
        yield true(kind, why.reason, why.message)


_OF_KEYS = (ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED)


def _has_keys(case: work.ErasureCase) -> bool:
    """Whether there may be keys to revoke: scopes of a prefix live on with theirs, and plain blocks have none."""
    rolled = case.erasure.only(Rolled)
    return case.erasure.order.prefix is None and (rolled is None or bool(rolled.keys))


def _keys_lacking(case: work.ErasureCase, claim: ReceiptClaim) -> Decision | None:
    """Return why keys are not revoked or destroyed, if another cause than the present step."""
    rolled = case.erasure.only(Rolled)
    if rolled is None or claim not in _OF_KEYS:
        return None
    if claim is ReceiptClaim.KEYS_DESTROYED and any(key.custody is KeyCustody.SECRET for key in rolled.keys):
        return Decision(R.KEYS_IN_SECRETS, "data keys were in Secrets: etcd's history and backups may have copies")
    if claim is ReceiptClaim.KEYS_DESTROYED and ReceiptClaim.KEYS_REVOKED in case.holds:
        reasons = sorted({one.why for one in case.erasure.of(KeyNotDestroyed)})
        detail = f": {'; '.join(reasons[:3])}" if reasons else ""
        return Decision(R.NOT_CONFIRMED, f"the custody has not confirmed that no copy of the data keys exists{detail}")
    return None
