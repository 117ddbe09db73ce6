"""The operator's own look at shared tiers. Chunk names found before a deletion serve to ask pods afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import Kube
from kvstrata.clients.redis.probe import Access
from kvstrata.clients.redis.verifier import SLOT_MAP_CHANGED, NodeLook, TierLook, TierVerifier
from kvstrata.contract.policy.tiers import AllowedServers, password_in
from kvstrata.contract.receipt.facts import Amount
from kvstrata.model.erasure.facts import Look
from kvstrata.model.erasure.record import ErasureRecord, TierNow
from kvstrata.plan.redis.backend import accesses, in_force, is_external
from kvstrata.reconcile.secrets import SecretMissingError, secret_value


class LookError(Exception):
    """A look at a tier proves nothing. `why` names the server or the Secret, and holds no secret."""

    def __init__(self, tier: str, why: str) -> None:
        super().__init__(f"CacheTier {tier}: {why}")
        self.why = why


@dataclass(frozen=True, slots=True)
class Looks:
    """`operator` is named in the looks, `now` is the wall clock in UTC."""

    kube: Kube
    operator: str
    now: Callable[[], datetime]
    verifier: Callable[..., TierVerifier] = TierVerifier
    allowed: Callable[[], AllowedServers | None] = lambda: None

    async def servers(self, record: ErasureRecord, tier: CacheTier) -> TierNow:
        try:
            verifier = await self._enter(tier)
        except LookError as error:
            return TierNow((), "", False, error.why)
        found = await verifier.servers(record.domain, record.erasure.order.keyspaces)
        primaries = tuple(sorted(one.node for one in found.nodes if _serves(one)))
        reported = "; ".join(one.message for one in found.problems[:3])
        return TierNow(primaries, found.slots_before, bool(primaries) and not found.problems, reported)

    async def look(self, record: ErasureRecord, tier: CacheTier) -> tuple[Look, tuple[str, ...]]:
        """Check every server of a tier, for all of the keyspaces or only blocks of the order's chunks. Raises LookError
        if the look proves nothing, and KubeError."""
        verifier = await self._enter(tier)
        began, order = self.now(), record.erasure.order
        found = await verifier.look(record.domain, order.keyspaces, order.chunks)
        moved = found.slots_before != found.slots_after
        others = [one for one in found.problems if not (moved and one.reason == SLOT_MAP_CHANGED)]
        if others:
            raise LookError(tier.name, "; ".join(one.message for one in others[:3]))
        primaries = {one.node: Amount(one.values + one.index, one.value_bytes) for one in found.nodes if _serves(one)}
        behind = [one for one in found.nodes if not _serves(one) and (one.values or one.index)]
        if behind and not any(amount.keys for amount in primaries.values()):
            # The primary is empty: the replica lags, or has lost its primary.
            what = "server without slots" if behind[0].primary else "replica"
            left = f"still has {behind[0].values + behind[0].index} keys"
            raise LookError(tier.name, f"{what} {behind[0].address} {left}")
        unsought = sum(one.unsought for one in found.nodes if _serves(one))
        look = Look(
            tier.name, self.operator, began, self.now(), found.slots_before, found.slots_after,
            len(primaries), primaries, unsought if order.chunks else None,
        )  # fmt: skip
        return look, _names(found)

    async def _enter(self, tier: CacheTier) -> TierVerifier:
        asked = next(iter(accesses(in_force(tier) or tier)), None)
        if asked is None:
            raise LookError(tier.name, "it has no servers")
        try:
            word = await secret_value(self.kube, tier.namespace, asked.password)
            password = password_in(word).decode() if word is not None else None
            authority = await secret_value(self.kube, tier.namespace, asked.authority)
        except SecretMissingError as error:
            raise LookError(tier.name, str(error)) from None
        except UnicodeDecodeError:
            why = f"the password in Secret {(asked.password or ('',))[0]} is not UTF-8 text"
            raise LookError(tier.name, why) from None
        allowed = self.allowed() if is_external(tier) else None
        access = Access(password, authority, asked.username, allowed)
        return self.verifier(asked.endpoint, asked.server_name, access, cluster=asked.cluster)


def _serves(one: NodeLook) -> bool:
    """Whether a server has slots; one without is treated like a replica."""
    return one.primary and not one.idle


def _names(found: TierLook) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in found.nodes if _serves(one) for name in one.names))
