"""Erasure of this pod's own copies, and verification, at the operator's request.

Only keyspaces outside of the policy are erased: the gate refuses those in its bundle, and the adapter those in its
view. An erasure is complete when the cache server found nothing left in each tier, no request or operation is under way
on the keyspaces, and none of their data keys is left in the gate's policy, the memory volume or the cache server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import UNKNOWN_QUESTION
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.messages.erase import (
    AdapterErased,
    Erased,
    EraseOutcome,
    EraseRequest,
    LeftKeys,
    Verified,
    VerifyRequest,
)
from kvstrata.contract.policy.cache_view import data_keys
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.adapter_link import AdapterLink
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request
from kvstrata_sidecar.gate.policy.enforcement import Enforcement

LOOK_S = 0.25


class PodEraser:
    """Answers the operator. `key_files` counts existing key files of keyspaces."""

    def __init__(
        self,
        *,
        boot: str,
        enforcement: Enforcement,
        link: AdapterLink,
        audit: Audit,
        key_files: Callable[[Collection[str]], LeftKeys],
    ) -> None:
        self._boot = boot
        self._enforcement = enforcement
        self._link = link
        self._audit = audit
        self._key_files = key_files

    async def erase(self, body: bytes) -> bytes:
        """Answer when nothing is left, when nothing may be erased, or after the requested wait. Raises Refusal: 400 for
        a malformed request, 501 if the cache server's version does not support it."""
        try:
            request = EraseRequest.decode(body)
        except ContractError:
            raise bad_request(Reason.BAD_VALUE, "the body is no request to erase") from None
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + request.wait_s
        while True:
            erased = await self._erase(request)
            final = erased.outcome in (EraseOutcome.COMPLETE, EraseOutcome.IN_FORCE)
            if final or loop.time() >= give_up_at_s:
                log.info(
                    "copies in this pod were erased", outcome=str(erased.outcome), keyspaces=len(request.keyspaces)
                )
                self._audit.record(Action.COPIES_ERASED, count=len(request.keyspaces), reason=str(erased.outcome))
                return erased.encode()
            await asyncio.sleep(min(LOOK_S, max(0.0, give_up_at_s - loop.time())))

    async def verify(self, body: bytes) -> bytes:
        """Raises Refusal: 400 for a malformed request, 501 if the cache server's version does not support it, 503 to
        retry."""
        try:
            request = VerifyRequest.decode(body)
        except ContractError:
            raise bad_request(Reason.BAD_VALUE, "the body is no request to verify") from None
        try:
            found = await self._link.verify(request)
        except ContractError as error:
            _require_known(error)
            raise Refusal(503, Reason.ENGINE, "the cache server cannot look now", retry_after_s=5) from None
        if found.boot != self._enforcement.cache_boot:
            raise Refusal(503, Reason.ENGINE, "the cache server changed", retry_after_s=5)
        return Verified(self._boot, self._enforcement.acked, self._has({request.keyspace}), found).encode()

    async def _erase(self, request: EraseRequest) -> Erased:
        enforcement, keyspaces = self._enforcement, frozenset(request.keyspaces)
        if enforcement.bundle is None or not enforcement.cache_boot:
            missing = EraseOutcome.NOT_ENFORCED if enforcement.bundle is None else EraseOutcome.CACHE_AWAY
            return self._nothing(missing)
        if self._has(keyspaces):
            return self._nothing(EraseOutcome.IN_FORCE)
        try:
            erased = await self._link.erase(request)
        except ContractError as error:
            _require_known(error)
            return self._nothing(EraseOutcome.CACHE_AWAY)
        # The policy or the cache server may have changed meanwhile.
        if self._has(keyspaces):
            return self._nothing(EraseOutcome.IN_FORCE)
        if erased.outcome is EraseOutcome.IN_FORCE or erased.boot != enforcement.cache_boot:
            return self._nothing(EraseOutcome.NOT_ENFORCED)
        requests = enforcement.requests_on(keyspaces)
        return Erased(self._boot, enforcement.acked, erased, requests, self._keys(keyspaces))

    def _nothing(self, outcome: EraseOutcome) -> Erased:
        enforcement = self._enforcement
        boot = "" if outcome is EraseOutcome.CACHE_AWAY else enforcement.cache_boot
        return Erased(self._boot, enforcement.acked, AdapterErased(boot, 0, enforcement.term, outcome))

    def _keys(self, keyspaces: frozenset[str]) -> LeftKeys:
        bundle = self._enforcement.bundle
        named = data_keys(bundle) if bundle is not None else {}
        files = self._key_files(keyspaces)
        in_policy = sum(len(keys) for keyspace, keys in named.items() if keyspace in keyspaces)
        return LeftKeys(files.gate + in_policy, files.volume)

    def _has(self, keyspaces: Collection[str]) -> bool:
        """Whether the policy in force has any of these, even suspended or switched off. Keyspaces suspended for an
        erasure only may be erased."""
        bundle = self._enforcement.bundle
        if bundle is None:
            return False
        versions = (version for shard in bundle.pools.values() for version in shard.versions)
        entries = (entry for entry in bundle.entries.values() if not entry.resumes)
        return any(entry.keyspace in keyspaces for entry in entries) or any(
            version.keyspace in keyspaces for version in versions
        )


def _require_known(error: ContractError) -> None:
    if UNKNOWN_QUESTION in str(error):
        raise Refusal(501, Reason.NOT_FOUND, "the cache server of this pod cannot erase or verify yet") from None
