"""Evaluation of an erasure's facts: which answers count, and which are still missing.

An answer counts if it came from the processes that acknowledged, after the event that it has to follow. An answer that
came too early, or from a process that is gone, proves nothing: the operator asks again.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from kvstrata.contract.receipt.claims import WRITE_WINDOW_S, settles
from kvstrata.contract.receipt.facts import NOTHING
from kvstrata.contract.receipt.vocabulary import Standing
from kvstrata.model.erasure import facts
from kvstrata.model.erasure.record import Erasure, SharedTier


def witnesses(erasure: Erasure) -> tuple[facts.Witness, ...]:
    """Return every pod that may have used revoked blocks, and those that joined; empty before the epochs are rolled."""
    rolled = erasure.only(facts.Rolled)
    joined = {one.uid: one.joins for one in erasure.of(facts.PodSeen) if one.joins}
    return (*rolled.witnesses, *joined.values()) if rolled else ()


def emptied(erasure: Erasure, left: facts.HeldTier) -> bool:
    """Whether a pod found no file in all of a folder, when no witness wrote there any more."""
    there = [one.uid for one in witnesses(erasure) if left.place and left in one.tiers]
    return any(left.name in answer.folders for uid in there if (answer := answer_of(erasure, uid)) is not None)


def files_left(erasure: Erasure) -> frozenset[facts.HeldTier]:
    """Return tiers with folders where witnesses that ended may have left files."""
    gone = {one.uid for one in erasure.of(facts.PodSeen) if one.standing is Standing.ENDED}
    left = {held for one in witnesses(erasure) if one.uid in gone for held in one.tiers if held.place}
    return frozenset(held for held in left if not emptied(erasure, held))


def standing_of(erasure: Erasure, uid: str) -> facts.PodSeen | None:
    """Return the report about a witness that counts: that it ended, else that it acknowledged, else that it is fenced.
    Among acknowledgements, one of the processes that erased comes first, then the newest."""
    seen = erasure.of(facts.PodSeen, uid)
    for wanted in (Standing.ENDED, Standing.ACKED, Standing.FENCED):
        if found := [one for one in seen if one.standing is wanted and _settles(erasure, one)]:
            answers = {one.boots for one in erasure.of(facts.PodErased, uid)}
            return max(found, key=lambda one: (one.boots in answers, one.at, one.key))
    return None


def has_acknowledged(erasure: Erasure, uid: str, boots: tuple[str, str]) -> bool:
    return any(_settles(erasure, one) for one in erasure.of(facts.PodSeen, uid, Standing.ACKED, *boots))


def unreachable_at(erasure: Erasure) -> datetime | None:
    """Return the time since which no witness reuses anything; None while one may. A pod stays settled from its first
    such report: a cache server that restarts reads bundles without the epoch."""
    rolled = erasure.only(facts.Rolled)
    if rolled is None:
        return None
    moments = [rolled.at]
    for witness in rolled.witnesses:
        settled = [one for one in erasure.of(facts.PodSeen, witness.uid) if _settles(erasure, one)]
        if not settled:
            return None
        moments.append(min(moment(one.fence.waited_until) if one.fence is not None else one.at for one in settled))
    return max(moments)


def window_ends(erasure: Erasure) -> datetime | None:
    """Return the time after which no write that had begun can still arrive in a shared tier."""
    since = unreachable_at(erasure)
    return since + timedelta(seconds=WRITE_WINDOW_S) if since else None


def keys_kept(erasure: Erasure) -> tuple[str, ...]:
    rolled = erasure.only(facts.Rolled)
    gone = {one.fingerprint for one in erasure.of(facts.KeyRemoved)}
    return tuple(key.fingerprint for key in (rolled.keys if rolled else ()) if key.fingerprint not in gone)


def tiers_meant(erasure: Erasure) -> tuple[SharedTier, ...]:
    """Return the tiers of the order that may have held something."""
    unused = {one.tier for one in erasure.of(facts.TierLost) if one.unused}
    return tuple(tier for tier in erasure.order.tiers if tier.name not in unused)


def tiers_at_hand(erasure: Erasure) -> tuple[SharedTier, ...]:
    lost = {one.tier for one in erasure.of(facts.TierLost) if not one.server}
    return tuple(tier for tier in erasure.order.tiers if tier.name not in lost)


def rounds(erasure: Erasure, tier: str, node: str) -> tuple[facts.Deletion, ...]:
    """Return the deletions from one primary that began after the last possible write; oldest first."""
    end = window_ends(erasure)
    counting = (one for one in erasure.of(facts.Deletion, tier, node) if end and one.began >= end)
    return tuple(sorted(counting, key=lambda one: one.round))


def is_whole(deletion: facts.Deletion) -> bool:
    emptied = deletion.state is facts.JobState.DONE and deletion.remaining == NOTHING
    return emptied and deletion.replicas_in_step == deletion.replicas


def last_whole(erasure: Erasure, tier: str, node: str) -> facts.Deletion | None:
    """Return the last deletion that left a primary empty; None if a later look found data there."""
    found = next((one for one in reversed(rounds(erasure, tier, node)) if is_whole(one)), None)
    look = erasure.only(facts.Look, tier)
    if found is None or found.ended is None:
        return None
    late = look is not None and look.began >= found.ended and look.left.get(node, NOTHING) != NOTHING
    return None if late else found


def found_again(erasure: Erasure, tier: str) -> bool:
    look = erasure.only(facts.Look, tier)
    return look is not None and any(left != NOTHING for left in look.left.values())


def answer_of(erasure: Erasure, uid: str) -> facts.PodErased | None:
    """Return a witness's newest answer to the erase order from processes that had acknowledged."""
    answers = erasure.of(facts.PodErased, uid)
    counting = [one for one in answers if has_acknowledged(erasure, uid, one.boots) and _after_ack(erasure, one)]
    return max(counting, key=lambda one: (one.round, one.at, one.key), default=None)


def erased_at(erasure: Erasure) -> datetime | None:
    """Return when the last copy was deleted; None if none was."""
    moments = [one.ended for one in erasure.of(facts.Deletion) if one.state is facts.JobState.DONE and one.ended]
    moments += [one.at for one in erasure.of(facts.PodErased)]
    return max(moments, default=None)


def counts(erasure: Erasure, look: facts.Look) -> bool:
    """Whether a look counts: it began after all deletions, and slots did not move during it."""
    since = erased_at(erasure)
    return since is not None and look.began >= since and look.slots_before == look.slots_after


def probe_of(erasure: Erasure, uid: str) -> facts.PodProbed | None:
    """Return a witness's newest probe after all deletions, by processes that had acknowledged."""
    since = erased_at(erasure) or unreachable_at(erasure)
    if since is None:
        return None
    probes = [one for one in erasure.of(facts.PodProbed, uid) if one.at >= since]
    counting = [one for one in probes if has_acknowledged(erasure, uid, one.boots)]
    return max(counting, key=lambda one: (one.at, one.key), default=None)


def last_moment(erasure: Erasure) -> datetime:
    looks = [look.ended for look in erasure.of(facts.Look)]
    probes = [probe.at for probe in erasure.of(facts.PodProbed)]
    removed = [moment(one.by.at) for one in erasure.of(facts.KeyRemoved)]
    known = (erased_at(erasure), window_ends(erasure), *looks, *probes, *removed)
    return max((known_at for known_at in known if known_at), default=erasure.order.started)


def _after_ack(erasure: Erasure, answer: facts.PodErased) -> bool:
    acks = [one.at for one in erasure.of(facts.PodSeen, answer.uid) if one.boots == answer.boots]
    return bool(acks) and answer.at >= min(acks)


def _settles(erasure: Erasure, seen: facts.PodSeen) -> bool:
    """Whether a report settles its witness, by the rules of receipts: the revision reached, the fence waited out."""
    rolled = erasure.only(facts.Rolled)
    witness = next((one for one in witnesses(erasure) if one.uid == seen.uid), None)
    if rolled is None or witness is None:
        return False
    needed = next((target.revision for target in rolled.targets if target.model == witness.model), None)
    return settles(seen.standing, seen.boots, seen.revision, needed, seen.fence)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
