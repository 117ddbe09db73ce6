"""Secrets of the operator that somebody deletes or changes, against a real apiserver: noticed by the watch."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Root, decode_shard
from kvstrata.reconcile.queue import MAX_WAIT_S
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import NAMESPACE, Server

BUNDLE = "kvs-smollm2-bundle"
NOTICED_WITHIN_S = 60.0
"""Far below the ten minutes of the list-and-diff pass."""
REST_S = MAX_WAIT_S + 6.0
"""Longer than an operator puts off a status, also on a busy machine."""


@pytest.fixture
def leader(operator: OperatorProcess, operators: Operators) -> OperatorProcess:
    """The operator that leads; other tests may have ended the first one."""
    found = next((running for running in operators.running() if running.leading), None)
    if found is None:
        found = operators.start("operator-s")
        found.wait_until_leading()
    return found


def data(server: Server, name: str, key: str) -> bytes:
    return base64.b64decode((server.get("secret", name) or {})["data"][key])


def root_of(server: Server) -> Root:
    return Root.decode(data(server, BUNDLE, ROOT_DATA_KEY))


def keyspaces(server: Server) -> dict[str, Any]:
    """The keyspace of every tenant, read as a gate reads a bundle: from root to shards, with every digest checked."""
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while True:
        try:
            return {
                entry.tenant: entry.keyspace
                for ref in root_of(server).shards
                for entry in decode_shard(data(server, f"{BUNDLE}-{ref.index}{ref.slot}", SHARD_DATA_KEY), ref.digest)
            }
        except (LookupError, ValueError):
            assert time.monotonic() < deadline, "the bundle stays incomplete"
            time.sleep(0.2)


def settled(server: Server, rest_s: float = 2.0) -> None:
    """Wait until every policy says that it is settled, and nothing changes for some seconds."""
    listed = json.loads(server.kubectl("-n", NAMESPACE, "get", "tcpol", "-o", "json"))["items"]
    for name in (policy["metadata"]["name"] for policy in listed):
        server.wait(
            f"policy {name} to settle",
            lambda name=name: server.condition("TenantCachePolicy", name, "Ready")[0] == "True",  # type: ignore[misc]
        )
    before = server.versions()
    deadline = time.monotonic() + 90
    while True:
        time.sleep(rest_s)
        after = server.versions()
        if after == before:
            return
        assert time.monotonic() < deadline, {name for name in after if after[name] != before.get(name)}
        before = after


def is_new(server: Server, name: str, uid: str) -> bool:
    found = server.get("secret", name)
    return found is not None and found["metadata"]["uid"] != uid


def delete(server: Server, name: str) -> str:
    """Delete a Secret; return the UID that it had."""
    uid: str = (server.get("secret", name) or {})["metadata"]["uid"]
    server.kubectl("-n", NAMESPACE, "delete", "secret", name)
    return uid


@pytest.mark.parametrize("name", ["kvs-smollm2-gate-tls", "kvs-shared-redis-auth", "kvs-shared-redis-tls"])
def test_a_deleted_secret_is_made_anew(server: Server, leader: OperatorProcess, name: str) -> None:
    settled(server)
    uid = delete(server, name)
    server.wait(f"Secret {name}", lambda: is_new(server, name, uid), NOTICED_WITHIN_S)
    settled(server)


def test_a_deleted_domain_key_is_drawn_anew_and_every_policy_gets_another_keyspace(
    server: Server, leader: OperatorProcess
) -> None:
    settled(server)
    before, key = keyspaces(server), data(server, "kvstrata-domain", "domain.key")
    revision = root_of(server).revision
    uid = delete(server, "kvstrata-domain")
    server.wait("a new key", lambda: is_new(server, "kvstrata-domain", uid), NOTICED_WITHIN_S)
    server.wait("a new bundle", lambda: root_of(server).revision > revision, NOTICED_WITHIN_S)
    settled(server)
    assert data(server, "kvstrata-domain", "domain.key") != key

    def have_others() -> bool:
        after = keyspaces(server)
        return after.keys() == before.keys() and all(after[tenant] != before[tenant] for tenant in before)

    server.wait("another keyspace of each tenant", have_others, NOTICED_WITHIN_S)
    server.wait("the domain to be ready", lambda: server.condition("CacheDomain", "default", "Ready")[0] == "True")


def test_a_deleted_shard_or_root_is_written_anew(server: Server, leader: OperatorProcess) -> None:
    settled(server)
    before, root = keyspaces(server), root_of(server)
    for name in (f"{BUNDLE}-0{root.shards[0].slot}", BUNDLE):
        revision = root_of(server).revision
        delete(server, name)
        server.wait(
            f"a bundle after {name} was deleted",
            lambda revision=revision: server.get("secret", BUNDLE) is not None and root_of(server).revision > revision,  # type: ignore[misc]
            NOTICED_WITHIN_S,
        )
        settled(server)
        assert keyspaces(server) == before


def test_a_root_changed_by_hand_is_superseded(server: Server, leader: OperatorProcess) -> None:
    settled(server, REST_S)
    before, root = keyspaces(server), root_of(server)
    forged = replace(root, revision=root.revision + 500, term=root.term + 3, domain="0123456789abcdef")
    encoded = base64.b64encode(forged.encode()).decode()
    patch = json.dumps({"data": {ROOT_DATA_KEY: encoded}})
    server.kubectl("-n", NAMESPACE, "patch", "secret", BUNDLE, "--type=merge", "-p", patch)
    server.wait("a bundle above it", lambda: root_of(server).revision > forged.revision, NOTICED_WITHIN_S)
    settled(server)
    mended = root_of(server)
    assert (mended.domain, mended.rules) == (root.domain, root.rules)
    assert mended.term >= forged.term
    assert mended.revision == forged.revision + 1, "one commit is enough"
    assert keyspaces(server) == before


def test_the_mended_world_stays_at_rest(server: Server, leader: OperatorProcess) -> None:
    settled(server, REST_S)
    commits = leader.metric("kvstrata_bundle_commit_seconds_count")
    before = server.versions()
    time.sleep(5)
    assert server.versions() == before
    assert leader.metric("kvstrata_bundle_commit_seconds_count") == commits
