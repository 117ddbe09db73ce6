"""Custodies of domains with wrapped keys, also after their CacheDomain is gone.

Observes: CacheDomains, and notes of former ones (`kms_domains_store`). Writes: that note, before a domain's first key
and when its service's address changed; deletes a domain's Secrets of wrapped keys once the service has none of its
keys. Runs again when: SETTLE_S has passed.

A domain counts as gone when list and watch lack it, or its namespace is ending. One that returns with its id continues.
Its note stays while an erasure, an invalidation or a status may ask for the end of its key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain
from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND
from kvstrata.contract import ContractError
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.model.keys import Destruction
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.keys.custody import active_custody
from kvstrata.plan.keys.data_keys import HOLDERS, epochs_in_use
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import Clock, Leads
from kvstrata.reconcile.erasure.record_store import RecordStore
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.kms_custody import KmsCustody
from kvstrata.reconcile.keys.kms_domains_store import KmsDomain, KmsDomainStore
from kvstrata.reconcile.keys.kms_services import KmsServices
from kvstrata.reconcile.keys.wrapped_keys import WrappedKeys, domains_with_keys
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

_NAMING = HOLDERS | {"CacheInvalidation"}
"""Kinds whose status names epochs, including former ones."""

_NO_RECORD = "and no record names the service that has the others"

SETTLE_S = 15.0
STRAYS_EVERY = 40
"""Every how many passes all Secrets of wrapped keys are listed."""


class KmsDomains:
    """`namespace` is the operator's, `operator` is named in revocations."""

    def __init__(
        self, kube: Kube, namespace: str, store: Store, services: KmsServices, operator: str, now: Clock, leading: Leads
    ) -> None:
        self._kube, self._namespace, self._store, self._services = kube, namespace, store, services
        self._operator, self._now, self._leading = operator, now, leading
        self._stored, self._record_store = KmsDomainStore(kube, namespace), RecordStore(kube, namespace)
        self._empty = set[str]()
        """Domains of which the last pass found nothing."""
        self._over: dict[str, set[str]] = {}
        """By domain, epochs whose keys' end the service confirmed to this process, and whose notes stay."""
        self._looks, self._strays = 0, 0
        """Passes, and missing domains with keys but without a note at the last listing."""

    async def of_namespace(self, namespace: str) -> KmsCustody:
        """Return the custody that a namespace's CacheDomain names, after it is noted. Raises CustodyError."""
        kms_domain = await self._kms_domain_of(namespace)
        custody, known = await self._custody(kms_domain), await self._stored.of(kms_domain.domain)
        if known is not None and known.namespace != namespace:
            raise CustodyError("status.domainID of the CacheDomain is the id of another namespace's domain")
        if known is not None and known.ending:
            raise CustodyError("status.domainID of the CacheDomain is the id of one whose keys are being ended")
        if known != kms_domain:
            # A wrong address must not replace the last note, which may still be right.
            await custody.leads_there()
            self.require_leading()
            await self._stored.write(replace(kms_domain, version=known.version if known is not None else ""))
        return custody

    async def of_domain(self, namespace: str, domain_id: str) -> KmsCustody | None:
        """Return the custody of a present or former domain; None if nothing is stored. Raises CustodyError."""
        kms_domain = await self._stored.of(domain_id)
        if kms_domain is not None and kms_domain.namespace != namespace:
            raise CustodyError("the domain was never in this namespace")
        domain = self._domain_of(namespace)
        if domain is not None and domain.status.domain_id == domain_id:
            return await self._custody(await self._kms_domain_of(namespace))
        if kms_domain is not None:
            return await self._custody(kms_domain)
        held = await WrappedKeys(self._kube, self._namespace, domain_id).held()
        if held.unusable or any(record.wrapped for record in held.records.values()):
            raise CustodyError(f"there are wrapped keys of the domain, {_NO_RECORD}")
        return None

    async def revoke(self, namespace: str, domain_id: str, epochs: Iterable[str]) -> Mapping[str, Statement]:
        """Remove wrapped keys of a present or former domain from their Secrets. Raises CustodyError."""
        wanted, custody = tuple(epochs), await self.of_domain(namespace, domain_id)
        if custody is None:
            # A key without a record reaches no pod.
            return dict.fromkeys(wanted, Statement(Party.OPERATOR, self._operator, format_timestamp(self._now())))
        revoked = await custody.revoke(wanted)
        gone = {epoch: statement for epoch, statement in revoked.items() if statement is not None}
        if kept := len(revoked) - len(gone):
            raise CustodyError(f"{kept} data keys are in Secrets still, or this version cannot read their records")
        return gone

    async def run(self) -> None:
        while True:
            try:
                await self.settle()
            except Exception as error:
                _report(error)
            await asyncio.sleep(SETTLE_S)

    async def settle(self) -> None:
        """Have services delete the keys of deleted domains; failures are retried in the next pass."""
        try:
            if self._looks % STRAYS_EVERY == 0:
                self._strays = await self._count_strays()
            self._looks += 1
        except CustodyError as error:
            log.info("keys without a note could not be looked for", extra={"error": str(error)})
        try:
            noted, unreadable = await self._stored.all()
        except CustodyError as error:
            log.info("the keys of deleted domains could not be checked", extra={"error": str(error)})
            return
        if unreadable:
            log.warning("notes of services are unreadable", extra={"secrets": unreadable})
        waiting = len(unreadable) + self._strays
        for kms_domain in noted:
            about = {"namespace": kms_domain.namespace, "domain": kms_domain.domain}
            was_empty = kms_domain.domain in self._empty
            self._empty.discard(kms_domain.domain)
            try:
                if await self._is_gone(kms_domain):
                    waiting += not await self._ended(kms_domain, was_empty)
                elif kms_domain.ending:
                    self.require_leading()
                    await self._stored.write(replace(kms_domain, ending=False))
                    self._over.pop(kms_domain.domain, None)
                    log.warning("a CacheDomain is there again: its keys are not ended any further", extra=about)
            except (CustodyError, KubeError) as error:
                waiting += 1
                about["problem"] = str(error)
                log.warning("keys of a domain that may be gone are still in their service", extra=about)
            except Exception as error:
                waiting += 1
                _report(error)
        metrics.KMS_DOMAINS_OPEN.set(waiting)
        await self._renew({kms_domain.domain for kms_domain in noted})

    def require_leading(self) -> None:
        if not self._leading():
            raise CustodyError("this process no longer leads")

    async def close(self) -> None:
        await self._services.close()

    async def _ended(self, kms_domain: KmsDomain, was_empty: bool) -> bool:
        """End all keys of a domain; return whether the service has none any more. `was_empty`: the last pass found
        nothing, so if this finds nothing either, it is the final one."""
        self.require_leading()
        if not kms_domain.ending:
            # Before the keys are listed: keys drawn from now on are undone.
            await self._stored.write(replace(kms_domain, ending=True))
        custody, over = await self._custody(kms_domain), self._over.setdefault(kms_domain.domain, set())
        records = await custody.records()
        known = records.wrapped | records.revoked
        over &= records.revoked
        due = known - over
        await custody.revoke(due)
        ended = await custody.destroy(due)
        record_unended(kms_domain.namespace, ended.found.values())
        confirmed = {epoch for epoch, end in ended.found.items() if end.confirmed is not None}
        over |= confirmed
        if over and (asked := await self._asked(kms_domain)) is not None:
            await custody.forget(over - asked)
            over &= asked
        ended.whole()
        unended, unreadable = due - confirmed, {*records.unusable.values()}
        if not (unended or over or unreadable):
            unreadable = {*await WrappedKeys(self._kube, self._namespace, kms_domain.domain).remove()}
        if unreadable:
            about = {"namespace": kms_domain.namespace, "secrets": sorted(unreadable)}
            log.warning("records of a domain's keys are unreadable", extra=about)
        if known or unreadable:
            return not (unended or unreadable)
        if not was_empty:
            # A draw that was running ends its own keys, and needs the client for that.
            self._empty.add(kms_domain.domain)
            return True
        await self._stored.remove(kms_domain.domain)
        await self._services.forget(kms_domain)
        self._over.pop(kms_domain.domain, None)
        log.info("a service has no key of a domain that is gone", extra={"namespace": kms_domain.namespace})
        return True

    async def _renew(self, noted: Iterable[str]) -> None:
        """Write notes again that are missing, or whose service is reached in another way now."""
        for namespace in self._store.namespaces:
            domain = self._store.world(namespace).domain
            if domain is None or domain.spec.kms is None or domain.status.domain_id is None:
                continue
            if domain.status.domain_id in noted or active_custody(domain) is KeyCustody.KMS:
                try:
                    await self.of_namespace(namespace)
                except CustodyError as error:
                    about = {"namespace": namespace, "problem": str(error)}
                    log.info("the recorded service of a domain differs from its CacheDomain", extra=about)

    async def _count_strays(self) -> int:
        """Return the number of missing domains with records of keys, but without a note. Raises CustodyError."""
        # A note is written before the first key, and removed after the last.
        with_keys = await domains_with_keys(self._kube, self._namespace)
        noted, unreadable = await self._stored.all()
        known = {*unreadable, *(names.kms_domain(kms_domain.domain) for kms_domain in noted)}
        there = {self._store.world(namespace).domain_id for namespace in self._store.namespaces}
        strays = sorted(domain for domain in with_keys - there if names.kms_domain(domain) not in known)
        if strays:
            log.warning(f"there are wrapped keys, {_NO_RECORD}", extra={"domains": strays})
        return len(strays)

    async def _is_gone(self, kms_domain: KmsDomain) -> bool:
        try:
            found = [raw async for raw in self._kube.list(BY_KIND["CacheDomain"], kms_domain.namespace)]
        except KubeError as error:
            if error.is_refusal and await self._kube.is_ending(kms_domain.namespace):
                # The right to read ends with the namespace.
                return True
            raise
        ids = [(raw["metadata"]["uid"], (raw.get("status") or {}).get("domainID")) for raw in found]
        if any(kms_domain.uid == uid or kms_domain.domain == domain for uid, domain in ids):
            return False
        seen = self._store.world(kms_domain.namespace).domains.values()
        if any(kms_domain.uid == one.uid or kms_domain.domain == one.status.domain_id for one in seen):
            message = "the API server lists the CacheDomain no more, and its watch has not reported its deletion"
            raise CustodyError(message)
        return True

    async def _asked(self, kms_domain: KmsDomain) -> frozenset[str] | None:
        """Return the epochs of open erasures and invalidations, and of statuses; None if one of them cannot be read."""
        before = self._named(kms_domain.namespace)
        try:
            records = [one async for one in self._record_store.records(whole=True) if one.domain == kms_domain.domain]
        except ContractError:
            return None
        # An erasure's record exists before the status that names its epochs changes.
        after = self._named(kms_domain.namespace)
        if before is None or after is None:
            return None
        return before | after | {left.old for record in records for left in record.epochs}

    def _named(self, namespace: str) -> frozenset[str] | None:
        world = self._store.world(namespace)
        if any(key.kind in _NAMING for key in world.unreadable):
            return None
        orders = [one for one in world.invalidations.values() if not one.finished]
        rolled = (scope.old_epoch for one in orders for scope in one.status.scopes or ())
        return frozenset(epochs_in_use(world) | {epoch for epoch in rolled if epoch})

    async def _kms_domain_of(self, namespace: str) -> KmsDomain:
        domain = self._domain_of(namespace)
        if domain is None or domain.status.domain_id is None:
            raise CustodyError("there is no CacheDomain that names the key management service")
        if domain.spec.kms is None:
            raise CustodyError("spec.kms of the CacheDomain is gone, and its keys are wrapped by a service")
        authority = await self._services.authority(namespace, domain.spec.kms)
        return KmsDomain(domain.status.domain_id, namespace, domain.uid, domain.spec.kms, authority)

    def _domain_of(self, namespace: str) -> CacheDomain | None:
        """Return the CacheDomain or None. Raises CustodyError if it is unreadable."""
        world = self._store.world(namespace)
        if world.domain is None and is_unreadable(world):
            raise CustodyError("the CacheDomain cannot be read, so it is not known where its keys are")
        return world.domain

    async def _custody(self, kms_domain: KmsDomain) -> KmsCustody:
        stored = WrappedKeys(self._kube, self._namespace, kms_domain.domain)
        client, why_not = await self._services.client(kms_domain), partial(self._stored.why_not, kms_domain.domain)
        return KmsCustody(client, stored, self._now, self._operator, why_not)


def is_unreadable(world: World) -> bool:
    return Key("CacheDomain", world.namespace, DOMAIN_NAME) in world.unreadable


def record_unended(namespace: str, ends: Iterable[Destruction]) -> None:
    for end in ends:
        if end.why_not is not None:
            about = {"namespace": namespace, "why": str(end.why_not)}
            log.warning("the service has not ended an unused data key", extra=about)
            metrics.KEYS_NOT_ENDED.labels(str(end.why_not)).inc()


def _report(error: Exception) -> None:
    log.error("the keys of a deleted domain could not be settled; this is a defect", exc_info=error)
    metrics.FAILURES.labels("CacheDomain", "Bug").inc()
