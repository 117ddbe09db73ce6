"""Number and digest of a domain's newest receipt, in the status of its CacheDomain."""

from __future__ import annotations

from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain, ReceiptChain
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND
from kvstrata.reconcile.store import Store


def counted(store: Store, namespace: str, domain: str) -> ReceiptChain | None:
    found = _domain(store, namespace, domain)
    return found.status.receipts if found is not None else None


async def count(kube: Kube, store: Store, namespace: str, domain: str, number: int, head: str) -> CacheDomain | None:
    """Write the count; return the CacheDomain, or None if it is gone or counts as much already. Raises KubeError."""
    found, resource = _domain(store, namespace, domain), BY_KIND[CacheDomain.INFO.kind]
    if found is None or (found.status.receipts is not None and found.status.receipts.count >= number):
        return None
    status, version = {"receipts": {"count": number, "head": head}}, found.metadata.resource_version
    try:
        written = await kube.patch_status(resource, namespace, DOMAIN_NAME, status, version)
    except KubeError as error:
        if error.is_not_found:
            return None
        raise
    store.observe(written | {"apiVersion": resource.api_version, "kind": resource.kind})
    return found


def _domain(store: Store, namespace: str, domain: str) -> CacheDomain | None:
    """Return the CacheDomain with this domain id; a successor has another chain."""
    found: CacheDomain | None = store.domain(namespace).objects["CacheDomain"].get(DOMAIN_NAME)
    return found if found is not None and found.status.domain_id == domain else None
