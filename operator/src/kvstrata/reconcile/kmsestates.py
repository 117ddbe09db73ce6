"""Who is to be asked about keys that a service wraps, also when the CacheDomain that named it is gone.

Observes: CacheDomains, and what is noted of those that were (`custody.estates`). Writes: that note, before a domain's
first key is made and when the way to its service has changed; the domain's Secrets of wrapped keys go with it when the
service has nothing of the domain any more. Runs again when: a while has passed.

A domain counts as gone when the API server lists the CacheDomains of its namespace without it, or says that the
namespace is ending; not because a watch said so, and not because nothing answered to its name. As long as an erasure is
under way, or a status names an epoch, its note stays: somebody will ask what became of its key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.resources import BY_KIND
from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain
from kvstrata.model.keycustody import Destruction
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.plan.datakeys import epochs_in_use

from . import metrics
from .custody import CustodyError
from .custody.estates import Estate, Estates
from .custody.kms import KmsCustody
from .custody.services import KmsServices
from .custody.wrapped import WrappedKeys
from .erasures.keep import Keep
from .store import Store

log = logging.getLogger(__name__)

SETTLE_S = 15.0
"""Between two looks for domains that are gone."""


class KmsEstates:
    """Custodies of one operator process. `namespace` is the operator's, `operator` is whose word a revocation is,
    `now` the wall clock in UTC, `leading` whether this process may write."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        store: Store,
        services: KmsServices,
        operator: str,
        now: Callable[[], datetime],
        leading: Callable[[], bool],
    ) -> None:
        self._kube, self._namespace, self._store, self._services = kube, namespace, store, services
        self._operator, self._now, self._leading = operator, now, leading
        self._estates, self._keep = Estates(kube, namespace), Keep(kube, namespace)
        self._empty: frozenset[str] = frozenset()
        """Domains of which nothing was left at the last look."""

    async def of_namespace(self, namespace: str) -> KmsCustody:
        """Return the custody that the CacheDomain of a namespace names, once it is noted. Raises CustodyError."""
        estate = await self._estate_of(namespace)
        custody = await self._custody(estate)
        if not await self._estates.has(estate):
            # Of a way that leads nowhere a note would be of no use, and the last one may still lead somewhere.
            await custody.answers()
            self._require_leading()
            await self._estates.note(estate)
        return custody

    async def of_domain(self, namespace: str, domain_id: str) -> KmsCustody | None:
        """Return the custody of a domain that is or was in a namespace; None if nothing is stored of it.

        Raises CustodyError.
        """
        domain = self._domain_of(namespace)
        if domain is not None and domain.status.domain_id == domain_id:
            return await self._custody(await self._estate_of(namespace))
        estate = await self._estates.of(domain_id)
        if estate is None:
            records = await WrappedKeys(self._kube, self._namespace, domain_id).all()
            if any(record.wrapped for record in records.values()):
                raise CustodyError("there are wrapped keys of the domain, and nothing says which service has the rest")
            return None
        if estate.namespace != namespace:
            raise CustodyError("the domain was never in this namespace")
        return await self._custody(estate)

    async def run(self) -> None:
        """Settle what domains leave until cancelled."""
        while True:
            try:
                await self.settle()
            except Exception as error:
                _report(error)
            await asyncio.sleep(SETTLE_S)

    async def settle(self) -> None:
        """Have services delete what they have of domains that are gone; who fails is asked again next time."""
        try:
            noted = await self._estates.all()
        except CustodyError as error:
            log.info("what domains left could not be looked at", extra={"error": str(error)})
            return
        if noted.unreadable:
            log.warning("nobody can read which service has keys", extra={"secrets": noted.unreadable})
        waiting = len(noted.unreadable)
        for estate in noted.estates:
            about = {"namespace": estate.namespace, "domain": estate.domain}
            try:
                if await self._is_gone(estate):
                    waiting += not await self._ended(estate)
                else:
                    await self._renew(estate)
            except (CustodyError, KubeError) as error:
                waiting += 1
                problem = {"problem": str(error)}
                log.warning("keys of a domain that is gone are still in their service", extra=about | problem)
            except Exception as error:
                waiting += 1
                _report(error)
        metrics.KMS_ESTATES_OPEN.set(waiting)

    async def close(self) -> None:
        """Close every connection."""
        await self._services.close()

    async def _ended(self, estate: Estate) -> bool:
        """End all keys of a domain; return whether the service has none any more."""
        self._require_leading()
        await self._estates.begin_end(estate)
        custody = await self._custody(estate)
        left = await custody.end_all(lambda: self._asked(estate))
        tell_unended(estate.namespace, left.unended.values())
        if left.unreadable:
            about = {"namespace": estate.namespace, "secrets": left.unreadable}
            log.warning("nobody can read what keys a service has", extra=about)
        if left or estate.domain not in self._empty:
            # What was being drawn when the end began ends by whoever drew it, who needs the client for that.
            self._empty = self._empty - {estate.domain} if left else self._empty | {estate.domain}
            return not (left.unended or left.unreadable)
        await self._estates.remove(estate.domain)
        await self._services.forget(estate)
        self._empty -= {estate.domain}
        log.info("a service has no key of a domain that is gone", extra={"namespace": estate.namespace})
        return True

    async def _renew(self, estate: Estate) -> None:
        """Note another way to the service of a domain that is there, as soon as it leads somewhere."""
        domain = self._store.world(estate.namespace).domain
        if domain is None or domain.status.domain_id != estate.domain or domain.spec.kms is None:
            return
        try:
            await self.of_namespace(estate.namespace)
        except CustodyError as error:
            about = {"namespace": estate.namespace, "problem": str(error)}
            log.info("what is noted of a domain's service is not what its CacheDomain says", extra=about)

    async def _is_gone(self, estate: Estate) -> bool:
        try:
            found = [raw async for raw in self._kube.list(BY_KIND["CacheDomain"], estate.namespace)]
        except KubeError as error:
            if error.is_refusal:
                # With a namespace goes the right to read in it.
                return await self._kube.is_ending(estate.namespace)
            raise
        ids = [(raw["metadata"]["uid"], (raw.get("status") or {}).get("domainID")) for raw in found]
        return not any(estate.uid == uid or estate.domain == domain for uid, domain in ids)

    async def _asked(self, estate: Estate) -> frozenset[str]:
        """Return the epochs that erasures ask about which are not over, and that policies name which may be erased."""
        records = [record async for record in self._keep.records() if record.domain == estate.domain]
        erasing = {left.old for record in records for left in record.epochs}
        return frozenset(erasing | epochs_in_use(self._store.world(estate.namespace)))

    async def _estate_of(self, namespace: str) -> Estate:
        domain = self._domain_of(namespace)
        if domain is None or domain.status.domain_id is None:
            raise CustodyError("there is no CacheDomain that says where the key management service is")
        if domain.spec.kms is None:
            raise CustodyError("spec.kms of the CacheDomain is gone, and its keys are wrapped by a service")
        authority = await self._services.authority(namespace, domain.spec.kms)
        return Estate(domain.status.domain_id, namespace, domain.uid, domain.spec.kms, authority)

    def _domain_of(self, namespace: str) -> CacheDomain | None:
        """Return the CacheDomain, None if there is none. Raises CustodyError if nobody could read the one there is."""
        world = self._store.world(namespace)
        if world.domain is None and is_unreadable(world):
            raise CustodyError("the CacheDomain cannot be read, so it is not known where its keys are")
        return world.domain

    async def _custody(self, estate: Estate) -> KmsCustody:
        client = await self._services.client(estate)
        stored = WrappedKeys(self._kube, self._namespace, estate.domain)
        domain = estate.domain
        over = partial(self._estates.is_over, domain)
        return KmsCustody(client, stored, domain, self._now, self._operator, over)

    def _require_leading(self) -> None:
        if not self._leading():
            raise CustodyError("this process no longer leads")


def is_unreadable(world: World) -> bool:
    """Return whether a namespace has a CacheDomain that nobody can read."""
    return Key("CacheDomain", world.namespace, DOMAIN_NAME) in world.unreadable


def tell_unended(namespace: str, ends: Iterable[Destruction]) -> None:
    """Tell operators of keys that their service has not ended, and why."""
    for end in ends:
        if end.why_not is not None:
            told = {"namespace": namespace, "why": str(end.why_not)}
            log.warning("the service has not ended a data key that nobody needs", extra=told)
            metrics.KEYS_NOT_ENDED.labels(str(end.why_not)).inc()


def _report(error: Exception) -> None:
    log.error("what a domain left could not be settled; this is a defect", exc_info=error)
    metrics.FAILURES.labels("CacheDomain", "Bug").inc()
