"""Key custody: where a domain's data keys are kept, what a change of it means, and what may be said of a key's end.

A custody that a spec names holds for epochs that are drawn from then on. A key cannot move: where it was, copies of it
may be left, so what is cached under it would be called better kept than it is. Therefore a change of custody rolls
every epoch whose key is elsewhere, and the old keys end by the rules of the custody that they were in. As that empties
a whole domain's cache at once, a change is refused while there are keys; only a domain without any changes freely.

A receipt takes what this module makes of a custody's word, and derives its claims by its own rules
(`contract.receipt.claims`): the facts made here contradict none of them.

The custody in force is the one in the CacheDomain's status: it is written before the first key is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import DomainReason
from kvstrata.contract.policy.data_key import KeyReference
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind, derive_keyspace
from kvstrata.contract.receipt.facts import KeyFact, Word
from kvstrata.contract.receipt.residue import Claim, Residue
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.model.keys import Destruction, LetGo, Release, Revocation, Undestroyed
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.scopes import pool_scope

RESIDUE: Mapping[KeyCustody, tuple[Residue, ...]] = {
    KeyCustody.SECRET: (Residue.ETCD_HISTORY, Residue.ETCD_BACKUPS),
    KeyCustody.MEMORY: (),
    KeyCustody.KMS: (),
}
"""What each custody leaves of every key, whatever is done."""


@dataclass(frozen=True, slots=True)
class CustodyChange:
    """What naming another custody comes to: the epochs that have to be rolled, and why it is refused; empty if not."""

    rolls: frozenset[str] = frozenset()
    refusal: str = ""


def custody_of(domain: CacheDomain) -> KeyCustody:
    """Return where the domain's spec wants data keys to be kept."""
    return KeyCustody(str(domain.spec.effective_key_custody))


def in_force(domain: CacheDomain) -> KeyCustody:
    """Return where the domain's data keys are kept, and the next ones will be."""
    return KeyCustody(str(domain.status.key_custody or KeyCustody.SECRET))


def last_in_force(world: World) -> KeyCustody | None:
    """Return where the domain's data keys are kept, or were until it was deleted; None if nobody saw it."""
    return in_force(world.domain) if world.domain is not None else world.ending.custody


def change_to(wanted: KeyCustody, kept: Mapping[str, KeyCustody], namespace: str) -> CustodyChange:
    """Return what it means to keep keys in `wanted` where those of epochs are `kept` as they are."""
    elsewhere = {epoch: custody for epoch, custody in kept.items() if custody is not wanted}
    if not elsewhere:
        return CustodyChange()
    present = " and ".join(sorted({str(custody) for custody in elsewhere.values()}))
    back = present if KeyCustody.KMS not in elsewhere.values() else f"{present} with spec.kms as it was"
    count = f"{len(elsewhere)} data key{'s are' if len(elsewhere) > 1 else ' is'}"
    return CustodyChange(
        frozenset(elsewhere),
        f"spec.keyCustody cannot become {wanted} while {count} in custody {present}: a key cannot move, and to roll "
        f"all of their epochs would empty the cache of namespace {namespace}; set it back to {back}, or set up a "
        f"namespace with {wanted} and move tenants there",
    )


def to_adopt(world: World, domain: CacheDomain) -> KeyCustody | None:
    """Return the custody that the status is to name, because the spec does and there are no keys; None if it does."""
    wanted = custody_of(domain)
    return wanted if wanted is not in_force(domain) and not world.data_keys else None


def refused_change(world: World, domain: CacheDomain) -> Decision | None:
    """Return why the custody that the spec names cannot be, None if it is in force or will be."""
    refusal = change_to(custody_of(domain), dict.fromkeys(world.data_keys, in_force(domain)), world.namespace).refusal
    return Decision(DomainReason.KEY_CUSTODY_IN_USE, refusal) if refusal else None


def keys_at_hand(world: World, domain: CacheDomain, lost: int) -> tuple[Finding, ...]:
    """Return whether the operator has every key, nothing where they are in Secrets; of `lost` epochs nobody has one."""
    if in_force(domain) is KeyCustody.SECRET:
        return ()
    kind = ConditionType.KEYS_AT_HAND
    if world.keys_problem and in_force(domain) is KeyCustody.KMS:
        return (false(kind, DomainReason.KEY_CUSTODY_AWAY, world.keys_problem),)
    if world.keys_awaited:
        asked = "asked back from pods" if in_force(domain) is KeyCustody.MEMORY else "unwrapped"
        told = f"{len(world.keys_awaited)} data keys are {asked}, because the operator was started anew"
        return (false(kind, DomainReason.KEYS_AWAITED, told),)
    if lost:
        told = f"nobody has the data keys of {lost} epochs any more: they get new epochs and a cold cache"
        return (false(kind, DomainReason.KEYS_LOST, told),)
    return (true(kind, DomainReason.KEYS_AT_HAND, f"the operator has all {len(world.data_keys)} data keys"),)


def named_in_bundles(world: World) -> dict[str, str]:
    """Return by epoch the id of the key that bundles name for its keyspace: what a former operator left behind.

    Epochs of which no bundle names a key are left out, and so is everything while the domain's key is not known.
    """
    if world.domain_key is None:
        return {}
    named: dict[str, str] = {}
    for committed in world.bundles.values():
        bundle = committed.bundle
        versions = (version for shard in bundle.pools.values() for version in shard.versions)
        told = [(entry.keyspace, entry.keys) for entry in bundle.entries.values()]
        for keyspace, keys in (*told, *((version.keyspace, version.keys) for version in versions)):
            if keys and isinstance(keys[0], KeyReference):
                named[keyspace] = keys[0].id
    found: dict[str, str] = {}
    if not named:
        return found
    for scope, epoch in _scopes_in_use(world):
        keyspace = derive_keyspace(world.domain_key, scope, epoch)
        if keyspace in named:
            found[epoch] = named[keyspace]
    return found


def _scopes_in_use(world: World) -> Iterator[tuple[Scope, str]]:
    scopes = [policy.status.scope for policy in world.policies.values()]
    for told in (*scopes, *(group.status.scope for group in world.groups.values())):
        if told is not None:
            yield Scope(ScopeKind(str(told.kind)), told.name), told.epoch
    for domain in world.domains.values():
        if domain.status.scope is not None:
            yield PUBLIC_SCOPE, domain.status.scope.epoch
    for pool in world.pools.values():
        yield from ((pool_scope(pool.name), epoch) for epoch in pool.status.epochs)


def in_bundles(custody: KeyCustody) -> bool:
    """Whether bundles may hold the keys themselves.

    They are Secrets: a copy there is in etcd's history, whatever custody drew the key, and nobody could ever say that
    no copy exists. With every other custody they name keys, and the operator brings them
    (`contract.messages.key_delivery`).
    """
    return custody is KeyCustody.SECRET


def may_claim(custody: KeyCustody) -> frozenset[Claim]:
    """Return what a receipt can come to say of keys in this custody, at best."""
    known = {Claim.KEYS_REVOKED, Claim.KEYS_DESTROYED}
    denied = {claim for residue in RESIDUE[custody] for claim in residue.denies}
    return frozenset(known - denied)


def key_fact(fingerprint: str, revoked: str, revocation: Revocation, destruction: Destruction | None) -> KeyFact:
    """Return what a receipt says of a key's end.

    `fingerprint` is `key_fingerprint` of the key, `revoked` the commitment to the epoch that it belonged to. Raises
    ValueError if the two words are of different custodies: one of them is not about this key.
    """
    if destruction is not None and destruction.custody is not revocation.custody:
        raise ValueError("revocation and destruction are by different custodies")
    kept = revocation.custody is KeyCustody.SECRET or revocation.removed is None
    destroyed = None if kept or destruction is None else destruction.confirmed
    return KeyFact(fingerprint, revoked, revocation.custody, revocation.removed, destroyed)


def destroyed_in_memory(
    *,
    operator: str,
    holders: Iterable[str],
    predecessors: Iterable[str],
    releases: Mapping[str, Release],
    overwritten_at: str | None,
) -> Destruction:
    """Return whether a key that only processes had is gone from all of them.

    `holders` are uids of pods that it was ever brought to, whether or not that arrived; `predecessors` are names of
    operators' pods that had it before this one, whose name is `operator`: an operator that lost its lease and hangs
    holds its keys, so it must have said that it overwrote them, or its end must be known. `overwritten_at` is since
    when this one has no copy. One that merely fell silent is no evidence, however long it is away.
    """
    if overwritten_at is None:
        return Destruction(KeyCustody.MEMORY, None, Undestroyed.NOT_REVOKED)
    pods = sorted({*holders})
    if still_open := [pod for pod in pods if pod not in releases]:
        told = f"{len(still_open)} of {len(pods)} holders have not let go, among them {still_open[0]}"
        return Destruction(KeyCustody.MEMORY, None, Undestroyed.HOLDERS_OPEN, (told,))
    for former in sorted({*predecessors}):
        if former not in releases:
            told = f"operator {former} is not known to have ended"
            return Destruction(KeyCustody.MEMORY, None, Undestroyed.PREDECESSOR_UNKNOWN, (told,))
    seen = [releases[one] for one in (*pods, *sorted({*predecessors}))]
    at = max([overwritten_at, *(release.at for release in seen)])
    said = sum(release.how is LetGo.SAID for release in seen)
    evidence = (
        f"{said} holders said that it is gone, {len(seen) - said} ended",
        f"operator {operator} has none any more",
    )
    return Destruction(KeyCustody.MEMORY, Word(Party.OPERATOR, operator, at), evidence=evidence)
