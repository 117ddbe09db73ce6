"""A real API server for one benchmark, and the benchmark's own client.

etcd and kube-apiserver run as processes of this machine; no controller of Kubernetes and no kubelet does, so all
writes come from the benchmark, its stand-ins or the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTResponse
from kubernetes.aio.config import load_kube_config

from e2e.cluster.build import build_binaries
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.processes import recorded_pid
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Paths, kubebuilder_assets
from kvstrata.clients.kube_auth import authorization, open_api
from kvstrata.clients.resources import Resource

REPOSITORY = Path(__file__).resolve().parents[1]
OPERATOR_NAMESPACE = "kvstrata-system"
NAMESPACE = "bench"
"""Where the benchmark's objects are."""

CRD = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
NAMESPACES = Resource("v1", "Namespace", "namespaces")
CRD_TIMEOUT_S = 30.0


class RefusedError(Exception):
    """The API server refused a request of the benchmark."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `path` starts with a slash."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    accept: str = "application/json"


class Connection:
    """A client of the API server, as administrator."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def send(self, request: Request) -> dict[str, Any]:
        """Send a request and return the decoded answer. Raises RefusedError or OSError."""
        decoded: dict[str, Any] = orjson.loads(await self.exchange(request))
        return decoded

    async def exchange(self, request: Request) -> bytes:
        """Send a request and return the answer's body. Raises RefusedError or OSError."""
        answer = await self._answer(request)
        return bytes(await answer.read())

    async def lines(self, request: Request) -> AsyncIterator[bytes]:
        """Send a watch and yield its lines until the server ends it. Raises RefusedError or OSError."""
        answer = await self._answer(request)
        async for line in answer.response.content:
            yield line

    async def close(self) -> None:
        await self._api.close()

    async def _answer(self, request: Request) -> RESTResponse:
        answer = await self._api.call_api(
            request.method,
            f"{self._api.configuration.host}{request.path}",
            {
                "Content-Type": request.content_type,
                "Accept": request.accept,
                **await authorization(self._api.configuration),
            },
            request.body,
            _request_timeout=aiohttp.ClientTimeout(total=None),
        )
        if not 200 <= answer.status <= 299:
            reason = (await answer.read())[:500].decode(errors="replace")
            raise RefusedError(f"{request.method} {request.path}: {answer.status} {reason}")
        return answer


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Access to an API server as administrator."""

    kubeconfig: Path

    async def connect(self) -> Connection:
        """Return a new client."""
        configuration = Configuration()
        await load_kube_config(str(self.kubeconfig), client_configuration=configuration, persist_config=False)
        return Connection(open_api(configuration))

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """Give a client to the block, and close it after."""
        connection = await self.connect()
        try:
            yield connection
        finally:
            await connection.close()

    async def send_all(self, requests: Sequence[Request], connections: int) -> None:
        """Send every request, over that many connections at once. Raises RefusedError for the first refusal."""
        left = iter(requests)

        async def work(connection: Connection) -> None:
            for request in left:
                await connection.exchange(request)

        async with self.connected() as connection, asyncio.TaskGroup() as group:
            for _ in range(min(connections, len(requests))):
                group.create_task(work(connection))

    async def get(self, path: str) -> dict[str, Any]:
        """Return the object or list at a path."""
        async with self.connected() as connection:
            return await connection.send(Request("GET", path))


@dataclass(frozen=True, slots=True)
class ApiServer(ApiAccess):
    """An API server that runs for a benchmark alone."""

    host: str
    port: int
    authority_file: Path

    def pids(self) -> list[int]:
        """The process ids of API server and etcd."""
        files = (self.kubeconfig.parents[1] / "pid" / name for name in ("kube-apiserver", "etcd"))
        return [pid for file in files if (pid := recorded_pid(file)) is not None]

    async def prepare(self) -> None:
        """Install the CRDs and make the namespaces."""
        paths = sorted((REPOSITORY / "crds").glob("*.yaml"))
        definitions = [found for path in paths for found in yaml.safe_load_all(path.read_text()) if found]
        namespaces = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            for name in (OPERATOR_NAMESPACE, NAMESPACE)
        ]
        await self.send_all([created(CRD, None, body) for body in definitions], 4)
        await self.send_all([created(NAMESPACES, None, body) for body in namespaces], 2)
        deadline = time.monotonic() + CRD_TIMEOUT_S
        for body in definitions:
            spec = body["spec"]
            kind = Resource(f"{spec['group']}/{spec['versions'][0]['name']}", "", spec["names"]["plural"])
            while not await self._serves(kind):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the API server does not serve {kind.plural} after {CRD_TIMEOUT_S:g} s")
                await asyncio.sleep(0.1)

    async def _serves(self, resource: Resource) -> bool:
        try:
            await self.get(resource.path(NAMESPACE))
        except RefusedError:
            return False
        return True


@contextlib.contextmanager
def running_api_server(progress: Progress) -> Iterator[ApiServer]:
    """Run an API server while the block runs; its files are in a temporary folder and gone after.

    The programs come from KUBEBUILDER_ASSETS, else they are built first. Raises ClusterError.
    """
    if kubebuilder_assets() is None:
        build_binaries(Paths(), progress)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder, ControlPlane(Path(folder)) as plane:
        address = yaml.safe_load(plane.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        host, port = address.removeprefix("https://").rsplit(":", 1)
        yield ApiServer(plane.kubeconfig, host, int(port), plane.pki.crt("ca"))


def created(resource: Resource, namespace: str | None, body: Mapping[str, Any]) -> Request:
    """Return the request that creates an object."""
    return Request("POST", resource.path(namespace), body)


def applied(resource: Resource, namespace: str, body: Mapping[str, Any]) -> Request:
    """Return the request that applies an object on the server's side."""
    path = f"{resource.path(namespace, body['metadata']['name'])}?fieldManager=bench&force=true"
    return Request("PATCH", path, body, "application/apply-patch+yaml")


def merged(path: str, patch: Mapping[str, Any]) -> Request:
    """Return the request that merges `patch` into the object at `path`."""
    return Request("PATCH", path, patch, "application/merge-patch+json")
