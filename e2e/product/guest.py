"""Tenants that a story brings along: their API keys, and their policies."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .chapters import MODEL, Stage, _object
from .install import DEMO_NAMESPACE
from .kubectl import Kubectl, wait_until

KEYS = f"{MODEL}-api-keys"


@contextmanager
def guest(stage: Stage, tenant: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """Let a tenant have a key and a policy of its name while the block runs; yields the key."""
    with guests(stage, [tenant], spec) as keys:
        yield keys[tenant]


@contextmanager
def guests(stage: Stage, tenants: Sequence[str], spec: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Let tenants have keys, and policies of their names with the same spec, while the block runs; yields the keys."""
    kubectl, keys = stage.kubectl, {tenant: f"{tenant}-demo-key" for tenant in tenants}
    before = base64.b64decode(kubectl.get("secret", KEYS, DEMO_NAMESPACE)["data"]["keys.json"]).decode()
    hashes = [{"tenant": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in keys.items()]
    try:
        _set_keys(stage, json.dumps({"keys": [*json.loads(before)["keys"], *hashes]}))
        # They go as they came: an erasure would take a minute each.
        rest = {"isolation": "Isolated", "deletionPolicy": "Abandon", **spec}
        kubectl.apply(*(_object("TenantCachePolicy", name, {"tenant": name, **rest}) for name in tenants))
        wait_until("their policies are enforced", lambda: _all_enforced(kubectl, tenants))
        key = keys[tenants[-1]]
        for where in (stage.first, stage.second):
            wait_until("the gate knows the keys", lambda where=where: where.complete(key, "hello").status == 200)
        yield keys
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantcachepolicy", *tenants, "--ignore-not-found")
        _set_keys(stage, before)


def _all_enforced(kubectl: Kubectl, tenants: Sequence[str]) -> bool:
    found = {item["metadata"]["name"]: item for item in kubectl.list("tenantcachepolicy", DEMO_NAMESPACE)}
    return all(tenant in found and _is_enforced(found[tenant]) for tenant in tenants)


def _is_enforced(policy: dict[str, Any]) -> bool:
    status = policy.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    return status.get("enforcedGeneration") == policy["metadata"]["generation"] and conditions.get("Enforced") == "True"


def _set_keys(stage: Stage, document: str) -> None:
    patch = json.dumps({"stringData": {"keys.json": document}})
    stage.kubectl.run("-n", DEMO_NAMESPACE, "patch", "secret", KEYS, "--type", "merge", "-p", patch)
