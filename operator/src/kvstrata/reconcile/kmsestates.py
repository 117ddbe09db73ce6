"""Who is to be asked about keys that a service wraps, also when the CacheDomain that named it is gone.

Observes: CacheDomains, and what is noted of those that were (`custody.estates`). Writes: that note, before a domain's
first key is made; the domain's Secrets of wrapped keys go with it when the service has nothing of the domain any more.
Runs again when: a while has passed.

A domain counts as gone when the API server, asked for it, has none or another one there, or has no such namespace; not
because a watch said so, and not while a deleted policy of its namespace may still ask for the end of its keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.resources import BY_KIND
from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain
from kvstrata.model.refs import Key
from kvstrata.model.world import World

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

    async def of_namespace(self, namespace: str) -> KmsCustody:
        """Return the custody that the CacheDomain of a namespace names. Raises CustodyError."""
        domain = self._domain_of(namespace)
        if domain is None or domain.status.domain_id is None:
            raise CustodyError("there is no CacheDomain that says where the key management service is")
        if domain.spec.kms is None:
            raise CustodyError("spec.kms of the CacheDomain is gone, and its keys are wrapped by a service")
        authority = await self._services.authority(namespace, domain.spec.kms)
        estate = Estate(domain.status.domain_id, namespace, domain.uid, domain.spec.kms, authority)
        custody = await self._custody(estate)
        self._require_leading()
        await self._estates.note(estate)
        return custody

    async def of_domain(self, namespace: str, domain_id: str) -> KmsCustody | None:
        """Return the custody of a domain that is or was in a namespace; None if it is noted nowhere.

        Raises CustodyError.
        """
        domain = self._domain_of(namespace)
        if domain is not None and domain.status.domain_id == domain_id:
            return await self.of_namespace(namespace)
        estate = await self._estates.of(domain_id)
        return await self._custody(estate) if estate is not None else None

    async def run(self) -> None:
        """Settle what domains leave until cancelled."""
        while True:
            try:
                await self.settle()
            except Exception:
                log.exception("what domains left could not be settled; this is a defect")
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            await asyncio.sleep(SETTLE_S)

    async def settle(self) -> None:
        """Have services delete what they have of domains that are gone; who fails is asked again next time."""
        waiting = 0
        try:
            estates = await self._estates.all()
        except CustodyError as error:
            log.info("what domains left could not be looked at", extra={"error": str(error)})
            return
        for estate in estates:
            try:
                waiting += await self._is_gone(estate) and not await self._settled(estate)
            except (CustodyError, KubeError) as error:
                waiting += 1
                about = {"namespace": estate.namespace, "problem": str(error)}
                log.warning("keys of a domain that is gone are still in their service", extra=about)
        metrics.KMS_ESTATES_OPEN.set(waiting)

    async def close(self) -> None:
        """Close every connection."""
        await self._services.close()

    async def _settled(self, estate: Estate) -> bool:
        """End all keys of a domain; return whether nothing is left of it."""
        self._require_leading()
        custody = await self._custody(estate)
        if not await custody.end_all(lambda: self._asked(estate)):
            return False
        await self._estates.remove(estate.domain)
        await self._services.forget(estate.domain)
        log.info("a service has no key of a domain that is gone", extra={"namespace": estate.namespace})
        return True

    async def _is_gone(self, estate: Estate) -> bool:
        policies = self._store.domain(estate.namespace).objects["TenantCachePolicy"].values()
        if any(policy.metadata.deleting for policy in policies):
            return False
        try:
            found = await self._kube.get(BY_KIND["CacheDomain"], estate.namespace, DOMAIN_NAME)
        except KubeError as error:
            if error.is_refusal:
                # With a namespace goes the right to read in it.
                return await self._kube.is_ending(estate.namespace)
            raise
        return found is None or found["metadata"]["uid"] != estate.uid

    async def _asked(self, estate: Estate) -> frozenset[str]:
        """Return the epochs about which erasures that are not over will ask."""
        records = [record async for record in self._keep.records() if record.domain == estate.domain]
        return frozenset(left.old for record in records for left in record.epochs)

    def _domain_of(self, namespace: str) -> CacheDomain | None:
        """Return the CacheDomain, None if there is none. Raises CustodyError if nobody could read the one there is."""
        world = self._store.world(namespace)
        if world.domain is None and is_unreadable(world):
            raise CustodyError("the CacheDomain cannot be read, so it is not known where its keys are")
        return world.domain

    async def _custody(self, estate: Estate) -> KmsCustody:
        client = await self._services.client(estate)
        stored = WrappedKeys(self._kube, self._namespace, estate.domain)
        return KmsCustody(client, stored, estate.domain, self._now, self._operator)

    def _require_leading(self) -> None:
        if not self._leading():
            raise CustodyError("this process no longer leads")


def is_unreadable(world: World) -> bool:
    """Return whether a namespace has a CacheDomain that nobody can read."""
    return Key("CacheDomain", world.namespace, DOMAIN_NAME) in world.unreadable
