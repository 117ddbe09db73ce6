"""A tenant that a story brings along: its API key, and its policy."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .chapters import Stage, _object, _wait_enforced
from .install import DEMO_NAMESPACE
from .kubectl import wait_until

KEYS = "tiny-api-keys"
KNOWN_WITHIN_S = 60


@contextmanager
def guest(stage: Stage, tenant: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """Let a tenant have a key and a policy of its name while the block runs; yields the key."""
    kubectl, key = stage.kubectl, f"{tenant}-demo-key"
    before = base64.b64decode(kubectl.get("secret", KEYS, DEMO_NAMESPACE)["data"]["keys.json"]).decode()
    digest = hashlib.sha256(key.encode()).hexdigest()
    try:
        _set_keys(stage, json.dumps({"keys": [*json.loads(before)["keys"], {"tenant": tenant, "sha256": digest}]}))
        kubectl.apply(_object("TenantCachePolicy", tenant, {"tenant": tenant, "isolation": "Isolated", **spec}))
        _wait_enforced(kubectl, tenant)
        for where in (stage.first, stage.second):
            wait_until(
                "the gate knows the key", lambda where=where: where.complete(key, "hello").status == 200, KNOWN_WITHIN_S
            )
        yield key
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantcachepolicy", tenant, "--ignore-not-found")
        _set_keys(stage, before)


def _set_keys(stage: Stage, document: str) -> None:
    patch = json.dumps({"stringData": {"keys.json": document}})
    stage.kubectl.run("-n", DEMO_NAMESPACE, "patch", "secret", KEYS, "--type", "merge", "-p", patch)
