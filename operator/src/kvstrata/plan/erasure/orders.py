"""Outstanding work of an erasure: possible orders, what is waited for, and what no order can change.

An order names its round. A repeated one is answered with the first result, so it does no harm and loses no count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.contract.receipt.facts import Erasure as ReceiptFacts
from kvstrata.contract.receipt.vocabulary import Hbm, Standing
from kvstrata.model.erasure.evidence import (
    answer_of,
    cannot_reset,
    counts,
    files_left,
    has_acknowledged,
    is_empty,
    is_reset,
    is_whole,
    last_whole,
    look_at,
    next_round,
    probe_of,
    rounds,
    standing_of,
    tiers_at_hand,
    witnesses,
)
from kvstrata.model.erasure.facts import Deletion, JobState, Witness
from kvstrata.model.erasure.record import Erasure, Observed
from kvstrata.plan.actions import Decision

MAX_DELETIONS_AT_ONCE = 4
"""Concurrent Jobs of all erasures: deletions slow down serving servers."""

MAX_ROUNDS = 3
"""Attempts to empty a server or pod before returning data is reported as a fault."""

BACKOFF_S = 10


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
    """Ask a pod to erase these tiers: its own, or files of `heir_of`, a pod that is gone."""

    uid: str
    round: int
    tiers: tuple[str, ...]
    heir_of: str = ""


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
class Outstanding:
    """`waiting` is why others are waited for, `blocked_by` what no order can change."""

    orders: tuple[Order | StartDeletion, ...] = ()
    waiting: tuple[Decision, ...] = ()
    blocked_by: tuple[Decision, ...] = ()

    def __add__(self, other: Outstanding) -> Outstanding:
        return Outstanding(self.orders + other.orders, self.waiting + other.waiting, self.blocked_by + other.blocked_by)


def names(of: Iterable[str]) -> str:
    listed = sorted(of)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def deletions_owed(erasure: Erasure, seen: Observed, now: datetime) -> Outstanding:
    """Every present primary of the tiers must be emptied after the last write."""
    running = [one for one in erasure.of(Deletion) if one.state is JobState.RUNNING and _is_newest(erasure, one)]
    room = MAX_DELETIONS_AT_ONCE - seen.deletions_elsewhere - len(running)
    outstanding = Outstanding()
    for tier in tiers_at_hand(erasure):
        servers = seen.tiers.get(tier.name)
        if servers is None or not servers.reachable:
            known = servers.primaries if servers is not None else ()
            if not known or any(not last_whole(erasure, tier.name, node) for node in known):
                outstanding += Outstanding(waiting=(_away(tier.name, servers.message if servers else ""),))
            continue
        for node in servers.primaries:
            one = _deletion(erasure, tier.name, node, now, room > 0)
            room -= len(one.orders)
            outstanding += one
    return outstanding


def pods_owed(erasure: Erasure, seen: Observed) -> Outstanding:
    """Every acknowledged witness erases what it holds; files of an ended one are erased by the pod that took them
    over."""
    outstanding = Outstanding()
    for witness in witnesses(erasure):
        word = standing_of(erasure, witness.uid)
        match word.standing if word else Standing.OPEN:
            case Standing.ACKED:
                outstanding += _own_copies(erasure, seen, witness) + reset_owed(erasure, seen, witness)
            case Standing.ENDED:
                outstanding += _files(erasure, seen, witness)
            case Standing.FENCED:
                why = f"pod {witness.name} reuses nothing any more, but it and what it holds cannot be reached"
                outstanding += Outstanding(blocked_by=(Decision(R.COPY_UNREACHABLE, why),))
    return outstanding


def reset_owed(erasure: Erasure, seen: Observed, witness: Witness) -> Outstanding:
    """If ordered, the engine of every acknowledged pod is reset."""
    if erasure.order.subject.hbm is not Hbm.RESET_ENGINE or is_reset(erasure, witness.uid):
        return Outstanding()
    if cannot_reset(erasure, witness.uid):
        why = f"the engine of pod {witness.name} cannot empty its prefix cache: the pod has to end"
        return Outstanding(blocked_by=(Decision(R.ENGINE_NOT_RESET, why),))
    return _ask(erasure, seen, witness, ResetEngine(witness.uid))


def tiers_to_look_at(erasure: Erasure, seen: Observed) -> Outstanding:
    """Every tier is read after all deletions, over an unchanged slot map."""
    outstanding = Outstanding()
    for tier in tiers_at_hand(erasure):
        servers, look = seen.tiers.get(tier.name), look_at(erasure, tier.name)
        if servers is None or not servers.reachable:
            outstanding += Outstanding(waiting=(_away(tier.name, servers.message if servers else ""),))
            continue
        if look and counts(erasure, look) and set(look.left) == set(servers.primaries):
            continue
        why = Decision(R.VERIFYING, f"every primary of CacheTier {tier.name} is looked at")
        if look and look.slots_before != look.slots_after:
            why = Decision(R.SLOT_MAP_CHANGED, f"slots of CacheTier {tier.name} moved meanwhile: it is looked at again")
        outstanding += Outstanding((VerifyTier(tier.name),), (why,))
    return outstanding


def probes_owed(erasure: Erasure, seen: Observed) -> Outstanding:
    """Every acknowledged live pod is asked for keys that it could have read."""
    outstanding = Outstanding()
    for witness in witnesses(erasure):
        word = standing_of(erasure, witness.uid)
        if word is None or word.standing is not Standing.ACKED:
            continue
        probe, answer = probe_of(erasure, witness.uid), answer_of(erasure, witness.uid)
        if probe is not None and probe.missed < probe.asked:
            why = f"pod {witness.name} still finds what it should miss"
            outstanding += Outstanding(blocked_by=(Decision(R.LATE_COPIES, why),))
        elif probe is None or (probe.known and not probe.asked):
            outstanding += _ask(erasure, seen, witness, AskPodToVerify(witness.uid, answer.round if answer else 0))
    return outstanding


def _deletion(erasure: Erasure, tier: str, node: str, now: datetime, has_room: bool) -> Outstanding:
    if last_whole(erasure, tier, node):
        return Outstanding()
    where = f"primary {node} of CacheTier {tier}"
    newest = max(
        (one for one in erasure.of(Deletion) if (one.tier, one.node) == (tier, node)), key=_round, default=None
    )
    if newest is not None and newest.state is JobState.RUNNING:
        return Outstanding(waiting=(Decision(R.ERASING, f"{where} is being emptied"),))
    counted = rounds(erasure, tier, node)
    emptied = [one for one in counted if is_whole(one)]
    if len(emptied) >= MAX_ROUNDS:
        often = (
            f"{where} was emptied {len(emptied)} times, and something was found there each time after: see who writes"
        )
        return Outstanding(blocked_by=(Decision(R.LATE_COPIES, often),))
    if newest in counted and newest is not None and newest not in emptied:
        problem = newest.problem or f"{newest.remaining.keys + newest.over_bound} keys are left, or a replica is behind"
        why = Decision(R.ERASING, f"{where}: {problem}; tried again")
        if newest.ended is not None and now < newest.ended + timedelta(seconds=BACKOFF_S):
            return Outstanding(waiting=(why,))
    else:
        why = Decision(R.LATE_COPIES if emptied else R.ERASING, f"{where} is emptied{' again' if emptied else ''}")
    if not has_room:
        return Outstanding(waiting=(Decision(R.ERASING, f"{where} waits until fewer deletions run"),))
    return Outstanding((StartDeletion(tier, node, next_round(erasure, tier, node)),), (why,))


def _own_copies(erasure: Erasure, seen: Observed, witness: Witness) -> Outstanding:
    if is_empty(erasure, witness):
        return Outstanding()
    answer = answer_of(erasure, witness.uid)
    turn = answer.round + 1 if answer else 1
    if turn > MAX_ROUNDS:
        why = f"pod {witness.name} erased {MAX_ROUNDS} times and still has something"
        return Outstanding(blocked_by=(Decision(R.LATE_COPIES, why),))
    order = AskPodToErase(witness.uid, turn, tuple(tier.name for tier in witness.tiers))
    return _ask(erasure, seen, witness, order)


def _files(erasure: Erasure, seen: Observed, witness: Witness) -> Outstanding:
    outstanding = Outstanding()
    for tier in files_left(erasure, witness):
        heir = seen.heirs.get((witness.uid, tier.name), "")
        if heir in seen.pods:
            order = AskPodToErase(heir, 1, (tier.name,), heir_of=witness.uid)
            why = f"files of pod {witness.name} on CacheTier {tier.name} are erased by who took them over"
            outstanding += Outstanding((order,), (Decision(R.ERASING, why),))
        else:
            why = (
                f"files of pod {witness.name} on CacheTier {tier.name} stayed on its node or volume, which nobody uses"
            )
            outstanding += Outstanding(blocked_by=(Decision(R.COPY_UNREACHABLE, why),))
    return outstanding


def _ask(erasure: Erasure, seen: Observed, witness: Witness, order: Order) -> Outstanding:
    pod = seen.pods.get(witness.uid)
    if pod is None:
        why = f"pod {witness.name} acknowledged and cannot be asked any more: it has to end, or to come back"
        return Outstanding(blocked_by=(Decision(R.POD_GONE_MID_ERASE, why),))
    if not has_acknowledged(erasure, witness.uid, (pod.gate_boot, pod.cache_boot)):
        why = f"pod {witness.name} started anew and has not acknowledged since"
        return Outstanding(waiting=(Decision(R.POD_GONE_MID_ERASE, why),))
    return Outstanding(
        (order,),
        (Decision(R.VERIFYING if isinstance(order, AskPodToVerify) else R.ERASING, f"pod {witness.name} was asked"),),
    )


def _away(tier: str, message: str) -> Decision:
    return Decision(R.TIER_AWAY, f"CacheTier {tier} is waited for: {message or 'its servers are not known'}")


def _is_newest(erasure: Erasure, deletion: Deletion) -> bool:
    return deletion.round == next_round(erasure, deletion.tier, deletion.node) - 1


def _round(deletion: Deletion) -> int:
    return deletion.round
