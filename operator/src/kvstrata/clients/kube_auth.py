"""Access to the API server as the pod's service account, or else by the kubeconfig, through kubernetes.aio."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from contextlib import suppress
from typing import Any
from urllib.request import getproxies

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, kube_config, load_incluster_config

log = logging.getLogger(__name__)

CONNECTIONS = 64


class NoCredentialsError(Exception):
    """Neither a service account nor a usable kubeconfig was found."""


async def find_api(**session: Any) -> ApiClient:
    """Return a client with the pod's credentials, or else the kubeconfig's. Raises NoCredentialsError."""
    configuration = Configuration("")
    try:
        try:
            load_incluster_config(configuration)
        except ConfigException:  # not in a pod
            await _load_kubeconfig(configuration)
        if not configuration.host:
            raise NoCredentialsError
        return open_api(configuration, **session)
    except Exception as error:  # any error of the reader; messages may quote the file, with its tokens
        reason = f"there is neither a service account nor a usable kubeconfig ({type(error).__name__})"
        raise NoCredentialsError(reason) from None
    finally:
        kube_config._cleanup_temp_files()  # certificates and keys of the kubeconfig, which are loaded by now


async def _load_kubeconfig(configuration: Configuration) -> None:
    merged = kube_config.KubeConfigMerger(os.environ.get("KUBECONFIG") or "~/.kube/config").config
    for user in merged.value["users"]:
        # The library would send a refresh token to an issuer whose certificate it does not verify.
        (((user.value.get("user") or {}).get("auth-provider") or {}).get("config") or {}).pop("refresh-token", None)
    loader = kube_config.KubeConfigLoader(merged)
    await loader.load_and_set(configuration)
    if hasattr(loader, "exec_plugin_expiry"):
        turn = asyncio.Lock()

        async def renew(renewed: Configuration) -> None:
            async with turn:
                await loader.load_from_exec_plugin()  # runs the plugin if its token expires soon
            renewed.api_key["BearerToken"] = loader.token

        configuration.refresh_api_key_hook = renew  # type: ignore[assignment]


def open_api(configuration: Configuration, *, connections: int = CONNECTIONS, **session: Any) -> ApiClient:
    """Return a client for the running event loop. `connections` 0 is no limit, `session` goes to its HTTP session."""
    configuration.connection_pool_maxsize = connections
    configuration.client_session_kwargs = {
        "cookie_jar": aiohttp.DummyCookieJar(),
        # The API server is near: compressing its lists costs more than sending them.
        "headers": {"Accept-Encoding": "identity"},
        # With trust_env, every request looks for a netrc file in another thread, half of the cost of a request.
        "trust_env": bool(getproxies()),
        "proxy": configuration.proxy,
        **session,
    }
    api = ApiClient(configuration)
    configuration.client_session_kwargs["middlewares"] = (_refuse_redirect, _trust_renewed(api))
    return api


def _trust_renewed(api: ApiClient) -> aiohttp.ClientMiddlewareType:
    """Return the middleware for an API server whose authority was replaced: Kubernetes writes the new one into the file
    of the first, which is read again when the server's certificate is not trusted. A file that is not whole changes
    nothing; authorities that it lacks now are trusted until the process ends."""

    async def ask(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        try:
            return await send(request)
        except aiohttp.ClientConnectorCertificateError:
            file = api.configuration.ssl_ca_cert
            if file is None:
                raise
            try:
                ssl.create_default_context(cafile=file)
                api.rest_client.ssl_context.load_verify_locations(file)
            except OSError as error:
                log.warning("the API server's authority cannot be read", extra={"file": file, "error": str(error)})
            return await send(request)

    return ask


async def _refuse_redirect(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    answer = await send(request)
    if 300 <= answer.status <= 399:  # It could take a body with Secrets to another server.
        answer.close()
        raise aiohttp.TooManyRedirects(answer.request_info, ())
    return answer


async def authorization(configuration: Configuration) -> dict[str, str]:
    """Return the headers that authenticate. A token that cannot be renewed for a moment stays in use."""
    with suppress(OSError, ConfigException):
        await configuration.get_api_key_with_prefix("BearerToken")
    token = configuration.api_key.get("BearerToken")
    return {"Authorization": token.strip()} if token else {}
