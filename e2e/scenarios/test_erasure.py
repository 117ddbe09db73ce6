"""Eager invalidations on everything that is real: Jobs that delete, pods that erase, engines that forget, and receipts.

A tenant, and prefixes of another tenant, are erased at once, so that the time in which a write that had begun may still
arrive, 30 s, is waited for once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.product.calls import Hits, Replica
from e2e.product.chapters import ACME_KEY, DOCS_KEY, GLOBEX_KEY, MODEL, SPARE, Stage, _object, keyspace_of
from e2e.product.guest import guests
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, fresh_name, wait_until
from e2e.product.pools import fresh_prefix, pool, pool_keyspaces
from e2e.product.prompts import CHUNK_TOKENS, WHOLE_CHUNKS, beginning, fresh_prompt, shared
from e2e.product.receipts import Receipts
from e2e.product.receipts import run as run_plugin
from e2e.product.shared_tier import roomy
from e2e.product.tier_contents import tier_contents

pytestmark = pytest.mark.cluster

CONDITIONS = ("LogicallyInvalid", "Verified", "Complete")
CLAIMS = ("Unreachable", "Erased", "Verified")
REVOKED = "KeysRevoked"
"""A condition, and a claim of a receipt: a scope has keys of its own, a prefix has none."""

GROUP, MEMBERS, POOL = "bench", ("left", "right"), "manual"

Scope = dict[str, Any]

PREFIX_CHUNKS = 2
PREFIX_TOKENS = PREFIX_CHUNKS * CHUNK_TOKENS + 60
"""Of a prompt of three chunks. The 60 tokens fill no chunk, so the chunk that they are part of is not of the prefix."""

EVERYTHING = Hits(0, WHOLE_CHUNKS)
"""Of a prompt, nothing in the engine's own memory, and all whole chunks behind it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that both engines and the shared tier have. Of erased ones there is one for each pod to be asked for
    afterwards, because a prompt that is sent again is stored again.
    """

    of_acme: list[str]
    leaked: list[str]
    """Of globex, and of docs."""
    kept: list[str]
    """Of globex."""


@pytest.fixture(autouse=True)
def neighbour(stage: Stage) -> Iterator[None]:
    """A neighbour that loses no block to a limit."""
    with roomy(stage, "globex"):
        yield


@pytest.mark.claim("an erased tenant and an erased prefix are found nowhere, receipts prove it, all others stay")
def test_a_tenant_and_prefixes_of_another_are_erased_and_no_tenant_loses_anything_else(
    stage: Stage, tmp_path: Path
) -> None:
    kubectl = stage.kubectl
    acme, globex = keyspace_of(kubectl, "acme"), keyspace_of(kubectl, "globex")
    with tier_contents(kubectl) as redis:
        older = redis.names(globex)
        prompts = _asked(stage)
        before = redis.names(globex) - older
        orders = _orders(prompts)
        _carry_out(stage, orders)
        assert redis.blocks(acme) == []
        assert len(before - redis.names(globex)) == len(prompts.leaked) * PREFIX_CHUNKS
    assert keyspace_of(kubectl, "globex") == globex, "a prefix was erased, and its tenant's other blocks out of reach"
    _reuse_is_back(stage)
    _no_replica_finds_what_was_erased(stage, prompts)
    _engines_forgot_what_the_tiers_have_kept(stage, prompts)
    _receipts_prove_it(stage, orders, tmp_path)


def test_a_group_a_pool_and_a_whole_namespace_are_erased(stage: Stage, tmp_path: Path) -> None:
    kubectl, where = stage.kubectl, (stage.first, stage.second)
    shares = {"isolation": "Group", "groupRef": {"name": GROUP}}
    orders: dict[str, Scope] = {fresh_name("group"): {"group": GROUP}, fresh_name("pool"): {"pool": POOL}}
    everything = {fresh_name("everything"): {"all": True}}
    kubectl.apply(_object("TenantGroup", GROUP, {"members": list(MEMBERS), "sharing": "Full"}))
    try:
        with (
            guests(stage, MEMBERS, shares) as keys,
            pool(stage, POOL, fresh_prefix(), readers={"tenants": ["acme"]}),
            tier_contents(kubectl) as redis,
        ):
            of_group = shared(*where, keys[MEMBERS[0]], 2)
            keyspaces = [keyspace_of(kubectl, MEMBERS[1]), *pool_keyspaces(kubectl, POOL)]
            assert all(redis.blocks(keyspace) for keyspace in keyspaces)
            _carry_out(stage, orders)
            assert [redis.blocks(keyspace) for keyspace in keyspaces] == [[]] * len(keyspaces)
            for replica, prompt in zip(where, of_group, strict=True):
                assert replica.found(keys[MEMBERS[1]], prompt) == 0, f"{replica.pod} finds blocks of the group"
            of_acme = shared(*where, ACME_KEY, 2)
            keyspaces = [keyspace_of(kubectl, tenant) for tenant in ("acme", "globex", MEMBERS[0])]
            _carry_out(stage, everything)
            assert [redis.blocks(keyspace) for keyspace in keyspaces] == [[]] * len(keyspaces)
            for replica, prompt in zip(where, of_acme, strict=True):
                assert replica.found(ACME_KEY, prompt) == 0, f"{replica.pod} finds blocks of acme"
            _receipts_prove_it(stage, orders | everything, tmp_path)
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantgroup", GROUP)


def _carry_out(stage: Stage, orders: dict[str, Scope]) -> None:
    stage.kubectl.apply(*(_order(name, scope) for name, scope in orders.items()))
    for name, scope in orders.items():
        _is_carried_out(stage, name, scope)


def _asked(stage: Stage) -> Prompts:
    first, second = stage.first, stage.second
    of_acme = shared(first, second, ACME_KEY, 2)
    leaked, kept = (shared(first, second, GLOBEX_KEY, count) for count in (2, SPARE))
    for prompt in leaked:
        first.ask(DOCS_KEY, prompt)
        assert first.found_by_place(DOCS_KEY, prompt).local > 0
    return Prompts(of_acme, leaked, kept)


def _orders(prompts: Prompts) -> dict[str, Scope]:
    """Return the scopes to erase by a name: acme, and the beginnings of prompts that leaked from globex."""
    beginnings = [
        {"modelRef": {"name": MODEL}, "content": {"text": beginning(prompt, PREFIX_TOKENS)}, "tenants": ["globex"]}
        for prompt in prompts.leaked
    ]
    return {fresh_name("tenant"): {"tenant": "acme"}} | {fresh_name("prefix"): {"prefix": one} for one in beginnings}


def _is_carried_out(stage: Stage, name: str, scope: Scope) -> None:
    status = wait_until(f"{name} is over", lambda: _over(stage.kubectl, name))
    assert status["phase"] == "Complete", json.dumps(status)
    conditions = {one["type"]: one for one in status["conditions"]}
    for wanted in (*CONDITIONS, *([REVOKED] if "prefix" not in scope else [])):
        assert conditions[wanted]["status"] == "True", conditions[wanted]
    stage.report(f"{name}: {status['message']}")


def _reuse_is_back(stage: Stage) -> None:
    """It is paused for the scope of a prefix, and misses show nothing until it is back."""
    sign = fresh_prompt()
    for where in (stage.first, stage.second):
        wait_until("reuse is back", lambda where=where: where.found(GLOBEX_KEY, sign) > 0)


def _no_replica_finds_what_was_erased(stage: Stage, prompts: Prompts) -> None:
    for where, of_acme, leaked in zip((stage.first, stage.second), prompts.of_acme, prompts.leaked, strict=True):
        assert where.found(ACME_KEY, of_acme) == 0, f"{where.pod} finds blocks of the tenant"
        assert where.found(GLOBEX_KEY, leaked) == 0, f"{where.pod} finds blocks of the prefix"


def _engines_forgot_what_the_tiers_have_kept(stage: Stage, prompts: Prompts) -> None:
    """Other blocks of the prefixes' tenant, and blocks of the same prefixes of another tenant."""
    for where in (stage.first, stage.second):
        _finds_behind_the_engine(where, GLOBEX_KEY, prompts.kept)
    _finds_behind_the_engine(stage.first, DOCS_KEY, prompts.leaked)


def _finds_behind_the_engine(where: Replica, key: str, prompts: list[str]) -> None:
    """See one of the prompts found whole, since a lookup that is late is a miss, and none in the engine's memory."""
    found = []
    for prompt in prompts:
        found.append(where.found_by_place(key, prompt))
        assert found[-1].local == 0, f"the engine of {where.pod} did not forget: {found[-1]}"
    assert EVERYTHING in found, f"{where.pod} has lost blocks that were not erased: {found}"


def _receipts_prove_it(stage: Stage, orders: dict[str, Scope], folder: Path) -> None:
    """All verify offline, and none does in which a name was changed."""
    receipts = Receipts(stage.kubectl, folder)
    stage.report(receipts.verified)
    pods = {_uid(stage, where) for where in (stage.first, stage.second)}
    for name, scope in orders.items():
        receipt = receipts.of(name, *CLAIMS, *([REVOKED] if "prefix" not in scope else []))
        facts = json.loads(receipt.read_text())["record"]["erasure"]
        assert pods <= {pod["uid"] for pod in facts["pods"] if pod["engineReset"]}
        assert "EngineMemory" not in {item["kind"] for item in facts["residue"]}
        forged = folder / "forged.json"
        forged.write_text(receipt.read_text().replace(name, "another-order"))
        assert run_plugin("verify", str(forged), "--public-key", str(receipts.key)).returncode == 1


def _uid(stage: Stage, where: Replica) -> str:
    return str(stage.kubectl.get("pod", where.pod, DEMO_NAMESPACE)["metadata"]["uid"])


def _order(name: str, scope: Scope) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "CacheInvalidation",
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "spec": {
            "scope": scope,
            "mode": "Eager",
            "hbm": "ResetEngine",
            "reason": "the contract ended",
            "deadline": "15m",
        },
    }


def _over(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    status = kubectl.get("cacheinvalidation", name, DEMO_NAMESPACE).get("status") or {}
    return status if status.get("phase") in ("Complete", "Failed") else None
