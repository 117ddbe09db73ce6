"""An eager invalidation on everything that is real: a Job that deletes, pods that erase, a receipt that holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.settings import REPOSITORY
from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, WHOLE_CHUNKS, Stage, fresh_prompt, keyspace_of
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.tier_contents import TierContents, tier_contents

pytestmark = pytest.mark.cluster

STORED_WITHIN_S = 60.0
ERASED_WITHIN_S = 300.0
"""30 s of it are the time in which a write that had begun may still arrive."""

PROVEN = ("LogicallyInvalid", "KeysRevoked", "Verified", "Complete")


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
        kubectl.apply(_erase(name))
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

    domain = str(kubectl.get("cachedomain", "default", DEMO_NAMESPACE)["status"]["domainID"])
    receipts, keys = tmp_path / "receipts", tmp_path / "keys"
    _receipt("keys", "--to", str(keys))
    _receipt("export", "--domain", domain, "--to", str(receipts))
    (key,) = sorted(keys.glob("*.pem"))
    told = _receipt("verify", str(receipts), "--chain", "--public-key", str(key))
    stage.say(told)
    newest = sorted(receipts.glob("*.json"))[-1]
    proven = _receipt("verify", str(newest), "--public-key", str(key), "--require", "Erased", "--require", "Verified")
    assert name in proven
    forged = tmp_path / "forged.json"
    forged.write_text(newest.read_text().replace(name, "another-order"))
    assert _run("verify", str(forged), "--public-key", str(key)).returncode == 1


def _names(redis: TierContents, keyspace: str) -> set[str]:
    return {block.name for block in redis.blocks(keyspace)}


def _erase(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "CacheInvalidation",
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "spec": {"scope": {"tenant": "acme"}, "mode": "Eager", "reason": "the contract ended", "deadline": "15m"},
    }


def _over(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    status = kubectl.get("cacheinvalidation", name, DEMO_NAMESPACE).get("status") or {}
    return status if status.get("phase") in ("Complete", "Failed") else None


def _receipt(*arguments: str) -> str:
    """What `kubectl kvstrata receipt` prints; it has to succeed."""
    found = _run(*arguments)
    assert found.returncode == 0, f"{arguments}: {found.returncode}\n{found.stdout}{found.stderr}"
    return found.stdout


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    kubeconfig, binaries = REPOSITORY / ".local/kubeconfig", REPOSITORY / ".local/bin"
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "operator/src"),
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{binaries}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "kvstrata.cli.plugin", "receipt", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
