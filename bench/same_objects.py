"""The baseline of everything that is made: the same objects, created by a client that does nothing else.

It sends prepared bytes over as many connections as whoever applied what the operator made them of; nothing that
decides anything can be faster.
"""

from __future__ import annotations

import time
from typing import Any

from bench.apiserver import NAMESPACE, NAMESPACES, ApiServer, Request, created
from kvstrata.adapters.resources import CHILD_RESOURCES, SECRET, Resource
from kvstrata.objects import labels

MADE: tuple[Resource, ...] = (*CHILD_RESOURCES, SECRET)
"""What the operator makes of other objects."""

BASELINE_NAMESPACE = "baseline"
SERVER_FIELDS = ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields", "ownerReferences")


async def creates_per_second(server: ApiServer, label: str, connections: int) -> float:
    """Create the operator's objects that carry `label` anew in another namespace; return how many a second."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": BASELINE_NAMESPACE}}
    await server.send_all([created(NAMESPACES, None, body)], 1)
    by_owner: dict[str, list[Request]] = {}
    for resource in MADE:
        listed = await server.get(f"{resource.path(NAMESPACE)}?labelSelector={labels.OWNED_SELECTOR}")
        for item in listed["items"]:
            owner = item["metadata"]["labels"].get(label, "")
            if owner:
                by_owner.setdefault(owner, []).append(created(resource, BASELINE_NAMESPACE, _bare(item, resource)))
    requests = [request for owner in sorted(by_owner) for request in by_owner[owner]]
    started = time.monotonic()
    await server.send_all(requests, connections)
    return len(requests) / (time.monotonic() - started)


def _bare(item: dict[str, Any], resource: Resource) -> dict[str, Any]:
    """Return an object as somebody would create it."""
    kept = {key: value for key, value in item["metadata"].items() if key not in SERVER_FIELDS}
    kept["namespace"] = BASELINE_NAMESPACE
    bare = {**item, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": kept}
    bare.pop("status", None)
    if resource.kind == "Service":
        bare["spec"] = {k: v for k, v in item["spec"].items() if k not in ("clusterIP", "clusterIPs")}
    return bare
