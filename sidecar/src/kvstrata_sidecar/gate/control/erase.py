"""Erasure of this pod's own copies, and verification, at the operator's request.

Only keyspaces outside of the policy are erased: the gate refuses those in its bundle, the adapter those in its view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from kvstrata.contract import ContractError
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.messages.erase import (
    AdapterErased,
    AdapterVerified,
    Erased,
    EraseOutcome,
    EraseRequest,
    LeftKeys,
    Verified,
    VerifyRequest,
)
from kvstrata.contract.policy.cache_view import data_keys
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.control.parts import Parts, later, until

LOOK_S = 0.25


class PodEraser:
    """Answers the operator. `key_files` counts existing key files of keyspaces."""

    def __init__(self, parts: Parts, audit: Audit, key_files: Callable[[Collection[str]], LeftKeys]) -> None:
        self._boot, self._enforcement, self._link = parts.boot, parts.enforcement, parts.link
        self._audit = audit
        self._key_files = key_files

    async def erase(self, request: EraseRequest) -> Erased:
        """Answer when nothing is left, when nothing may be erased, or after the requested wait."""
        final = (EraseOutcome.COMPLETE, EraseOutcome.IN_FORCE)
        look = partial(self._erase, request)
        erased = await until(lambda one: one.outcome in final, look, request.wait_s, LOOK_S)
        count, outcome = len(request.keyspaces), str(erased.outcome)
        log.info("copies in this pod were erased", outcome=outcome, keyspaces=count)
        self._audit.record(Action.COPIES_ERASED, count=count, reason=outcome)
        return erased

    async def verify(self, request: VerifyRequest) -> Verified:
        """Raises Refusal (503) to retry."""
        try:
            found = await self._link.ask(request, AdapterVerified)
        except ContractError:
            raise later("the cache server cannot look now") from None
        if found.boot != self._enforcement.cache_boot:
            raise later("the cache server changed")
        return Verified(self._boot, self._enforcement.acked, self._has({request.keyspace}), found)

    async def _erase(self, request: EraseRequest) -> Erased:
        enforcement, keyspaces = self._enforcement, frozenset(request.keyspaces)
        if enforcement.bundle is None:
            return self._nothing(EraseOutcome.NOT_ENFORCED)
        if not enforcement.cache_boot:
            return self._nothing(EraseOutcome.CACHE_AWAY)
        if self._has(keyspaces):
            return self._nothing(EraseOutcome.IN_FORCE)
        try:
            erased = await self._link.ask(request, AdapterErased)
        except ContractError:
            return self._nothing(EraseOutcome.CACHE_AWAY)
        # The policy or the cache server may have changed meanwhile.
        if self._has(keyspaces):
            return self._nothing(EraseOutcome.IN_FORCE)
        if erased.outcome is EraseOutcome.IN_FORCE or erased.boot != enforcement.cache_boot:
            return self._nothing(EraseOutcome.NOT_ENFORCED)
        named = data_keys(enforcement.bundle)
        files, in_policy = self._key_files(keyspaces), sum(len(named.get(keyspace, ())) for keyspace in keyspaces)
        keys = LeftKeys(files.gate + in_policy, files.volume)
        return Erased(self._boot, enforcement.acked, erased, enforcement.requests_on(keyspaces), keys)

    def _nothing(self, outcome: EraseOutcome) -> Erased:
        enforcement = self._enforcement
        boot = "" if outcome is EraseOutcome.CACHE_AWAY else enforcement.cache_boot
        return Erased(self._boot, enforcement.acked, AdapterErased(boot, 0, enforcement.term, outcome))

    def _has(self, keyspaces: Collection[str]) -> bool:
        """Whether the policy in force has any of these, unless they are suspended for an erasure only."""
        bundle = self._enforcement.bundle
        if bundle is None:
            return False
        in_force = {entry.keyspace for entry in bundle.entries.values() if not entry.resumes}
        return not (in_force | bundle.pool_keyspaces).isdisjoint(keyspaces)
