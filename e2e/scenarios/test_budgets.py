"""A tenant at its limits: it keeps them while it asks for more, and loses only its own oldest blocks."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from e2e.product.chapters import ACME_KEY, STORE_SETTLES_S, WHOLE_CHUNKS, Stage, fresh_prompt, keyspace_of
from e2e.product.direct import HEALTH_PORT, container_pid, scrape
from e2e.product.guest import guest
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.shared_tier import TIER, make_room
from e2e.product.tier_contents import tier_contents
from e2e.product.traffic import Caller, traffic
from kvstrata.api.scalars import Quantity
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS

pytestmark = pytest.mark.cluster

TENANT = "hoarder"
MEMORY = "cpu"
MEMORY_LIMIT_BYTES = 4 << 20
LIMIT_BYTES = 8 << 20
BUDGETS = [{"tier": MEMORY, "limit": "4Mi"}, {"tier": TIER, "limit": "8Mi"}]
PROMPTS = 20
"""Asked for the first time, each is 1.8 MB of blocks: several times the tenant's limits."""

ATTEMPTS = 3
REPORTED_WITHIN_S = 120.0
"""Pods look at a scope each minute, and gates ask for metrics every 15 s."""


def test_a_tenant_at_its_limit_stays_at_it_and_nobody_else_loses_a_block(near: Stage, kubectl: Kubectl) -> None:
    make_room(near)
    known = fresh_prompt("acme keeps")
    near.ask(near.first, ACME_KEY, known)
    time.sleep(STORE_SETTLES_S)
    with guest(near, TENANT, {"budgets": BUDGETS}) as key, tier_contents(kubectl) as tier:
        keyspace = keyspace_of(kubectl, TENANT)
        most = 0
        callers = [Caller(where, TENANT, key, lambda: fresh_prompt("more")) for where in (near.first, near.second)]
        with traffic(*callers, pause_s=0.1) as running:
            while len(running.account.served) < PROMPTS:
                held = tier.held_bytes(keyspace)
                assert held <= LIMIT_BYTES, f"{held} bytes are stored and reserved"
                most = max(most, held)
        assert not running.account.failed, str(running.account)
        assert most > LIMIT_BYTES // 2, f"it never came near its limit: {most}"

        # Its newest blocks are there, in place of its oldest; so are acme's blocks from before all that.
        # On a busy machine a store or a lookup may be late, and then a block is a miss: so of a few prompts one.
        found_by_attempt = []
        for _ in range(ATTEMPTS):
            newest = fresh_prompt("newest")
            near.ask(near.first, key, newest)
            time.sleep(STORE_SETTLES_S)
            found_by_attempt.append(near.ask(near.second, key, newest)[1])
            if found_by_attempt[-1].external == WHOLE_CHUNKS:
                break
        assert found_by_attempt[-1].external == WHOLE_CHUNKS, found_by_attempt
        _, found = near.ask(near.second, ACME_KEY, known)
        assert found.external == WHOLE_CHUNKS, f"acme lost blocks: {found}"
        stored = sum(len(block.value) for block in tier.blocks(keyspace))
        assert 0 < stored <= tier.held_bytes(keyspace) <= LIMIT_BYTES

        # The pods' memory is under its limit as well; both are seen from outside: in metrics, and in status.
        scope = keyspace[:SCOPE_DIGITS]
        wait_until(
            "evictions are counted", lambda: _evicted(near, scope, "kvstrata_cache_blocks_total"), REPORTED_WITHIN_S
        )
        wait_until(
            "the memory's, too", lambda: _evicted(near, scope, "kvstrata_cache_memory_evicted_total"), REPORTED_WITHIN_S
        )
        for page in _pages(near):
            assert _sum(page, "kvstrata_gate_memory_used_bytes", scope) <= MEMORY_LIMIT_BYTES
        usage = wait_until("status reports usage", lambda: _usage(kubectl), REPORTED_WITHIN_S)
        assert Quantity(usage[MEMORY]["used"]).in_bytes <= MEMORY_LIMIT_BYTES
        assert LIMIT_BYTES // 2 <= Quantity(usage[TIER]["used"]).in_bytes <= LIMIT_BYTES
        within = kubectl.condition("tenantcachepolicy", TENANT, DEMO_NAMESPACE, "WithinBudget")
        assert (within["status"], within["reason"]) == ("True", "BudgetsEnforced"), within
        shown = kubectl.run("-n", DEMO_NAMESPACE, "get", "tcpol", TENANT)
        assert re.search(rf"{TENANT} +1[012]Mi +12Mi +2/2 +True", shown), shown
        near.report(f"{running.account}; at most {most >> 20} MiB at any instant\n{shown}")


def _usage(kubectl: Kubectl) -> dict[str, dict[str, Any]] | None:
    """Return the rows of the tenant's usage, once both tiers are reported."""
    status = kubectl.get("tenantcachepolicy", TENANT, DEMO_NAMESPACE).get("status") or {}
    rows = {row["tier"]: row for row in (status.get("usage") or {}).get("tiers") or ()}
    return rows if all("used" in rows.get(name, {}) for name in (MEMORY, TIER)) else None


def _evicted(stage: Stage, scope: str, metric: str) -> bool:
    what = 'cause="limit"' if "memory" in metric else 'operation="evicted"'
    return any(_sum(page, metric, scope, what) > 0 for page in _pages(stage))


def _pages(stage: Stage) -> list[str]:
    """Return both gates' pages of metrics."""
    pods = (stage.first.pod, stage.second.pod)
    return [scrape(container_pid(stage.kubectl, DEMO_NAMESPACE, pod, "gate"), HEALTH_PORT) for pod in pods]


def _sum(page: str, metric: str, scope: str, label: str = "") -> float:
    lines = [line for line in page.splitlines() if line.startswith(f"{metric}{{") and f'scope="{scope}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)
