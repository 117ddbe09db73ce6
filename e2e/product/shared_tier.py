"""Room in the demo's shared tier: it refuses new blocks when it is full, and stored blocks live for hours."""

from __future__ import annotations

import time

from kvstrata.api.scalars import Quantity

from .chapters import ACME_KEY, STORE_SETTLES_S, WHOLE_CHUNKS, Stage, fresh_prompt
from .install import DEMO_NAMESPACE
from .kubectl import CommandError, Kubectl, wait_until

TIER = "shared"
SERVER = "kvs-shared-redis-0-0"
LEAST_ROOM_PERCENT = 60
HEALS_WITHIN_S = 120


def make_room(stage: Stage) -> None:
    """Empty the shared tier if it is rather full, and return once one replica finds another's blocks in it."""
    if _used_percent(stage.kubectl) > 100 - LEAST_ROOM_PERCENT:
        empty(stage)
    else:
        wait_until("replicas share", lambda: _share(stage), HEALS_WITHIN_S)


def empty(stage: Stage) -> None:
    """Empty the shared tier. Blocks of deleted pools and tenants fill it until they expire."""
    stage.kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", SERVER)
    wait_until("the tier's server is back", lambda: _is_ready(stage.kubectl), HEALS_WITHIN_S)
    wait_until("replicas share", lambda: _share(stage), HEALS_WITHIN_S)


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


def _share(stage: Stage) -> bool:
    for one, other in ((stage.first, stage.second), (stage.second, stage.first)):
        prompt = fresh_prompt("room")
        one.complete(ACME_KEY, prompt)
        time.sleep(STORE_SETTLES_S)
        if other.complete(ACME_KEY, prompt).cached_tokens < WHOLE_CHUNKS:
            return False
    return True
