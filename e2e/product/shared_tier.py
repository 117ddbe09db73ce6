"""Room in the demo's shared tier: it refuses new blocks when it is full, and stored blocks live for hours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.api.scalars import Quantity

from .chapters import ACME_KEY, Stage
from .install import DEMO_NAMESPACE, unsettled
from .kubectl import CommandError, Kubectl, wait_until
from .prompts import shared

TIER = "shared"
SERVER = "kvs-shared-redis-0-0"
LEAST_ROOM_PERCENT = 60


def make_room(stage: Stage) -> None:
    """Empty the shared tier if it is rather full, and return once each replica finds the other's blocks in it."""
    if _used_percent(stage.kubectl) > 100 - LEAST_ROOM_PERCENT:
        empty(stage)
    else:
        _wait_until_replicas_share(stage)


@contextmanager
def roomy(stage: Stage, tenant: str) -> Iterator[None]:
    """A tier with room, and a tenant whose policy has no limit there meanwhile: nothing of its blocks is evicted."""
    make_room(stage)
    budgets = stage.kubectl.get("tenantcachepolicy", tenant, DEMO_NAMESPACE)["spec"]["budgets"]
    unlimited = [{name: value for name, value in one.items() if name != "limit"} for one in budgets]
    _set_budgets(stage.kubectl, tenant, unlimited)
    try:
        yield
    finally:
        _set_budgets(stage.kubectl, tenant, budgets)


def _set_budgets(kubectl: Kubectl, tenant: str, budgets: list[dict[str, str]]) -> None:
    patch = json.dumps({"spec": {"budgets": budgets}})
    kubectl.run("-n", DEMO_NAMESPACE, "patch", "tenantcachepolicy", tenant, "--type", "merge", "-p", patch)
    wait_until("the budgets are enforced", lambda: not unsettled(kubectl))


def empty(stage: Stage) -> None:
    """Empty the shared tier. Blocks of deleted pools and tenants fill it until they expire."""
    stage.kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", SERVER)
    wait_until("the tier's server is back", lambda: _is_ready(stage.kubectl))
    _wait_until_replicas_share(stage)


def _used_percent(kubectl: Kubectl) -> int:
    """Return the percentage of the tier's capacity that its status reports as used; 100 while it reports nothing."""
    status = kubectl.get("cachetier", TIER, DEMO_NAMESPACE)["status"]
    if not status.get("used"):
        return 100
    return 100 * Quantity(status["used"]).in_bytes // Quantity(status["capacity"]).in_bytes


def _is_ready(kubectl: Kubectl) -> bool:
    try:
        pod = kubectl.get("pod", SERVER, DEMO_NAMESPACE)
    except CommandError:
        return False
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())
    return ready and "deletionTimestamp" not in pod["metadata"]


def _wait_until_replicas_share(stage: Stage) -> None:
    for leads, follows in ((stage.first, stage.second), (stage.second, stage.first)):
        shared(leads, follows, ACME_KEY)
