"""Outstanding work of an erasure: orders, waits, and obstacles that no order can remove.

An order names its round. A repeated one is answered with the first result, so it does no harm and loses no count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.api.reasons import SharedReason
from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.facts import Erasure as ReceiptFacts
from kvstrata.contract.receipt.facts import PodFact
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.receipt.vocabulary import Hbm, Standing
from kvstrata.model.erasure import evidence
from kvstrata.model.erasure.facts import Deletion, EngineKept, HeldTier, JobState, Look, Witness
from kvstrata.model.erasure.record import Erasure, Observed, TierNow
from kvstrata.plan.erasure.receipt import facts_of

MAX_DELETIONS_AT_ONCE = 4
"""Concurrent Jobs of all erasures: deletions slow down serving servers."""

MAX_ROUNDS = 3
"""Attempts to empty a server or pod before returning data is reported as a fault."""

BACKOFF_S = 10

UNKNOWN = TierNow((), "", reachable=False)


@dataclass(frozen=True, slots=True)
class RevokeKeys:
    fingerprints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DestroyKeys:
    fingerprints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartDeletion:
    """Have a Job delete from one primary. Jobs are for a whole tier: see `deletions.begun`."""

    tier: str
    primary: str
    round: int


@dataclass(frozen=True, slots=True)
class FollowDeletion:
    """Start the Job of a tier and round unless it exists, and report its end."""

    tier: str
    round: int


@dataclass(frozen=True, slots=True)
class AskPodToErase:
    """Ask a pod to erase these tiers of its own."""

    uid: str
    round: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetEngine:
    uid: str


@dataclass(frozen=True, slots=True)
class ReadServers:
    """Read which primaries a tier has, and whether they answer."""

    tier: str


@dataclass(frozen=True, slots=True)
class NameChunks:
    """Note names of chunks before they are deleted, for probes afterwards; and of values without an index."""

    tier: str


@dataclass(frozen=True, slots=True)
class VerifyTier:
    tier: str


@dataclass(frozen=True, slots=True)
class AskPodToVerify:
    """Ask a pod for keys that it could have read before; it must miss each."""

    uid: str
    round: int


@dataclass(frozen=True, slots=True)
class IssueReceipt:
    """Append these facts to the domain's chain (`plan.erasure.receipt_chain`)."""

    facts: ReceiptFacts


ToPod = AskPodToErase | ResetEngine | AskPodToVerify
ToTier = ReadServers | NameChunks | VerifyTier
Order = RevokeKeys | DestroyKeys | FollowDeletion | IssueReceipt | ToPod | ToTier


@dataclass(frozen=True, slots=True)
class Open:
    """Work that is not done yet, and why. `order` does it. Without one the erasure waits, or the work is `blocked`: no
    order would change it."""

    reason: R | SharedReason
    message: str
    order: Order | StartDeletion | None = None
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class ErasureCase:
    """Input of the rules. `facts` are those of the receipt, and `holds` are the claims that they prove."""

    erasure: Erasure
    seen: Observed
    now: datetime
    facts: ReceiptFacts
    holds: frozenset[ReceiptClaim]
    files_left: frozenset[HeldTier]
    to_erase: tuple[Open, ...] = ()
    to_verify: tuple[Open, ...] = ()
    engines: tuple[Open, ...] = ()

    @property
    def pods(self) -> Iterator[tuple[Witness, PodFact]]:
        return zip(evidence.witnesses(self.erasure), self.facts.pods, strict=True)


def case_of(erasure: Erasure, seen: Observed, now: datetime) -> ErasureCase:
    facts = facts_of(erasure)
    case = ErasureCase(erasure, seen, now, facts, frozenset(claims(facts)), evidence.files_left(erasure))
    return replace(
        case,
        to_erase=(*_deletions(case), *_copies(case)),
        to_verify=(*_looks(case), *_probes(case)),
        engines=tuple(one for witness, pod in case.pods for one in _engine(case, witness, pod)),
    )


def _deletions(case: ErasureCase) -> Iterator[Open]:
    """Every present primary of the tiers must be emptied after the last write."""
    erasure, seen = case.erasure, case.seen
    running = [one for one in erasure.of(Deletion) if one.state is JobState.RUNNING]
    room = MAX_DELETIONS_AT_ONCE - seen.deletions_elsewhere - len(running)
    for tier in evidence.tiers_at_hand(erasure):
        servers = seen.tiers.get(tier.name, UNKNOWN)
        if servers.reachable:
            for node in servers.primaries:
                if (one := _deletion(case, tier.name, node, room > 0)) is not None:
                    room -= one.order is not None
                    yield one
        elif not servers.primaries or not all(
            evidence.last_whole(erasure, tier.name, node) for node in servers.primaries
        ):
            yield _away(tier.name, servers)


def _copies(case: ErasureCase) -> Iterator[Open]:
    """Every acknowledged pod erases its copies; files of an ended one by a pod that uses their folder."""
    for witness, pod in case.pods:
        match pod.standing:
            case Standing.ACKED:
                yield from _own_copies(case, witness, pod)
                yield from _engine(case, witness, pod)
            case Standing.ENDED:
                yield from _files(witness, pod)
            case Standing.FENCED:
                why = f"pod {witness.name} reuses nothing any more, but it and its copies cannot be reached"
                yield Open(R.COPY_UNREACHABLE, why, blocked=True)


def _looks(case: ErasureCase) -> Iterator[Open]:
    """Every tier is read after all deletions, over an unchanged slot map."""
    for tier in evidence.tiers_at_hand(case.erasure):
        servers, look = case.seen.tiers.get(tier.name, UNKNOWN), case.erasure.only(Look, tier.name)
        if not servers.reachable:
            yield _away(tier.name, servers)
        elif look and look.slots_before != look.slots_after:
            why = f"slots of CacheTier {tier.name} moved meanwhile: it is looked at again"
            yield Open(R.SLOT_MAP_CHANGED, why, VerifyTier(tier.name))
        elif not (look and evidence.counts(case.erasure, look) and set(look.left) == set(servers.primaries)):
            yield Open(R.VERIFYING, f"every primary of CacheTier {tier.name} is looked at", VerifyTier(tier.name))


def _probes(case: ErasureCase) -> Iterator[Open]:
    """Every acknowledged live pod is asked for keys that it could have read."""
    for witness, pod in case.pods:
        if pod.standing is not Standing.ACKED:
            continue
        if pod.probes is not None and pod.probes.missed < pod.probes.asked:
            yield Open(R.LATE_COPIES, f"pod {witness.name} still finds erased blocks", blocked=True)
        elif pod.probes is None or (pod.probes.known and not pod.probes.asked):
            answer = evidence.answer_of(case.erasure, witness.uid)
            yield _ask(case, witness, R.VERIFYING, AskPodToVerify(witness.uid, answer.round if answer else 0))


def _deletion(case: ErasureCase, tier: str, node: str, has_room: bool) -> Open | None:
    erasure, where = case.erasure, f"primary {node} of CacheTier {tier}"
    if evidence.last_whole(erasure, tier, node):
        return None
    newest = max(erasure.of(Deletion, tier, node), key=lambda one: one.round, default=None)
    counted = evidence.rounds(erasure, tier, node)
    emptied = [one for one in counted if evidence.is_whole(one)]
    reason: R | SharedReason = SharedReason.ERASING
    why = f"{where} is emptied"
    if newest is not None and newest.state is JobState.RUNNING:
        return Open(reason, f"{where} is being emptied")
    if len(emptied) >= MAX_ROUNDS:
        times = f"{where} was emptied {len(emptied)} times, and blocks were found there each time after"
        return Open(R.LATE_COPIES, f"{times}: look for a program that writes there", blocked=True)
    if newest is not None and newest in counted and newest not in emptied:
        problem = newest.problem or f"{newest.remaining.keys} keys are left, or a replica is behind"
        why = f"{where}: {problem}; tried again"
        if newest.ended is not None and case.now < newest.ended + timedelta(seconds=BACKOFF_S):
            return Open(reason, why)
    elif emptied:
        reason, why = R.LATE_COPIES, f"{where} is emptied again"
    if not has_room:
        return Open(SharedReason.ERASING, f"{where} waits until fewer deletions run")
    return Open(reason, why, StartDeletion(tier, node, newest.round + 1 if newest is not None else 1))


def _own_copies(case: ErasureCase, witness: Witness, pod: PodFact) -> Iterator[Open]:
    answer = evidence.answer_of(case.erasure, witness.uid)
    turn = answer.round + 1 if answer else 1
    inherits = turn <= MAX_ROUNDS and not case.files_left.isdisjoint(witness.tiers)  # the last to answer finds none
    if all(tier.erased is not None and not tier.erased.remaining for tier in pod.tiers) and not inherits:
        return
    if turn > MAX_ROUNDS:
        yield Open(R.LATE_COPIES, f"pod {witness.name} erased {MAX_ROUNDS} times and still has something", blocked=True)
    else:
        order = AskPodToErase(witness.uid, turn, tuple(tier.name for tier in witness.tiers))
        yield _ask(case, witness, SharedReason.ERASING, order)


def _engine(case: ErasureCase, witness: Witness, pod: PodFact) -> Iterator[Open]:
    """If ordered, the engine of an acknowledged pod is reset."""
    is_due = pod.standing is Standing.ACKED and pod.engine_reset is None
    if case.facts.subject.hbm is not Hbm.RESET_ENGINE or not is_due:
        return
    if case.erasure.only(EngineKept, witness.uid) is not None:
        why = f"the engine of pod {witness.name} cannot empty its prefix cache: the pod has to end"
        yield Open(R.ENGINE_NOT_RESET, why, blocked=True)
    else:
        yield _ask(case, witness, SharedReason.ERASING, ResetEngine(witness.uid))


def _files(witness: Witness, pod: PodFact) -> Iterator[Open]:
    for held, tier in zip(witness.tiers, pod.tiers, strict=True):
        if tier.outlives_pod and (tier.erased is None or tier.erased.remaining):
            left = f"files of pod {witness.name} on CacheTier {tier.tier} stayed on its node"
            where = f" ({held.place})" if held.place else ""
            yield Open(R.COPY_UNREACHABLE, f"{left}{where}, and no other pod erased them", blocked=True)


def _ask(case: ErasureCase, witness: Witness, reason: R | SharedReason, order: Order) -> Open:
    boots = case.seen.pods.get(witness.uid)
    if boots is None:
        why = f"pod {witness.name} acknowledged and cannot be asked any more: it has to end, or to come back"
        return Open(R.POD_GONE_MID_ERASE, why, blocked=True)
    if not evidence.has_acknowledged(case.erasure, witness.uid, boots):
        return Open(R.POD_GONE_MID_ERASE, f"pod {witness.name} restarted and has not acknowledged since")
    return Open(reason, f"pod {witness.name} was asked", order)


def _away(tier: str, servers: TierNow) -> Open:
    return Open(R.TIER_AWAY, f"CacheTier {tier} is waited for: {servers.message or 'its servers are not known'}")
