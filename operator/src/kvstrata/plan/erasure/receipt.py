"""The facts of an erasure as its receipt states them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt import facts as rows
from kvstrata.contract.receipt.claims import files_left, required_residue
from kvstrata.contract.receipt.residue import Residue, ResidueItem
from kvstrata.contract.receipt.vocabulary import Party, Standing
from kvstrata.contract.wire import MAX_CLOSED_TEXT
from kvstrata.model.erasure import evidence, facts
from kvstrata.model.erasure.record import Erasure, SharedTier


def facts_of(erasure: Erasure) -> rows.Erasure:
    """Return the facts as in a receipt; final once there is a verdict."""
    rolled, verdict = erasure.only(facts.Rolled), erasure.only(facts.Verdict)
    keys = tuple(_keys(erasure))
    subject = erasure.order.subject
    if verdict is not None and verdict.abandoned:
        reasons = [subject.reason, f"abandoned: {verdict.abandoned}"]
        subject = replace(subject, reason="; ".join(filter(None, reasons))[:MAX_CLOSED_TEXT])
    verification = _verification(erasure)
    receipt = rows.Erasure(
        subject=subject,
        revoked=rolled.revoked if rolled else (),
        targets=rolled.targets if rolled else (),
        pods=tuple(_pod(erasure, witness) for witness in evidence.witnesses(erasure)),
        keys=keys,
        tiers=tuple(_tier(erasure, tier) for tier in evidence.tiers_meant(erasure)),
        verification=verification,
        residue=(),
        timings=rows.Timings(
            started=format_timestamp(erasure.order.started),
            rolled=_text(rolled.at if rolled else None),
            unreachable=_text(evidence.unreachable_at(erasure)),
            keys_revoked=_keys_revoked(keys),
            erased=_text(evidence.erased_at(erasure)),
            verified=verification.by.at if verification else None,
            issued=format_timestamp(verdict.at if verdict else evidence.last_moment(erasure)),
        ),
        versions=_versions(erasure),
    )
    return replace(receipt, residue=_residue(erasure, receipt))


def _residue(erasure: Erasure, receipt: rows.Erasure) -> tuple[ResidueItem, ...]:
    order = erasure.order
    items = set(_files_left(erasure, receipt))
    items |= {ResidueItem(kind, "", 0) for kind in required_residue(receipt) - {item.kind for item in items}}
    items |= {ResidueItem(Residue.SHARED_SCOPE_EXCLUDED, name, 1) for name in order.excluded_scopes}
    items |= {ResidueItem(Residue.TIER_EXCLUDED, name, 0) for name in order.excluded_tiers}
    items |= {ResidueItem(Residue.UNSEEN_FOLDERS, name, 0) for name in order.folders}
    for tier in receipt.tiers if order.chunks else ():
        look = erasure.only(facts.Look, tier.tier)
        if (others := look.others if look and evidence.counts(erasure, look) else None) != 0:
            items.add(ResidueItem(Residue.CONTINUATIONS, tier.tier, others or 0))
    lost = [one for one in erasure.of(facts.TierLost) if not one.unused]
    servers = Counter(one.tier for one in lost if one.server)
    items |= {ResidueItem(Residue.TIER_LOST, tier, servers[tier]) for tier in {one.tier for one in lost}}
    verdict = erasure.only(facts.Verdict)
    if verdict is not None:
        items |= set(_owed(erasure))
        if verdict.abandoned:
            items.add(ResidueItem(Residue.ABANDONED, "", 0))
    return tuple(sorted(items, key=lambda item: (str(item.kind), item.about)))


def _files_left(erasure: Erasure, receipt: rows.Erasure) -> Iterator[ResidueItem]:
    """Yield the places with files of ended pods, and the number of these pods."""
    left = Counter(
        held.place
        for witness, pod in zip(evidence.witnesses(erasure), receipt.pods, strict=True)
        for held, tier in zip(witness.tiers, pod.tiers, strict=True)
        if held.place and files_left(pod, tier)
    )
    yield from (ResidueItem(Residue.COPY_UNREACHABLE, place[:256], pods) for place, pods in left.items())


def _versions(erasure: Erasure) -> tuple[rows.Component, ...]:
    """Return the versions at the beginning, the number of tiers on each version of servers, and images of Jobs."""
    servers = Counter((one.software, one.version) for one in erasure.of(facts.ServersSeen))
    tiers = (rows.Component(f"tiers on {software}", version, n) for (software, version), n in sorted(servers.items()))
    ran = {(one.tier, one.image, one.job) for one in erasure.of(facts.Deletion) if one.image}
    jobs = (
        rows.Component(f"{rows.IMAGE_OF}{Party.JOB} of {CacheTier.INFO.kind} {tier}", image, n)
        for (tier, image), n in sorted(Counter(row[:2] for row in ran).items())
    )
    return (*erasure.order.versions, *tiers, *jobs)


def _owed(erasure: Erasure) -> Iterator[ResidueItem]:
    unanswered: dict[str, int] = {}
    for witness in evidence.witnesses(erasure):
        acked = _seen(erasure, witness.uid).standing is Standing.ACKED
        if acked and evidence.answer_of(erasure, witness.uid) is None:
            unanswered[witness.model] = unanswered.get(witness.model, 0) + len(witness.tiers)
    yield from (ResidueItem(Residue.COPY_UNREACHABLE, model, copies) for model, copies in unanswered.items() if copies)
    tried = {one.tier for one in erasure.of(facts.Deletion) if evidence.rounds(erasure, one.tier, one.node)}
    for tier in evidence.tiers_at_hand(erasure):
        if tier.name not in tried:
            yield ResidueItem(Residue.SERVER_UNREACHABLE, tier.name, 0)


def _seen(erasure: Erasure, uid: str) -> facts.PodSeen:
    """Return the report about a witness that counts; it is open without one."""
    return evidence.standing_of(erasure, uid) or facts.PodSeen(uid, Standing.OPEN, erasure.order.started)


def _pod(erasure: Erasure, witness: facts.Witness) -> rows.PodFact:
    seen, probe = _seen(erasure, witness.uid), evidence.probe_of(erasure, witness.uid)
    acked = seen.standing is Standing.ACKED
    reset = erasure.only(facts.EngineReset, witness.uid)
    return rows.PodFact(
        model=witness.model,
        uid=witness.uid,
        standing=seen.standing,
        gate_boot=seen.gate_boot if acked else "",
        cache_boot=seen.cache_boot if acked else "",
        revision=seen.revision if acked else 0,
        at=_text(seen.at) if acked or seen.standing is Standing.ENDED else None,
        fence=seen.fence,
        tiers=tuple(
            rows.PodTier(tier.name, tier.medium, tier.encrypted, tier.outlives_pod, _copies(erasure, witness, tier))
            for tier in witness.tiers
        ),
        engine_reset=_text(reset.at if reset else None),
        probes=rows.Probes(probe.known, probe.asked, probe.missed) if probe and acked else None,
    )


def _copies(erasure: Erasure, witness: facts.Witness, tier: facts.HeldTier) -> rows.Copies | None:
    newest = evidence.answer_of(erasure, witness.uid)
    if newest is None or tier.name not in newest.copies:
        is_ended = _seen(erasure, witness.uid).standing is Standing.ENDED
        return rows.Copies(0, 0, 0, 0) if is_ended and evidence.emptied(erasure, tier) else None
    last = newest.copies[tier.name]
    # A cache server counts everything that it erased since its start.
    former = {one.cache_boot: one for one in erasure.of(facts.PodErased, witness.uid)}
    del former[newest.cache_boot]
    before = [one.copies[tier.name] for one in former.values() if tier.name in one.copies]
    earlier, erased_bytes = sum(one.erased for one in before), sum(one.bytes for one in before)
    probe = erasure.only(facts.PodProbed, newest.uid, str(newest.round))
    left = max(last.remaining, 1) if probe is not None and probe.missed < probe.asked else last.remaining
    if left and not tier.outlives_pod and _seen(erasure, witness.uid).standing is Standing.ENDED:
        return None  # its memory ended with it
    return rows.Copies(earlier + last.found, earlier + last.erased, left, erased_bytes + last.bytes)


def _keys(erasure: Erasure) -> Iterator[rows.KeyFact]:
    rolled = erasure.only(facts.Rolled)
    removed = {one.fingerprint: one.by for one in erasure.of(facts.KeyRemoved)}
    destroyed = {one.fingerprint: one.by for one in erasure.of(facts.KeyDestroyed)}
    for key in rolled.keys if rolled else ():
        name = key.fingerprint
        yield rows.KeyFact(name, key.revoked, key.custody, removed.get(name), destroyed.get(name))


def _keys_revoked(keys: Iterable[rows.KeyFact]) -> str | None:
    removed = [key.removed for key in keys]
    return None if None in removed else max((word.at for word in removed if word), default=None)


def _done(erasure: Erasure, tier: str) -> dict[str, list[facts.Deletion]]:
    """Return the finished deletions that count, oldest first, by primary."""
    nodes = sorted({one.node for one in erasure.of(facts.Deletion, tier)})
    counting = {node: evidence.rounds(erasure, tier, node) for node in nodes}
    return {node: [one for one in own if one.state is facts.JobState.DONE] for node, own in counting.items()}


def _tier(erasure: Erasure, tier: SharedTier) -> rows.TierFact:
    """Return a tier's row. Its primaries are those of the last look, else those of the deletions. Deletions from a
    former primary are counted by its successor, because tombstones are replicated; without a successor they are in no
    row."""
    look = erasure.only(facts.Look, tier.name)
    look = look if look and evidence.counts(erasure, look) else None
    done = _done(erasure, tier.name)
    newest = [own[-1] for own in done.values() if own]
    since = evidence.unreachable_at(erasure)
    nodes = sorted(look.left) if look else [one.node for one in newest]
    waits = [(one.began - since).total_seconds() for one in newest if since and one.node in nodes]
    return rows.TierFact(
        tier=tier.name,
        encrypted=tier.encrypted,
        primaries=look.primaries if look else max((one.primaries for one in newest), default=0),
        waited_s=int(max(0.0, min(waits, default=0.0))),
        slots_before=look.slots_before if look else None,
        slots_after=look.slots_after if look else None,
        nodes=tuple(_node(node, done.get(node, []), look) for node in nodes),
    )


def _node(node: str, done: list[facts.Deletion], look: facts.Look | None) -> rows.NodeFact:
    left = look.left.get(node) if look else None
    if not done:
        return rows.NodeFact(node, rows.NOTHING, rows.NOTHING, rows.NOTHING, 0, 0, None, left)
    *before, last = done
    earlier = sum((one.deleted for one in before), rows.NOTHING)
    return rows.NodeFact(
        node=node,
        found=earlier + last.found,
        deleted=earlier + last.deleted,
        remaining=last.remaining,
        replicas=last.replicas,
        replicas_in_step=last.replicas_in_step,
        erased=rows.Statement(Party.JOB, last.job, _text(last.ended) or ""),
        left=left,
    )


def _verification(erasure: Erasure) -> rows.Verification | None:
    looks = [look for tier in evidence.tiers_at_hand(erasure) if (look := erasure.only(facts.Look, tier.name))]
    since = evidence.erased_at(erasure)
    acked = [one.uid for one in evidence.witnesses(erasure) if _seen(erasure, one.uid).standing is Standing.ACKED]
    probes = [probe for uid in acked if (probe := evidence.probe_of(erasure, uid))]
    if (
        since is None
        or len(looks) < len(evidence.tiers_meant(erasure))
        or len(probes) < len(acked)
        or not (looks or probes)
    ):
        return None
    if not all(evidence.counts(erasure, look) for look in looks):
        return None
    over = max([look.ended for look in looks] + [probe.at for probe in probes])
    began = min([look.began for look in looks] + [probe.at for probe in probes])
    by = max(((look.began, look.by) for look in looks), default=(began, "operator"))[1]
    return rows.Verification(rows.Statement(Party.OPERATOR, by, format_timestamp(over)), format_timestamp(began))


def _text(at: datetime | None) -> str | None:
    return format_timestamp(at) if at is not None else None
