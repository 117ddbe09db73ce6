"""Credentials: the pod's service account, or else the kubeconfig, whose `exec` plugins are not run."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import getproxies

import aiohttp
import kopf

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_READ_EVERY_S = 60.0
"""The kubelet renews a token long before it expires."""
CONNECTIONS = 64


class NoCredentialsError(Exception):
    """Neither a service account nor a usable kubeconfig was found."""


@dataclass(slots=True)
class Credentials:
    """An API server and how to authenticate to it. `server` is a URL without a trailing slash. `headers`
    authenticate where there is no `token_file`."""

    server: str
    tls: ssl.SSLContext | None = None
    token_file: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    proxy: str | None = None
    monotonic: Callable[[], float] = time.monotonic
    _token: str = ""
    _read_at: float = float("-inf")

    def authorization(self) -> Mapping[str, str]:
        if self.token_file is None:
            return self.headers
        now = self.monotonic()
        if now - self._read_at >= TOKEN_READ_EVERY_S:
            try:
                self._token = self.token_file.read_text(encoding="ascii").strip()
            except OSError:
                if not self._token:
                    raise
            self._read_at = now
        return {"Authorization": f"Bearer {self._token}"}

    def session(
        self,
        response_class: type[aiohttp.ClientResponse] = aiohttp.ClientResponse,
        *,
        connections: int = CONNECTIONS,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientSession:
        """Return a new HTTP session for the running event loop; `connections` 0 is no limit."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self.tls if self.tls is not None else True, limit=connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=response_class,
            # The API server is near: compressing its lists costs more than sending them.
            headers={"Accept-Encoding": "identity", **(headers or {})},
            # With trust_env, every request looks for a netrc file in another thread, half of the cost of a request.
            trust_env=bool(getproxies()),
            proxy=self.proxy,
        )


def find_credentials(
    environment: Mapping[str, str] | None = None, service_account: Path = SERVICE_ACCOUNT
) -> Credentials:
    """Return the pod's credentials, or else those of the current kubeconfig. Raises NoCredentialsError."""
    env = os.environ if environment is None else environment
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT")
    token_file = service_account / "token"
    if host and port and token_file.is_file():
        address = f"[{host}]" if ":" in host else host
        tls = ssl.create_default_context(cafile=str(service_account / "ca.crt"))
        return Credentials(f"https://{address}:{port}", tls, token_file)
    try:
        found = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
    except Exception as error:  # whatever a broken file makes of its reader
        raise NoCredentialsError(f"the kubeconfig cannot be used: {error!r}") from error
    if found is None or not found.server:
        raise NoCredentialsError("there is neither a service account nor a kubeconfig with a current context")
    verified = found.as_ssl_context() if found.server.startswith("https:") else None
    return Credentials(found.server.rstrip("/"), verified, headers=found.as_http_headers(), proxy=found.proxy_url)
