"""A policy is deleted: its tenant has no cache from then on, and it is gone when a receipt records the erasure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, SPARE, Stage, _object, _wait_enforced, keyspace_of
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import CHUNK_TOKENS, WHOLE_CHUNKS, finds, fresh_prompt
from e2e.product.receipts import Receipts
from e2e.product.shared_tier import roomy
from e2e.product.tier_contents import TierContents, tier_contents

pytestmark = pytest.mark.cluster

KIND, TENANT, NEIGHBOUR = "tenantcachepolicy", "acme", "globex"
CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS


@pytest.fixture(autouse=True)
def neighbour(stage: Stage) -> Iterator[None]:
    """A neighbour that loses no block to a limit."""
    with roomy(stage, NEIGHBOUR):
        yield


@pytest.fixture
def spec(stage: Stage) -> Iterator[dict[str, Any]]:
    """The spec of the sample's policy, which is restored for later tests."""
    found: dict[str, Any] = stage.kubectl.get(KIND, TENANT, DEMO_NAMESPACE)["spec"]
    try:
        yield found
    finally:
        wait_until("the deleted policy is gone", lambda: not _deleting(stage.kubectl))
        stage.kubectl.apply(_object("TenantCachePolicy", TENANT, found))
        _wait_enforced(stage.kubectl, TENANT)


def test_a_policy_that_is_deleted_leaves_a_receipt_and_its_successor_begins_anew(
    stage: Stage, spec: dict[str, Any], tmp_path: Path
) -> None:
    kubectl, keys = stage.kubectl, (ACME_KEY, GLOBEX_KEY)
    prompts = {key: [fresh_prompt() for _ in range(SPARE)] for key in keys}
    with tier_contents(kubectl) as redis:
        keyspaces = {ACME_KEY: keyspace_of(kubectl, TENANT), GLOBEX_KEY: keyspace_of(kubectl, NEIGHBOUR)}
        stored = {}
        for key, keyspace in keyspaces.items():
            stored[key] = _store(stage, redis, key, keyspace, prompts[key])
            finds(stage.second, key, prompts[key])

        began_s = time.monotonic()
        kubectl.run("-n", DEMO_NAMESPACE, "delete", KIND, TENANT, "--wait=false")
        order = wait_until("its erasure is ordered", lambda: _order(kubectl))
        assert _deleting(kubectl), "it stays until a receipt is there"
        wait_until("it is gone", lambda: _policy(kubectl) is None)
        stage.report(f"{KIND}/{TENANT} is gone after {time.monotonic() - began_s:.0f} s")

        status = kubectl.get("cacheinvalidation", order, DEMO_NAMESPACE)["status"]
        assert status["phase"] == "Complete", json.dumps(status)
        assert redis.blocks(keyspaces[ACME_KEY]) == []
        assert stored[GLOBEX_KEY] <= redis.names(keyspaces[GLOBEX_KEY]), "a neighbour lost blocks"
        Receipts(kubectl, tmp_path).of(order, "Unreachable", "KeysRevoked", "Erased", "Verified")

        # Every pod serves a tenant without a policy, and none of its blocks is kept: it never finds a former prompt.
        for prompt in (*prompts[ACME_KEY], fresh_prompt()):
            for where in (stage.first, stage.second, stage.first):
                assert where.found(ACME_KEY, prompt) == 0, where.pod
        assert redis.blocks(keyspaces[ACME_KEY]) == []

        kubectl.apply(_object("TenantCachePolicy", TENANT, spec))
        _wait_enforced(kubectl, TENANT)
        renewed = keyspace_of(kubectl, TENANT)
        assert renewed != keyspaces[ACME_KEY]
        _store(stage, redis, ACME_KEY, renewed, prompts[ACME_KEY])
        finds(stage.second, ACME_KEY, prompts[ACME_KEY])


def _store(stage: Stage, redis: TierContents, key: str, keyspace: str, prompts: list[str]) -> set[str]:
    """Ask for prompts of which nothing is there, and return their chunks' names when all are in the shared tier."""
    before, wanted = redis.names(keyspace), len(prompts) * CHUNKS
    for prompt in prompts:
        assert stage.first.found(key, prompt) == 0
    wait_until("their chunks are stored", lambda: len(redis.names(keyspace) - before) >= wanted)
    return redis.names(keyspace) - before


def _policy(kubectl: Kubectl) -> dict[str, Any] | None:
    return next((one for one in kubectl.list(KIND, DEMO_NAMESPACE) if one["metadata"]["name"] == TENANT), None)


def _deleting(kubectl: Kubectl) -> bool:
    found = _policy(kubectl)
    return found is not None and "deletionTimestamp" in found["metadata"]


def _order(kubectl: Kubectl) -> str | None:
    """Return the name of the CacheInvalidation that the deletion ordered, and that is not over."""
    for one in kubectl.list("cacheinvalidation", DEMO_NAMESPACE):
        erases = "kvstrata.io/erases" in one["metadata"].get("annotations", {})
        if erases and (one.get("status") or {}).get("phase") not in ("Complete", "Failed"):
            return str(one["metadata"]["name"])
    return None
