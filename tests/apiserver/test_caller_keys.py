"""`kubectl kvstrata keys` on a real API server, by a real kubectl, as administrators run it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import uuid
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstrata_sidecar.gate.policy.api_keys import KeyRing
from tests.apiserver.conftest import REPOSITORY
from tests.apiserver.server import Server
from tests.support.objects import model, policy

AT_ONCE = 6


class Keys:
    """Runs the command."""

    def __init__(self, server: Server, namespace: str) -> None:
        self.server, self.namespace = server, namespace

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.server.kubectl_path.parent}:{os.environ['PATH']}"
        where = ("-n", self.namespace, "--kubeconfig", str(self.server.kubeconfig))
        return subprocess.run(
            [sys.executable, "-m", "kvstrata.cli.plugin", "keys", *arguments, *where],
            env={"PYTHONPATH": str(REPOSITORY / "operator/src"), "PATH": path, "HOME": "/nonexistent"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    def secret(self, name: str = "tiny-api-keys") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.server.kubectl("-n", self.namespace, "get", "secret", name, "-o", "json")
        )
        return found

    def ring(self, name: str = "tiny-api-keys") -> KeyRing:
        """The keys, as gates read them."""
        return KeyRing.decode(b64decode(self.secret(name)["data"]["keys.json"]))


@pytest.fixture
def keys(server: Server) -> Keys:
    """A namespace with a model that names no Secret, and a policy for acme."""
    namespace = f"callers-{uuid.uuid4().hex[:8]}"
    server.kubectl("create", "namespace", namespace)
    declared = model()
    del declared["spec"]["gate"]
    for one in (declared, policy("acme")):
        server.apply({**one, "metadata": {"name": one["metadata"]["name"], "namespace": namespace}})
    return Keys(server, namespace)


def test_a_key_is_made_listed_and_removed(keys: Keys) -> None:
    made = keys.run("add", "tiny", "--tenant", "acme", "--note", "batch jobs")
    assert made.returncode == 0, made.stderr
    key = made.stdout.rstrip("\n")
    assert made.stdout == f"{key}\n"
    assert len(key) > 40
    assert key not in made.stderr
    assert "warning" not in made.stderr
    assert keys.ring().tenant_of(key.encode(), time.time()) == "acme"
    assert key not in json.dumps(keys.secret())

    digits = hashlib.sha256(key.encode()).hexdigest()[:8]
    assert keys.run("list", "tiny").stdout.splitlines()[1].split()[:2] == ["acme", digits]

    unwanted = keys.run("add", "tiny", "--tenant", "initech")
    assert f"no TenantCachePolicy of namespace {keys.namespace} is for tenant initech" in unwanted.stderr
    removed = keys.run("remove", "tiny", "--tenant", "initech")
    assert (removed.returncode, removed.stdout) == (0, "")
    assert keys.ring().tenant_of(unwanted.stdout.strip().encode(), time.time()) is None
    assert keys.run("remove", "tiny", "--hash", digits).returncode == 0
    assert len(keys.ring()) == 0
    assert keys.run("remove", "tiny", "--hash", digits).returncode == 1

    # A model's own Secret, which a user made by hand, is used where the model names one.
    named = model()
    named["metadata"] = {"name": "other", "namespace": keys.namespace}
    keys.server.apply(named)
    key = keys.run("add", "other", "--tenant", "acme").stdout.strip()
    assert keys.ring("keys").tenant_of(key.encode(), time.time()) == "acme"


def test_administrators_who_add_keys_at_once_lose_none(keys: Keys) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = list(pool.map(lambda _: keys.run("add", "tiny", "--tenant", "acme"), range(AT_ONCE)))
    assert [one.returncode for one in made] == [0] * AT_ONCE, [one.stderr for one in made]
    ring = keys.ring()
    assert [ring.tenant_of(one.stdout.strip().encode(), time.time()) for one in made] == ["acme"] * AT_ONCE


def test_what_cannot_be_done_is_said_in_a_sentence(keys: Keys) -> None:
    wrong_name = keys.run("add", "tinny", "--tenant", "acme")
    assert (wrong_name.returncode, wrong_name.stdout) == (2, "")
    assert wrong_name.stderr == f"CachedModel tinny does not exist in namespace {keys.namespace} (there: tiny)\n"
    nothing = keys.run("remove", "tiny")
    assert (nothing.returncode, nothing.stderr.startswith("name the keys to remove")) == (2, True)
    assert keys.run("add", "tiny", "--tenant", " ").returncode == 2
