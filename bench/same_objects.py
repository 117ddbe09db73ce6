"""The baseline of everything that is made: the same objects, written by a client that does nothing else.

It sends prepared objects with the operator's own HTTP library, over as many connections as the benchmark applied their
sources with, so no program that decides anything can be faster. Two ways: created, the cheapest write there is, and
applied on the server's side, as the operator writes them, because only that removes fields that it no longer wants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.apiserver import NAMESPACE, NAMESPACES, ApiServer, Request, applied, created
from kvstrata.clients.resources import CHILD_RESOURCES, SECRET, Resource
from kvstrata.objects import labels

MADE: tuple[Resource, ...] = (*CHILD_RESOURCES, SECRET)
"""Objects that the operator creates from other objects."""

SERVER_FIELDS = ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields", "ownerReferences")


async def creates_per_second(server: ApiServer, label: str, connections: int) -> float:
    """Create copies of the operator's objects that carry `label` in another namespace; return how many a second."""
    return await _per_second(server, label, connections, "created", created)


async def applies_per_second(server: ApiServer, label: str, connections: int) -> float:
    """Apply them on the server's side in another namespace; return how many a second."""
    return await _per_second(server, label, connections, "applied", applied)


async def _per_second(
    server: ApiServer,
    label: str,
    connections: int,
    namespace: str,
    write: Callable[[Resource, str, dict[str, Any]], Request],
) -> float:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await server.send_all([created(NAMESPACES, None, body)], 1)
    by_owner: dict[str, list[Request]] = {}
    for resource in MADE:
        listed = await server.get(f"{resource.path(NAMESPACE)}?labelSelector={labels.OWNED_SELECTOR}")
        for item in listed["items"]:
            owner = item["metadata"]["labels"].get(label, "")
            if owner:
                by_owner.setdefault(owner, []).append(write(resource, namespace, _bare(item, resource, namespace)))
    requests = [request for owner in sorted(by_owner) for request in by_owner[owner]]
    started = time.monotonic()
    await server.send_all(requests, connections)
    return len(requests) / (time.monotonic() - started)


def _bare(item: dict[str, Any], resource: Resource, namespace: str) -> dict[str, Any]:
    """Return an object as a user would create it."""
    kept = {key: value for key, value in item["metadata"].items() if key not in SERVER_FIELDS}
    kept["namespace"] = namespace
    bare = {**item, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": kept}
    bare.pop("status", None)
    if resource.kind == "Service":
        bare["spec"] = {k: v for k, v in item["spec"].items() if k not in ("clusterIP", "clusterIPs")}
    return bare
