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
"""Of a prompt of 14 chunks. The 60 tokens fill no chunk, so what they are part of is not of the prefix."""

EVERYTHING = Hits(0, WHOLE_CHUNKS)
"""Of a prompt, nothing in the engine's own memory, and all whole chunks behind it."""


def test_a_tenant_is_erased_from_every_tier_and_a_receipt_proves_it(stage: Stage, tmp_path: Path) -> None:
    kubectl = stage.kubectl
    prompts = {key: fresh_prompt(f"erased {key}") for key in (ACME_KEY, GLOBEX_KEY)}
    with tier_contents(kubectl) as redis:
        keyspaces = {ACME_KEY: keyspace_of(kubectl, "acme"), GLOBEX_KEY: keyspace_of(kubectl, "globex")}
        for key, keyspace in keyspaces.items():
            before = len(redis.blocks(keyspace))
            stage.ask(stage.first, key, prompts[key])
            wait_until("blocks are stored", lambda k=keyspace, n=before: len(redis.blocks(k)) > n, STORED_WITHIN_S)
        kept = _names(redis, keyspaces[GLOBEX_KEY])

        name = f"erase-{time.time_ns() % 10**9}"
        kubectl.apply(_erase(name, {"tenant": "acme"}))
        done = wait_until("it is over", lambda: _over(kubectl, name), ERASED_WITHIN_S)
        conditions = {one["type"]: one for one in done["conditions"]}
        assert done["phase"] == "Complete", json.dumps(done)
        for proven in PROVEN:
            assert conditions[proven]["status"] == "True", conditions[proven]
        stage.say(f"{name}: {done['message']}")
        assert redis.blocks(keyspaces[ACME_KEY]) == []
        assert kept <= _names(redis, keyspaces[GLOBEX_KEY]), "a neighbour lost blocks"

    for where in (stage.first, stage.second):
        _, found = stage.ask(where, ACME_KEY, fresh_prompt("not asked before"))
        assert found.external + found.local < WHOLE_CHUNKS
    _, found = stage.ask(stage.second, GLOBEX_KEY, prompts[GLOBEX_KEY])
    assert found.external + found.local == WHOLE_CHUNKS

    receipts = Receipts(kubectl, tmp_path)
    stage.say(receipts.told)
    newest = receipts.of(name, "Erased", "Verified")
    forged = tmp_path / "forged.json"
    forged.write_text(newest.read_text().replace(name, "another-order"))
    assert run_plugin("verify", str(forged), "--public-key", str(receipts.key)).returncode == 1


def test_a_prefix_and_a_tenant_are_erased_engines_forget_and_nobody_loses_anything_else(
    stage: Stage, tmp_path: Path
) -> None:
    kubectl, first, second = stage.kubectl, stage.first, stage.second
    leaked, other, theirs, sign = (fresh_prompt(about) for about in ("leaked", "not leaked", "leaves", "reuse is back"))
    with tier_contents(kubectl) as redis:
        acme, globex = keyspace_of(kubectl, "acme"), keyspace_of(kubectl, "globex")
        before = _names(redis, globex)
        _store(stage, redis, ACME_KEY, acme, theirs)
        _store(stage, redis, GLOBEX_KEY, globex, leaked)
        of_leaked = _names(redis, globex) - before
        _store(stage, redis, GLOBEX_KEY, globex, other)
        kept = _names(redis, globex) - of_leaked
        stage.ask(first, DOCS_KEY, leaked)
        # Before: each finds its own, the engine by itself where it was computed, and another pod by the shared tier.
        assert _found(stage, second, ACME_KEY, theirs) == EVERYTHING
        assert _found(stage, second, GLOBEX_KEY, leaked) == EVERYTHING
        assert _found(stage, first, DOCS_KEY, leaked).local > 0

        prefix = {"modelRef": {"name": MODEL}, "content": {"text": leaked[:PREFIX_TOKENS]}, "tenants": ["globex"]}
        of_prefix, of_tenant = (f"{what}-{time.time_ns() % 10**9}" for what in ("prefix", "tenant"))
        kubectl.apply(
            _erase(of_prefix, {"prefix": prefix}, hbm="ResetEngine"),
            _erase(of_tenant, {"tenant": "acme"}, hbm="ResetEngine"),
        )
        for name in (of_prefix, of_tenant):
            done = wait_until(f"{name} is over", lambda name=name: _over(kubectl, name), ERASED_WITHIN_S)
            assert done["phase"] == "Complete", json.dumps(done)
            stage.say(f"{name}: {done['message']}")
        assert redis.blocks(acme) == []
        after = _names(redis, globex)
        assert kept <= after, "what follows another beginning is gone"
        assert len(of_leaked - after) == PREFIX_CHUNKS
        assert keyspace_of(kubectl, "globex") == globex

    # Who paused is not reused, so what it does not find shows nothing before this.
    for where in (first, second):
        wait_until("reuse is back", lambda where=where: _found(stage, where, GLOBEX_KEY, sign) != Hits(0, 0))
    assert _found(stage, first, GLOBEX_KEY, leaked) == Hits(0, 0)
    assert _found(stage, second, GLOBEX_KEY, other) == EVERYTHING
    assert _found(stage, first, ACME_KEY, theirs) == Hits(0, 0)
    assert _found(stage, first, DOCS_KEY, leaked) == EVERYTHING, "the engine forgets, the tiers keep a neighbour's"

    receipts = Receipts(kubectl, tmp_path)
    pods = {kubectl.get("pod", where.pod, DEMO_NAMESPACE)["metadata"]["uid"] for where in (first, second)}
    for name, claims in ((of_prefix, ("Unreachable",)), (of_tenant, ("Unreachable", "KeysRevoked"))):
        receipt = receipts.of(name, *claims, "Erased", "Verified")
        facts = json.loads(receipt.read_text())["record"]["erasure"]
        assert pods <= {pod["uid"] for pod in facts["pods"] if pod["engineReset"]}
        assert "EngineMemory" not in {item["kind"] for item in facts["residue"]}


def _store(stage: Stage, redis: TierContents, key: str, keyspace: str, prompt: str) -> None:
    """Ask for a prompt that nobody has asked before, and return when all of its chunks are in the shared tier."""
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
