"""A tenant at its limits: it keeps them while it asks for more, and loses only its own oldest blocks."""

from __future__ import annotations

import re
import time

import pytest

from e2e.product.chapters import ACME_KEY, SPARE, Stage, keyspace_of
from e2e.product.direct import HEALTH_PORT, container_pid, scrape
from e2e.product.guest import guest
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import finds, fresh_prompt, shared, stored
from e2e.product.shared_tier import TIER, make_room
from e2e.product.tier_contents import TierContents, tier_contents
from e2e.product.traffic import Caller, traffic
from kvstrata.api.scalars import Quantity
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.claim("a tenant at its limits stays at them while engines run, and its neighbour's hits stay"),
]

TENANT = "hoarder"
MEMORY = "cpu"
MEMORY_LIMIT_BYTES = 12 << 20
LIMIT_BYTES = 24 << 20
BUDGETS = [{"tier": MEMORY, "limit": "12Mi"}, {"tier": TIER, "limit": "24Mi"}]
PROMPTS = 20
"""Asked for the first time, each is 9 MB of blocks: several times the tenant's limits."""

LOOKED_AT_EVERY_S = 0.02

SHOWN_WITHIN_S = 900.0
"""Status shows a tier's first size at once, which may be of the first prompts, and another after five minutes."""


def test_a_tenant_at_its_limit_stays_at_it_and_nobody_else_loses_a_block(near: Stage, kubectl: Kubectl) -> None:
    make_room(near)
    known = stored(near.first, ACME_KEY, SPARE)
    with guest(near, TENANT, {"budgets": BUDGETS}) as key, tier_contents(kubectl) as tier:
        keyspace = keyspace_of(kubectl, TENANT)
        scope = keyspace[:SCOPE_DIGITS]
        evicted = _evictions(near, scope)
        most = 0
        callers = [Caller(where, TENANT, key, fresh_prompt) for where in (near.first, near.second)]
        with traffic(*callers, pause_s=0.1) as running:
            while len(running.account.served) < PROMPTS:
                held = tier.held_bytes(keyspace)
                assert held <= LIMIT_BYTES, f"{held} bytes are stored and reserved"
                most = max(most, held)
                time.sleep(LOOKED_AT_EVERY_S)
        assert not running.account.failed, str(running.account)
        assert most > LIMIT_BYTES // 2, f"it never came near its limit: {most}"

        # Its newest blocks are there, in place of its oldest; so are acme's blocks from before all that.
        shared(near.first, near.second, key)
        finds(near.second, ACME_KEY, known)
        assert tier.held_bytes(keyspace) <= LIMIT_BYTES
        # Two looks, between which the last blocks may arrive.
        wait_until("stored blocks are accounted for", lambda: 0 < _stored(tier, keyspace) <= tier.held_bytes(keyspace))

        # The pods' memory is under its limit as well; both are seen from outside: in metrics, and in status.
        wait_until("evictions are counted", lambda: _evictions(near, scope)[0] > evicted[0])
        wait_until("the memory's, too", lambda: _evictions(near, scope)[1] > evicted[1])
        # Pages are seconds old, and a new block is there for a moment beside those that go for it.
        wait_until("both memories are within the limit", lambda: max(_in_memory(near, scope)) <= MEMORY_LIMIT_BYTES)
        used = wait_until("status reports that it is near its limit", lambda: _near_the_limit(kubectl), SHOWN_WITHIN_S)
        assert used[TIER] <= LIMIT_BYTES
        within = kubectl.condition("tenantcachepolicy", TENANT, DEMO_NAMESPACE, "WithinBudget")
        assert (within["status"], within["reason"]) == ("True", "BudgetsEnforced"), within
        shown = kubectl.run("-n", DEMO_NAMESPACE, "get", "tcpol", TENANT)
        assert re.search(rf"{TENANT} +[0-9]+Mi +36Mi +2/2 +True", shown), shown
        near.report(f"{running.account}; at most {most >> 20} MiB at any instant\n{shown}")


def _near_the_limit(kubectl: Kubectl) -> dict[str, int] | None:
    """Return the tenant's used bytes by tier, once most of its limit on the shared tier is reported, and no more than
    its limit in memory."""
    status = kubectl.get("tenantcachepolicy", TENANT, DEMO_NAMESPACE).get("status") or {}
    rows = (status.get("usage") or {}).get("tiers") or ()
    used = {row["tier"]: Quantity(row["used"]).in_bytes for row in rows if "used" in row}
    within = used.get(MEMORY, MEMORY_LIMIT_BYTES + 1) <= MEMORY_LIMIT_BYTES
    return used if within and used.get(TIER, 0) > LIMIT_BYTES // 2 else None


def _stored(tier: TierContents, keyspace: str) -> int:
    return sum(len(block.value) for block in tier.blocks(keyspace))


def _in_memory(stage: Stage, scope: str) -> list[float]:
    return [_sum(page, "kvstrata_gate_memory_used_bytes", scope) for page in _pages(stage)]


def _evictions(stage: Stage, scope: str) -> tuple[float, float]:
    """Return how many blocks of a scope were evicted from the shared tier, and from both pods' memory, up to now."""
    pages = _pages(stage)
    shared_tier = sum(_sum(page, "kvstrata_cache_blocks_total", scope, 'operation="evicted"') for page in pages)
    memory = sum(_sum(page, "kvstrata_cache_memory_evicted_total", scope, 'cause="limit"') for page in pages)
    return shared_tier, memory


def _pages(stage: Stage) -> list[str]:
    """Return both gates' pages of metrics."""
    pods = (stage.first.pod, stage.second.pod)
    return [scrape(container_pid(stage.kubectl, DEMO_NAMESPACE, pod, "gate"), HEALTH_PORT) for pod in pods]


def _sum(page: str, metric: str, scope: str, label: str = "") -> float:
    lines = [line for line in page.splitlines() if line.startswith(f"{metric}{{") and f'scope="{scope}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)
