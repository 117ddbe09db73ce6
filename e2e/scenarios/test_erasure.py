"""An eager invalidation on everything that is real: a Job that deletes, pods that erase, a receipt that holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.product.calls import Hits, Replica
from e2e.product.chapters import (
    ACME_KEY,
    CHUNK_TOKENS,
    DOCS_KEY,
    GLOBEX_KEY,
    MODEL,
    WHOLE_CHUNKS,
    Stage,
    fresh_prompt,
    keyspace_of,
)
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.receipts import Receipts
from e2e.product.receipts import run as run_plugin
from e2e.product.tier_contents import TierContents, tier_contents

pytestmark = pytest.mark.cluster

STORED_WITHIN_S = 60.0
ERASED_WITHIN_S = 300.0
"""30 s of it are the time in which a write that had begun may still arrive."""

PROVEN = ("LogicallyInvalid", "KeysRevoked", "Verified", "Complete")

PREFIX_CHUNKS = 10
PREFIX_TOKENS = PREFIX_CHUNKS * CHUNK_TOKENS + 60
"""Of a prompt of 14 chunks. The 60 tokens fill no chunk, so the chunk that they are part of is not of the prefix."""

EVERYTHING = Hits(0, WHOLE_CHUNKS)
"""Of a prompt, nothing in the engine's own memory, and all whole chunks behind it."""


def test_a_tenant_is_erased_from_every_tier_and_a_receipt_proves_it(stage: Stage, tmp_path: Path) -> None:
    kubectl = stage.kubectl
    # A prompt for each pod: a prompt that acme sends again to one pod is stored, and then found on the other.
    prompts = {where.pod: fresh_prompt(f"erased {where.pod}") for where in (stage.first, stage.second)}
    with tier_contents(kubectl) as redis:
        keyspaces = {ACME_KEY: keyspace_of(kubectl, "acme"), GLOBEX_KEY: keyspace_of(kubectl, "globex")}
        for key, keyspace in keyspaces.items():
            for prompt in prompts.values():
                _store(stage, redis, key, keyspace, prompt)
            assert _found(stage, stage.second, key, prompts[stage.second.pod]) == EVERYTHING
        kept = _names(redis, keyspaces[GLOBEX_KEY])

        name = f"erase-{time.time_ns() % 10**9}"
        kubectl.apply(_erase(name, {"tenant": "acme"}))
        done = wait_until("it is over", lambda: _over(kubectl, name), ERASED_WITHIN_S)
        conditions = {one["type"]: one for one in done["conditions"]}
        assert done["phase"] == "Complete", json.dumps(done)
        for proven in PROVEN:
            assert conditions[proven]["status"] == "True", conditions[proven]
        stage.report(f"{name}: {done['message']}")
        assert redis.blocks(keyspaces[ACME_KEY]) == []
        assert kept <= _names(redis, keyspaces[GLOBEX_KEY]), "a neighbour lost blocks"

    for where in (stage.first, stage.second):
        assert _found(stage, where, ACME_KEY, prompts[where.pod]) == Hits(0, 0), f"{where.pod} finds erased blocks"
        found = _found(stage, where, GLOBEX_KEY, prompts[where.pod])
        assert found.external + found.local == WHOLE_CHUNKS, f"a neighbour finds {found} on {where.pod}"

    receipts = Receipts(kubectl, tmp_path)
    stage.report(receipts.verified)
    newest = receipts.of(name, "Erased", "Verified")
    forged = tmp_path / "forged.json"
    forged.write_text(newest.read_text().replace(name, "another-order"))
    assert run_plugin("verify", str(forged), "--public-key", str(receipts.key)).returncode == 1


def test_a_prefix_and_a_tenant_are_erased_engines_forget_and_nobody_loses_anything_else(
    stage: Stage, tmp_path: Path
) -> None:
    kubectl, first, second = stage.kubectl, stage.first, stage.second
    # An erased prompt for each pod: a prompt that is sent again to one pod is stored, and then found on the other.
    leaked, theirs = ({where.pod: fresh_prompt(about) for where in (first, second)} for about in ("leaked", "leaves"))
    other, sign = fresh_prompt("not leaked"), fresh_prompt("reuse is back")
    with tier_contents(kubectl) as redis:
        acme, globex = keyspace_of(kubectl, "acme"), keyspace_of(kubectl, "globex")
        before = _names(redis, globex)
        for pod in leaked:
            _store(stage, redis, ACME_KEY, acme, theirs[pod])
            _store(stage, redis, GLOBEX_KEY, globex, leaked[pod])
        of_leaked = _names(redis, globex) - before
        _store(stage, redis, GLOBEX_KEY, globex, other)
        kept = _names(redis, globex) - of_leaked
        stage.ask(first, DOCS_KEY, leaked[first.pod])
        # Before: each finds its own, the engine by itself where it was computed, and another pod by the shared tier.
        for pod in leaked:
            assert _found(stage, second, ACME_KEY, theirs[pod]) == EVERYTHING
            assert _found(stage, second, GLOBEX_KEY, leaked[pod]) == EVERYTHING
        assert _found(stage, first, DOCS_KEY, leaked[first.pod]).local > 0

        stamp = time.time_ns() % 10**9
        of_prefixes, of_tenant = [f"prefix-{stamp}-{number}" for number in range(len(leaked))], f"tenant-{stamp}"
        kubectl.apply(
            *(
                _erase(name, {"prefix": _beginning(prompt)}, hbm="ResetEngine")
                for name, prompt in zip(of_prefixes, leaked.values(), strict=True)
            ),
            _erase(of_tenant, {"tenant": "acme"}, hbm="ResetEngine"),
        )
        for name in (*of_prefixes, of_tenant):
            done = wait_until(f"{name} is over", lambda name=name: _over(kubectl, name), ERASED_WITHIN_S)
            assert done["phase"] == "Complete", json.dumps(done)
            stage.report(f"{name}: {done['message']}")
        assert redis.blocks(acme) == []
        after = _names(redis, globex)
        assert kept <= after, "blocks after another beginning are gone"
        assert len(of_leaked - after) == len(leaked) * PREFIX_CHUNKS
        assert keyspace_of(kubectl, "globex") == globex

    # Reuse is paused for the scope, so its misses show nothing before this.
    for where in (first, second):
        wait_until("reuse is back", lambda where=where: _found(stage, where, GLOBEX_KEY, sign) != Hits(0, 0))
    for where in (first, second):
        assert _found(stage, where, GLOBEX_KEY, leaked[where.pod]) == Hits(0, 0), where.pod
        assert _found(stage, where, ACME_KEY, theirs[where.pod]) == Hits(0, 0), where.pod
        assert _found(stage, where, GLOBEX_KEY, other) == EVERYTHING, where.pod
    found = _found(stage, first, DOCS_KEY, leaked[first.pod])
    assert found == EVERYTHING, f"the engine forgets, the tiers keep a neighbour's: {found}"

    receipts = Receipts(kubectl, tmp_path)
    pods = {kubectl.get("pod", where.pod, DEMO_NAMESPACE)["metadata"]["uid"] for where in (first, second)}
    all_claims = dict.fromkeys(of_prefixes, ("Unreachable",)) | {of_tenant: ("Unreachable", "KeysRevoked")}
    for name, claims in all_claims.items():
        receipt = receipts.of(name, *claims, "Erased", "Verified")
        facts = json.loads(receipt.read_text())["record"]["erasure"]
        assert pods <= {pod["uid"] for pod in facts["pods"] if pod["engineReset"]}
        assert "EngineMemory" not in {item["kind"] for item in facts["residue"]}


def _beginning(prompt: str) -> dict[str, Any]:
    """Return the scope of an erasure of the first chunks of a prompt of globex's."""
    return {"modelRef": {"name": MODEL}, "content": {"text": prompt[:PREFIX_TOKENS]}, "tenants": ["globex"]}


def _store(stage: Stage, redis: TierContents, key: str, keyspace: str, prompt: str) -> None:
    """Ask for a new prompt, and return when all of its chunks are in the shared tier."""
    wanted = len(redis.blocks(keyspace)) + WHOLE_CHUNKS // CHUNK_TOKENS
    assert _found(stage, stage.first, key, prompt) == Hits(0, 0)
    wait_until("its chunks are stored", lambda: len(redis.blocks(keyspace)) >= wanted, STORED_WITHIN_S)


def _found(stage: Stage, where: Replica, key: str, prompt: str) -> Hits:
    return stage.ask(where, key, prompt)[1]


def _names(redis: TierContents, keyspace: str) -> set[str]:
    return {block.name for block in redis.blocks(keyspace)}


def _erase(name: str, scope: dict[str, Any], **spec: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "CacheInvalidation",
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "spec": {"scope": scope, "mode": "Eager", "reason": "the contract ended", "deadline": "15m", **spec},
    }


def _over(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    status = kubectl.get("cacheinvalidation", name, DEMO_NAMESPACE).get("status") or {}
    return status if status.get("phase") in ("Complete", "Failed") else None
