"""Clients of key management services, as CacheDomains name them and the operator's configuration allows.

The operator sends its token to a service. A namespace must not choose address, authentication method and authority
freely: their owner could take the token and impersonate the operator.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstrata.api.cachedomain import KeyManagement
from kvstrata.clients.kube import Kube
from kvstrata.clients.resources import CONFIG_MAP
from kvstrata.clients.transit import AT_ONCE, Tokens, TransitClient
from kvstrata.clients.transit_tokens import KubernetesLogin
from kvstrata.model.keys import FROM_NAMESPACE, AllowedService
from kvstrata.reconcile.keys import CustodyError, custody_errors
from kvstrata.reconcile.keys.kms_domains_store import KmsDomain

Login = Callable[[KeyManagement], Tokens]


def by_service_account(token_file: Path) -> Login:
    return lambda kms: KubernetesLogin(kms.role, token_file, method=kms.auth_mount)


class KmsServices:
    """One client per domain, kept while its configuration stays the same."""

    def __init__(self, kube: Kube, allowed: Iterable[AllowedService], login: Login) -> None:
        self._kube, self._allowed, self._login = kube, tuple(allowed), login
        self._clients: dict[tuple[str, str], tuple[tuple[KeyManagement, bytes], TransitClient]] = {}
        """By namespace and domain id: a namespace that claims another domain's id does not get that one's client."""
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        """By address: the limit of concurrent requests, shared by all namespaces."""
        self._closed = False

    async def client(self, kms_domain: KmsDomain) -> TransitClient:
        """Return the client for a domain's keys. Raises CustodyError. A client that it replaces is closed."""
        allowed = self._allowed_for(kms_domain.kms).authority
        authority = kms_domain.authority if allowed == FROM_NAMESPACE else allowed.encode()
        owner, about = (kms_domain.namespace, kms_domain.domain), (kms_domain.kms, authority)
        known = self._clients.get(owner)
        if known is not None and known[0] == about:
            return known[1]
        if self._closed:
            raise CustodyError("the operator is ending")
        kms = kms_domain.kms
        turns, namespace = self._turns[kms.address], kms.namespace or ""
        try:
            client = TransitClient(
                kms.address, authority, self._login(kms), mount=kms.mount, namespace=namespace, turns=turns
            )
        except (ValueError, ssl.SSLError) as error:
            raise CustodyError(f"the way to {kms.address} cannot be made: {error}") from error
        self._clients[owner] = (about, client)
        if known is not None:
            await known[1].close()
        return client

    async def close(self) -> None:
        self._closed, clients = True, [client for _, client in self._clients.values()]
        self._clients.clear()
        for client in clients:
            await client.close()

    async def forget(self, kms_domain: KmsDomain) -> None:
        if (known := self._clients.pop((kms_domain.namespace, kms_domain.domain), None)) is not None:
            await known[1].close()

    async def authority(self, namespace: str, kms: KeyManagement) -> bytes:
        """Return the authority of the service's certificate, in PEM. Raises CustodyError."""
        allowed, ref = self._allowed_for(kms), kms.authority_config_map_ref
        if allowed.authority != FROM_NAMESPACE:
            return allowed.authority.encode()
        if ref is None:
            raise CustodyError(
                f"spec.kms.authorityConfigMapRef is missing: the chart has no authority of {kms.address}"
            )
        with custody_errors(f"ConfigMap {ref.name} cannot be read"):
            found = await self._kube.get(CONFIG_MAP, namespace, ref.name)
        value = ((found or {}).get("data") or {}).get(ref.key)
        if not isinstance(value, str) or not value.isascii():
            raise CustodyError(f"ConfigMap {ref.name} does not exist, or has no certificate authority as {ref.key}")
        return value.encode()

    def _allowed_for(self, kms: KeyManagement) -> AllowedService:
        found = [one for one in self._allowed if one.allows(kms)]
        if not found:
            raise CustodyError(
                f"the operator's configuration does not allow {kms.address} with namespace {kms.namespace or 'none'}, "
                f"authMount {kms.auth_mount} and role {kms.role}: add it to kms.addresses of the chart"
            )
        allowed = next((one for one in found if one.authority), None)
        if allowed is None:
            raise CustodyError(
                f"the operator's configuration has no authority of {kms.address}: add the one that signed its "
                f"certificate, in PEM, as authority of its entry in kms.addresses of the chart, or {FROM_NAMESPACE}"
            )
        return allowed
