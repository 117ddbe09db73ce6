"""An upgrade from the last version before fingerprints, with blocks, a pool and a receipt in place.

It is a release beside the demo's, in namespaces of its own, whose operator and sidecar are built from this repository's
history. The kinds are this version's, as an upgrade installs them first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.cli import main as cluster
from e2e.images.catalogue import select
from e2e.product.caller_pod import caller_pod
from e2e.product.calls import replica
from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, MODEL, POOL, keyspace_of
from e2e.product.install import CHARTS, READY_TIMEOUT_S, SAMPLES, unsettled
from e2e.product.kubectl import Kubectl, pod_names, wait_until
from e2e.product.pools import pool_keyspaces
from e2e.product.prompts import CHUNK_BYTES, CHUNK_TOKENS, WHOLE_CHUNKS, fresh_prompt
from e2e.product.receipts import Receipts
from e2e.product.shared_tier import TIER
from e2e.product.tier_contents import TierContents, tier_contents
from kvstrata.contract.store.redis_keys import fingerprint_of, parse_block_key
from tests.support import earlier

pytestmark = pytest.mark.cluster

SERVED, OPERATOR, RELEASE = "upgrade", "upgrade-system", "upgrade"
EARLIER_TAG = "earlier"
PARTS = ("operator", "sidecar")
PODS = f"kvstrata.io/model={MODEL}"
SAMPLES_USED = ("10-cachedomain", "30-api-keys", "40-cachedmodel", "70-prefixpool")
CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS
LIMIT_BYTES = 5 * CHUNKS * CHUNK_BYTES // 2
"""Room for two prompts of a tenant, not for three."""

ENGINE_BLOCKS = "96"
"""Of 32 tokens. Two of these engines run beside the demo's while the pod is replaced."""

PROVEN = ("Erased", "Verified")


@pytest.fixture
def earlier_release(kubectl: Kubectl, tmp_path: Path) -> Iterator[None]:
    """The earlier version with a model, two tenants and a pool, all ready; afterwards nothing of it is left."""
    _load_earlier_images(tmp_path)
    with ExitStack() as afterwards:
        afterwards.callback(kubectl.run, "delete", "namespace", OPERATOR, "--ignore-not-found")
        afterwards.callback(kubectl.helm, "uninstall", RELEASE, "-n", OPERATOR, "--ignore-not-found")
        afterwards.callback(kubectl.run, "delete", "namespace", SERVED, "--ignore-not-found")
        kubectl.run("create", "namespace", SERVED)
        _install(
            kubectl,
            earlier.code() / "charts",
            *(f"{part}={EARLIER_TAG}" for part in ("image.tag", "sidecar.image.tag")),
        )
        kubectl.apply(*_objects())
        _wait_settled(kubectl)
        yield


@pytest.mark.usefixtures("earlier_release")
def test_an_upgrade_keeps_requests_and_receipts_and_reads_no_earlier_block(kubectl: Kubectl, tmp_path: Path) -> None:
    prompts = {ACME_KEY: fresh_prompt(), GLOBEX_KEY: fresh_prompt()}
    with tier_contents(kubectl, TIER, SERVED) as redis:
        _store(kubectl, redis, ACME_KEY, fresh_prompt())
        _erase(kubectl, "before", redis)
        before = {key: _store(kubectl, redis, key, prompt) for key, prompt in prompts.items()}
        (pool,) = pool_keyspaces(kubectl, POOL, namespace=SERVED)
        before[POOL] = redis.names(pool)
        assert {_fingerprint(name) for names in before.values() for name in names} == {""}
        assert before[POOL]
    first = Receipts(kubectl, tmp_path / "before", SERVED, OPERATOR).of("before", *PROVEN).read_bytes()

    with caller_pod(kubectl, SERVED, MODEL, ACME_KEY, streams=1, plain=1) as caller:
        began_s = time.monotonic()
        _install(kubectl, CHARTS)
        wait_until(
            "pods run this version", lambda: _sidecars(kubectl) == {_image("sidecar")}, READY_TIMEOUT_S, every_s=1
        )
        _wait_settled(kubectl)
        print(f"upgraded in {time.monotonic() - began_s:.0f} s; {caller.calls()}")
        assert not caller.calls().broken, str(caller.calls())

    status = kubectl.get("cachedmodel", MODEL, SERVED)["status"]
    (fingerprint,) = (one["fingerprint"] for one in status["fingerprints"])
    assert kubectl.condition("cachedmodel", MODEL, SERVED, "IdentityResolved")["status"] == "True"
    with tier_contents(kubectl, TIER, SERVED) as redis:
        for key, prompt in prompts.items():
            keyspace = _keyspace(kubectl, key)
            assert before[key] <= redis.names(keyspace), "both formats are in one tier"
            after = _store(kubectl, redis, key, prompt)
            assert {_fingerprint(name) for name in after} == {fingerprint}
        assert pool_keyspaces(kubectl, POOL, namespace=SERVED) == [pool]
        _wait_stored(redis, pool, before[POOL], len(before[POOL]))
        assert {_fingerprint(name) for name in redis.names(pool) - before[POOL]} == {fingerprint}

        keyspace = _keyspace(kubectl, GLOBEX_KEY)
        _store(kubectl, redis, GLOBEX_KEY, fresh_prompt())
        assert not before[GLOBEX_KEY] <= redis.names(keyspace), "earlier blocks went, as the least recently used"
        assert redis.held_bytes(keyspace) <= LIMIT_BYTES
        _erase(kubectl, "after", redis)
    receipts = Receipts(kubectl, tmp_path / "after", SERVED, OPERATOR)
    receipts.of("after", *PROVEN)
    assert receipts.of("before", *PROVEN).read_bytes() == first


def _load_earlier_images(scratch: Path) -> None:
    """Build both images; layers with dependencies are this version's as long as its locks are the same."""
    for image in select(PARTS):
        archive = scratch / f"{image.name}.tar"
        build = [
            "image", "build",
            "--context", str(earlier.code()),
            "--file", str(earlier.code() / image.dockerfile),
            "--tag", _image(image.name, EARLIER_TAG),
            "--build-arg", f"BASE={image.debian.base_image}",
            "--out", str(archive),
        ]  # fmt: skip
        assert not cluster(build)
        assert not cluster(["load", str(archive)])
        archive.unlink()


def _image(name: str, tag: str = "") -> str:
    (image,) = select([name])
    return f"{image.tag.rpartition(':')[0]}:{tag}" if tag else image.tag


def _install(kubectl: Kubectl, charts: Path, *settings: str) -> None:
    settings = (f"watchNamespaces={{{SERVED}}}", "replicas=1", *settings)
    words = [word for setting in settings for word in ("--set", setting)]
    release = ("upgrade", "--install", RELEASE, str(charts / "kvstrata"), "-n", OPERATOR, "--create-namespace")
    kubectl.helm(*release, *words, "--wait")


def _objects() -> list[dict[str, Any]]:
    """The demo's objects with one pod and a small Redis; acme and globex are served, and globex has a limit."""
    found = [one for name in SAMPLES_USED for one in yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text())]
    model = next(one["spec"] for one in found if one["kind"] == "CachedModel")
    model["engine"]["args"][-1] = ENGINE_BLOCKS
    model["engine"] |= {"replicas": 1, "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}}
    model |= {"tiers": [{"name": TIER}], "probe": {"mode": "Never"}}
    pool = next(one["spec"] for one in found if one["kind"] == "PrefixPool")
    pool |= {"tiers": [{"name": TIER}], "pinned": False}
    found.append(_object("CacheTier", TIER, {"medium": "Redis", "capacity": "192Mi", "redis": {"managed": {}}}))
    reads = {"isolation": "Isolated", "deletionPolicy": "Abandon", "pools": [{"name": POOL}]}
    budget = {"tier": TIER, "limit": str(LIMIT_BYTES)}
    found.append(_object("TenantCachePolicy", "acme", {"tenant": "acme", **reads}))
    found.append(_object("TenantCachePolicy", "globex", {"tenant": "globex", **reads, "budgets": [budget]}))
    for one in found:
        one["metadata"]["namespace"] = SERVED
    return found


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": SERVED}
    return {"apiVersion": "kvstrata.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def _wait_settled(kubectl: Kubectl) -> None:
    def is_settled() -> bool:
        return not unsettled(kubectl, SERVED) and len(kubectl.list("pod", SERVED, PODS)) == 1

    wait_until("everything is ready and enforced, by one pod", is_settled, READY_TIMEOUT_S, every_s=1)


def _sidecars(kubectl: Kubectl) -> set[str]:
    """The sidecar's images in the model's pods."""
    pods = kubectl.list("pod", SERVED, PODS)
    return {pod["spec"]["initContainers"][0]["image"] for pod in pods}


def _keyspace(kubectl: Kubectl, key: str) -> str:
    return keyspace_of(kubectl, key.partition("-")[0], namespace=SERVED)


def _store(kubectl: Kubectl, redis: TierContents, key: str, prompt: str) -> set[str]:
    """Ask the model for a prompt of which nothing is found; return the names of its blocks once all are stored."""
    keyspace = _keyspace(kubectl, key)
    before = redis.names(keyspace)
    (pod,) = pod_names(kubectl.list("pod", SERVED, PODS))
    with replica(kubectl, SERVED, MODEL, pod) as where:
        answer = where.complete(key, prompt)
    assert (answer.status, answer.cached_tokens) == (200, 0), answer.body
    _wait_stored(redis, keyspace, before, CHUNKS)
    return redis.names(keyspace) - before


def _wait_stored(redis: TierContents, keyspace: str, before: set[str], blocks: int) -> None:
    wait_until(f"{blocks} blocks are stored", lambda: len(redis.names(keyspace) - before) >= blocks)


def _erase(kubectl: Kubectl, name: str, redis: TierContents) -> None:
    """Erase acme from all that it is in, and see that the tier has nothing of it."""
    keyspace = _keyspace(kubectl, ACME_KEY)
    spec = {"scope": {"tenant": "acme"}, "mode": "Eager", "reason": "the contract ended", "deadline": "15m"}
    kubectl.apply(_object("CacheInvalidation", name, spec))

    def ended() -> dict[str, Any] | None:
        status = kubectl.get("cacheinvalidation", name, SERVED).get("status") or {}
        return status if status.get("phase") in ("Complete", "Failed") else None

    done = wait_until(f"{name} is over", ended)
    assert done["phase"] == "Complete", json.dumps(done)
    assert redis.blocks(keyspace) == []
    _wait_settled(kubectl)


def _fingerprint(name: str) -> str:
    key = parse_block_key(name)
    assert key is not None
    return fingerprint_of(key.identity)
