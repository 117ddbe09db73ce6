"""Claims that follow from facts. A receipt may claim less, never more."""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.contract.receipt.facts import NOTHING, Erasure, Fence, KeyFact, NodeFact, PodFact, PodTier, TierFact
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import (
    Hbm,
    KeyCustody,
    Mode,
    Party,
    PodMedium,
    RevokedKind,
    ScopeForm,
    Standing,
    moment_in_s,
)

WRITE_WINDOW_S = 30
"""After this no write that had begun under a revoked keyspace can still arrive in a shared tier."""


def claims(erasure: Erasure) -> tuple[ReceiptClaim, ...]:
    """Return the claims that the facts prove, in the order in which an erasure reaches them.

    Each needs Unreachable, KeysDestroyed needs KeysRevoked, and Verified needs Erased. An empty list proves nothing:
    without a key listed none is revoked, and without a tier none is erased.
    """
    denied = {claim for item in erasure.residue for claim in item.kind.denies}
    denied |= {claim for kind in required_residue(erasure) for claim in kind.denies}
    held: list[ReceiptClaim] = []
    for claim, needs, proven in (
        (ReceiptClaim.UNREACHABLE, None, _unreachable),
        (ReceiptClaim.KEYS_REVOKED, ReceiptClaim.UNREACHABLE, _keys_revoked),
        (ReceiptClaim.KEYS_DESTROYED, ReceiptClaim.KEYS_REVOKED, _keys_destroyed),
        (ReceiptClaim.ERASED, ReceiptClaim.UNREACHABLE, _erased),
        (ReceiptClaim.VERIFIED, ReceiptClaim.ERASED, _verified),
    ):
        if claim not in denied and (needs is None or needs in held) and proven(erasure):
            held.append(claim)
    return tuple(held)


def required_residue(erasure: Erasure) -> frozenset[Residue]:
    """Return the residue that the facts themselves show: a receipt that omits one of these is refused."""
    return frozenset(_shown(erasure))


def contradiction(erasure: Erasure) -> str | None:
    """Return why the facts contradict each other or name forbidden values; None if they do neither."""
    subject = erasure.subject
    written = {subject.scope_name} if subject.scope is ScopeForm.TENANT else set(subject.tenants)
    if any(one.kind is RevokedKind.TENANT and one.name not in {None, *written} for one in erasure.revoked):
        return "it names a tenant that its order does not name"
    for rows, what in (
        ([pod.uid for pod in erasure.pods], "pod"),
        ([tier.tier for tier in erasure.tiers], "tier"),
        ([target.model for target in erasure.targets], "model"),
        ([one.old for one in erasure.revoked], "revoked scope"),
        ([key.fingerprint for key in erasure.keys], "data key"),
        ([(tier.tier, node.node) for tier in erasure.tiers for node in tier.nodes], "server"),
    ):
        if len(set(rows)) != len(rows):
            return f"it lists a {what} twice"
    if any(key.custody is KeyCustody.SECRET and key.destroyed for key in erasure.keys):
        return "it claims that no copy of a key in a Secret exists"
    if any(key.revoked not in {one.old for one in erasure.revoked} for key in erasure.keys):
        return "it lists a data key of something that was not revoked"
    for tier in erasure.tiers:
        for node in tier.nodes:
            if node.deleted.keys > node.found.keys or node.replicas_in_step > node.replicas:
                return f"server {node.node} deleted or confirmed more than there was"
    for pod in erasure.pods:
        if pod.probes and not pod.probes.missed <= pod.probes.asked <= pod.probes.known:
            return f"pod {pod.uid} answered for more keys than it was asked for"
        if any(one.erased and one.erased.erased > one.erased.found for one in pod.tiers):
            return f"pod {pod.uid} erased more than it found"
    return None


def _shown(erasure: Erasure) -> Iterator[Residue]:
    if any(key.custody is KeyCustody.SECRET for key in erasure.keys):
        yield from (Residue.ETCD_HISTORY, Residue.ETCD_BACKUPS)
    if any(not _removed(key) for key in erasure.keys):
        yield Residue.KEY_KEPT
    if any(not _settled(erasure, pod) for pod in erasure.pods):
        yield Residue.POD_OPEN
    if any(pod.standing is Standing.FENCED for pod in erasure.pods):
        yield Residue.POD_UNREACHABLE
    acked = [pod for pod in erasure.pods if pod.standing is Standing.ACKED]
    if any(pod.engine_reset is None for pod in acked) or (acked and erasure.subject.hbm is Hbm.ROLL_SCOPES):
        yield Residue.ENGINE_MEMORY
    if erasure.subject.mode is Mode.LAZY:
        yield Residue.LEFT_TO_AGE
        return
    if any(files_left(pod, tier) for pod in erasure.pods for tier in pod.tiers):
        yield Residue.COPY_UNREACHABLE
    if any(len(tier.nodes) < tier.primaries for tier in erasure.tiers):
        yield Residue.SERVER_UNREACHABLE
    if any(_remain(erasure)):
        yield Residue.KEYS_REMAIN
    if any(_freed_in_clear(erasure)):
        yield Residue.FREED_STORAGE


def files_left(pod: PodFact, tier: PodTier) -> bool:
    """Whether an ended pod left files of a tier that were not erased."""
    return pod.standing is Standing.ENDED and tier.outlives_pod and tier.erased is None


def _remain(erasure: Erasure) -> Iterator[bool]:
    for tier in erasure.tiers:
        for node in tier.nodes:
            yield node.remaining != NOTHING or node.left not in (None, NOTHING)
    for pod in erasure.pods:
        yield from (one.erased is not None and one.erased.remaining > 0 for one in pod.tiers)


def _freed_in_clear(erasure: Erasure) -> Iterator[bool]:
    for tier in erasure.tiers:
        yield not tier.encrypted and any(node.deleted.keys for node in tier.nodes)
    for pod in erasure.pods:
        for one in pod.tiers:
            # A pod overwrites memory that it frees.
            files = one.medium is PodMedium.NVME and not one.encrypted
            gone = pod.standing is Standing.ENDED and not one.outlives_pod
            yield files and (gone or (one.erased is not None and one.erased.erased > 0))


def settles(standing: Standing, boots: tuple[str, str], revision: int, needed: int | None, fence: Fence | None) -> bool:
    """Whether a pod reuses nothing of it any more: it acknowledged the `needed` revision, it ended, or it was waited
    for until its own clock fenced it off. `boots` are of its gate and cache server."""
    if standing is Standing.ACKED:
        return all(boots) and needed is not None and revision >= needed
    if standing is Standing.FENCED and fence is not None:
        waited_s = moment_in_s(fence.waited_until) - moment_in_s(fence.last_fresh)
        return waited_s >= fence.stale_after_s + fence.drain_timeout_s
    return standing is Standing.ENDED


def _settled(erasure: Erasure, pod: PodFact) -> bool:
    needed = next((target.revision for target in erasure.targets if target.model == pod.model), None)
    reported = pod.at is not None or pod.standing is Standing.FENCED
    return reported and settles(pod.standing, (pod.gate_boot, pod.cache_boot), pod.revision, needed, pod.fence)


def _unreachable(erasure: Erasure) -> bool:
    return bool(erasure.revoked) and all(_settled(erasure, pod) for pod in erasure.pods)


def _removed(key: KeyFact) -> bool:
    return key.removed is not None and key.removed.by in (Party.OPERATOR, Party.CUSTODY)


def _keys_revoked(erasure: Erasure) -> bool:
    return bool(erasure.keys) and all(map(_removed, erasure.keys))


def _keys_destroyed(erasure: Erasure) -> bool:
    return all(map(_destroyed, erasure.keys))


def _destroyed(key: KeyFact) -> bool:
    """Whether a custody that can know confirmed it: a KMS of its own key."""
    return key.custody is KeyCustody.KMS and key.destroyed is not None and key.destroyed.by is Party.CUSTODY


def _erased(erasure: Erasure) -> bool:
    inside = [one for pod in erasure.pods for one in pod.tiers if pod.standing is Standing.ACKED or one.outlives_pod]
    if erasure.subject.mode is not Mode.EAGER or not (erasure.tiers or inside):
        return False
    emptied = all(one.erased is not None and one.erased.remaining == 0 for one in inside)
    return emptied and all(map(_tier_erased, erasure.tiers))


def _tier_erased(tier: TierFact) -> bool:
    complete = len(tier.nodes) == tier.primaries > 0 and tier.waited_s >= WRITE_WINDOW_S
    return complete and all(map(_node_erased, tier.nodes))


def _node_erased(node: NodeFact) -> bool:
    return node.erased is not None and node.remaining == NOTHING and node.replicas_in_step == node.replicas


def _verified(erasure: Erasure) -> bool:
    look = erasure.verification
    if look is None or look.by.by is not Party.OPERATOR:
        return False
    nodes = [node for tier in erasure.tiers for node in tier.nodes]
    if any(node.erased is None or node.erased.name == look.by.name for node in nodes):
        return False
    slots_unchanged = all(tier.slots_before and tier.slots_before == tier.slots_after for tier in erasure.tiers)
    empty = all(node.left == NOTHING for node in nodes)
    return slots_unchanged and empty and _probed(erasure, found=any(node.found.keys for node in nodes))


def _probed(erasure: Erasure, found: bool) -> bool:
    """Whether every pod that speaks was asked and missed; where something was found, some key was known to ask for."""
    asked = [pod.probes for pod in erasure.pods if pod.standing is Standing.ACKED]
    if not asked:
        return True
    missed = all(one is not None and one.missed == one.asked and (one.asked > 0 or one.known == 0) for one in asked)
    return missed and (not found or any(one is not None and one.asked for one in asked))
