"""Watching objects, to see when a write took effect."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config

from kvstrata.adapters.kube import Kube
from kvstrata.adapters.resources import Resource


async def connect(kubeconfig: Path) -> Kube:
    """Return a client for a kubeconfig."""
    configuration = aio_client.Configuration()
    await aio_config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    return Kube(aio_client.ApiClient(configuration))


async def watch(kubeconfig: Path, resource: Resource, namespace: str) -> AsyncIterator[Mapping[str, Any]]:
    """Yield every event of a collection from now on."""
    cluster = _load(kubeconfig)
    server = cluster["clusters"][0]["cluster"]["server"]
    async with aiohttp.ClientSession(read_bufsize=2**21) as session:
        url = f"{server}{resource.path(namespace)}"
        async with session.get(
            url,
            params={"watch": "true"},
            ssl=_tls(cluster),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                yield json.loads(line)


class LastSeen:
    """Follows a collection and wakes whoever waits for a state of one of its objects."""

    def __init__(self, kubeconfig: Path, resource: Resource, namespace: str) -> None:
        self._source = watch(kubeconfig, resource, namespace)
        self._objects: dict[str, Mapping[str, Any]] = {}
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Follow until cancelled."""
        async for event in self._source:
            found = event["object"]
            async with self._changed:
                self._objects[found["metadata"]["name"]] = found
                self._changed.notify_all()

    async def wait(self, name: str, holds: Any, timeout_s: float) -> Mapping[str, Any]:
        """Return the object once `holds(object)` is true. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._changed:
            while not (name in self._objects and holds(self._objects[name])):
                await self._changed.wait()
            return self._objects[name]


def _load(kubeconfig: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    return loaded


def _tls(cluster: Mapping[str, Any]) -> ssl.SSLContext:
    def decode(section: Mapping[str, Any], name: str) -> bytes:
        return (
            base64.b64decode(section[f"{name}-data"]) if f"{name}-data" in section else Path(section[name]).read_bytes()
        )

    user = cluster["users"][0]["user"]
    context = ssl.create_default_context(
        cadata=decode(cluster["clusters"][0]["cluster"], "certificate-authority").decode()
    )
    with tempfile.NamedTemporaryFile() as pair:
        pair.write(decode(user, "client-certificate") + b"\n" + decode(user, "client-key"))
        pair.flush()
        context.load_cert_chain(pair.name)
    return context
