"""The operator's own look at shared tiers. Chunk names found before a deletion serve to ask pods afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import Kube
from kvstrata.clients.redis.probe import Access
from kvstrata.clients.redis.verifier import SLOT_MAP_CHANGED, NodeLook, TierLook, TierVerifier
from kvstrata.clients.resources import SECRET
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata.model.erasure.facts import Look
from kvstrata.model.erasure.record import TierNow
from kvstrata.objects.tier_link import RedisLink, redis_link
from kvstrata.plan.redis.backend import addresses, asked_as, in_force
from kvstrata.reconcile.secrets import decode

MAX_NAMED = 64
"""Chunk names kept for each keyspace and tier."""


class LookError(Exception):
    """A look proves nothing. The message names the server or the Secret, and holds no secret."""


@dataclass(frozen=True, slots=True)
class Found:
    look: Look
    names: tuple[str, ...]


class Looks:
    """`operator` is named in the looks, `now` is the wall clock in UTC."""

    def __init__(
        self,
        kube: Kube,
        operator: str,
        now: Callable[[], datetime],
        verifier: Callable[..., TierVerifier] = TierVerifier,
    ) -> None:
        self._kube, self._operator, self._now, self._verifier = kube, operator, now, verifier

    async def servers(self, tier: CacheTier, domain: str, keyspaces: Iterable[str]) -> TierNow:
        try:
            verifier = await self._enter(tier)
        except LookError as error:
            return TierNow((), "", False, str(error))
        found = await verifier.servers(domain, tuple(keyspaces))
        primaries = tuple(sorted(one.node for one in found.nodes if _serves(one)))
        told = "; ".join(one.message for one in found.problems[:3])
        return TierNow(primaries, found.slots_before, bool(primaries) and not found.problems, told)

    async def look(self, tier: CacheTier, domain: str, keyspaces: Iterable[str], chunks: Iterable[str] = ()) -> Found:
        """Check every server of a tier, for all of the keyspaces or only blocks of `chunks`. Raises LookError if the
        look proves nothing, and KubeError."""
        verifier = await self._enter(tier)
        began = self._now()
        found = await verifier.look(domain, tuple(keyspaces), tuple(chunks))
        moved = found.slots_before != found.slots_after
        others = [one for one in found.problems if not (moved and one.reason == SLOT_MAP_CHANGED)]
        if others:
            raise LookError("; ".join(one.message for one in others[:3]))
        primaries = {one.node: Amount(one.values + one.index, one.value_bytes) for one in found.nodes if _serves(one)}
        behind = [one for one in found.nodes if not _serves(one) and (one.values or one.index)]
        if behind and not any(amount.keys for amount in primaries.values()):
            # The primary is empty: the replica lags, or has lost its primary.
            what = "server without slots" if behind[0].primary else "replica"
            raise LookError(f"{what} {behind[0].address} still has {behind[0].values + behind[0].index} keys")
        look = Look(
            tier.name, self._operator, began, self._now(), found.slots_before, found.slots_after,
            len(primaries), primaries,
        )  # fmt: skip
        return Found(look, _names(found))

    async def _enter(self, tier: CacheTier) -> TierVerifier:
        used = in_force(tier) or tier
        link = redis_link(used)
        if link is None:
            raise LookError(f"CacheTier {tier.name} has no servers")
        access = await self._access(tier.namespace, link)
        host, _ = link.endpoints[0]
        return self._verifier(addresses(link)[0], host, access, cluster=used.spec.is_cluster)

    async def _access(self, namespace: str, link: RedisLink) -> Access:
        username, password, authority = asked_as(link)
        word = await self._value(namespace, password)
        try:
            text = word.decode() if word is not None else None
        except UnicodeDecodeError:
            raise LookError(f"the password in Secret {(password or ('',))[0]} is not UTF-8 text") from None
        return Access(text, await self._value(namespace, authority), username)

    async def _value(self, namespace: str, where: tuple[str, str] | None) -> bytes | None:
        if where is None:
            return None
        raw = await self._kube.get(SECRET, namespace, where[0])
        value = decode(raw).get(where[1]) if raw else None
        if value is None:
            raise LookError(f"Secret {where[0]} does not exist or has no key {where[1]}")
        return value


def chunks_of(names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return some of the chunks with blocks of these names, by keyspace."""
    found: dict[str, set[str]] = {}
    for name in names:
        key = parse_block_key(name)
        if key is not None:
            found.setdefault(key.keyspace, set()).add(key.chunk_hash.hex())
    return {keyspace: tuple(sorted(chunks)[:MAX_NAMED]) for keyspace, chunks in found.items()}


def _serves(one: NodeLook) -> bool:
    """Whether a server has slots; one without is treated like a replica."""
    return one.primary and not one.idle


def _names(found: TierLook) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in found.nodes if _serves(one) for name in one.names))
