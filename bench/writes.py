"""Counting writes where they cannot be hidden: in the API server."""

from __future__ import annotations

import re

from bench.apiserver import ApiServer, Request
from kvstrata.clients.resources import CHILD_RESOURCES, EVENT, OWN_RESOURCES, SECRET

WRITING_VERBS = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})
COUNTED = frozenset(resource.plural for resource in (*OWN_RESOURCES, *CHILD_RESOURCES, SECRET, EVENT))
"""Resources an operator may write except its Lease; the API server's own loops write none of these after its start."""

_LABEL = re.compile(r'(\w+)="([^"]*)"')


async def writes_so_far(server: ApiServer) -> int:
    """Return how many writing requests the API server has answered for resources that an operator writes.

    Requests that changed nothing and requests that were refused count, too.
    """
    async with server.connected() as connection:
        page = (await connection.exchange(Request("GET", "/metrics", accept="text/plain"))).decode()
    return int(sum(_counted(line) for line in page.splitlines() if line.startswith("apiserver_request_total{")))


def _counted(line: str) -> float:
    labels = dict(_LABEL.findall(line))
    if labels["verb"] in WRITING_VERBS and labels["resource"] in COUNTED:
        return float(line.rpartition(" ")[2])
    return 0.0
