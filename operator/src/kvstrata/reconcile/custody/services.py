"""Ways to key management services, as CacheDomains name them and as whoever runs the operator allows.

The operator shows a token of its own to a service. So it does that at no address that a namespace chose by itself: its
owner could take the token, and be the operator elsewhere.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.resources import CONFIG_MAP
from kvstrata.adapters.transit import Tokens, TransitClient
from kvstrata.adapters.transit_tokens import KubernetesLogin
from kvstrata.api.cachedomain import KeyManagement

from . import CustodyError

Login = Callable[[KeyManagement], Tokens]
"""How the operator proves to a service who it is."""


def by_service_account(token_file: Path) -> Login:
    """Log in with the service account's token in this file, which the kubelet renews."""

    def login(kms: KeyManagement) -> Tokens:
        return KubernetesLogin(kms.role, token_file, method=kms.auth_mount or "kubernetes")

    return login


class KmsServices:
    """Clients of services, kept for as long as what is said of them stays the same. `allowed` are addresses."""

    def __init__(self, kube: Kube, allowed: tuple[str, ...], login: Login) -> None:
        self._kube, self._allowed, self._login = kube, frozenset(one.rstrip("/") for one in allowed), login
        self._clients: dict[str, tuple[tuple[KeyManagement, bytes], TransitClient]] = {}

    async def client(self, namespace: str, kms: KeyManagement) -> TransitClient:
        """Return the client of a namespace. Raises CustodyError if there can be none."""
        if kms.address not in self._allowed:
            raise CustodyError(
                f"whoever runs the operator has not allowed {kms.address}: it is to be in kms.addresses of the chart"
            )
        about = (kms, await self._authority(namespace, kms))
        known = self._clients.get(namespace)
        if known is not None and known[0] == about:
            return known[1]
        if known is not None:
            await known[1].close()
        try:
            client = TransitClient(
                kms.address, about[1], self._login(kms), mount=kms.mount or "transit", namespace=kms.namespace or ""
            )
        except (ValueError, ssl.SSLError) as error:
            raise CustodyError(f"the way to {kms.address} cannot be made: {error}") from error
        self._clients[namespace] = (about, client)
        return client

    async def close(self) -> None:
        """Close every connection."""
        for _, client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _authority(self, namespace: str, kms: KeyManagement) -> bytes:
        ref = kms.authority_config_map_ref
        try:
            found = await self._kube.get(CONFIG_MAP, namespace, ref.name)
        except KubeError as error:
            raise CustodyError(f"ConfigMap {ref.name} cannot be read: {error.status} {error.reason}") from error
        value = ((found or {}).get("data") or {}).get(ref.key)
        if not isinstance(value, str) or not value.isascii():
            raise CustodyError(f"ConfigMap {ref.name} does not exist, or has no certificate authority as {ref.key}")
        return value.encode()
