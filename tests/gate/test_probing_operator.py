"""From a schedule to IsolationVerified: an operator process, an API server, a gate, the adapter and Redis.

Of the pod an engine and LMCache are missing: what stands in for both has the adapter's tier store what it computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.cluster.control_plane import ControlPlane
from kvstrata.contract.messages.engine_identity import marked
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.pool_report import Hasher
from kvstrata_sidecar.adapter.runtime import Runtime, acquire, release
from kvstrata_sidecar.adapter.tier.interface import Block
from tests.support.objects import cpu_tier, model, own, policy
from tests.tiers.conftest import PATIENT
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver, stored

from .probed_cluster import ProbedCluster, come
from .test_probing import CachingEngine
from .world import World

pytestmark = [pytest.mark.apiserver, pytest.mark.redis]

FAULTY = "tests.support.operator_with_one_keyspace"
TENANTS = ("acme", "globex", "initech")


class Key(NamedTuple):
    """LMCache's name of a chunk's only part."""

    chunk_hash: bytes
    cache_salt: str
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    model_name: str = marked("tiny", FINGERPRINT)


class StoringEngine(CachingEngine):
    """Has the adapter's tier store the whole chunks that it computes."""

    driver: Driver

    def store(self, salt: str, hashes: bytes) -> None:
        """Store blocks as LMCache hands them over."""
        keys = [Key(name, salt) for name in named(hashes)]
        blocks = [Block(key, salt, key.kv_rank, key.object_group_id, key.chunk_hash, FINGERPRINT) for key in keys]
        if blocks:
            self.driver.store(blocks)


class Pod:
    """A gate's surroundings with the real adapter and its tier in a real Redis, which encrypts."""

    def __init__(self, world: World, redis: RedisProcess) -> None:
        tier = TierParams("shared", endpoints=(Endpoint("127.0.0.1", redis.port),), encryption="Required", **PATIENT)  # type: ignore[arg-type]
        folders = (world.directory / "policy", world.directory / "link")
        params = AdapterParams(DOMAIN, IDENTITY, tier, *folders)
        self.runtime: Runtime = acquire(params)
        self.runtime.hasher = Hasher(
            world.adapter.chunk_tokens, lambda ids: named(world.adapter.named(packed(ids)).hashes)
        )
        self.runtime.names = lambda keyspace, hashes: [[Key(name, keyspace)] for name in hashes]
        self.runtime.enforcement.fingerprints = lambda: [FINGERPRINT]
        self.redis = redis
        self.engine = StoringEngine(world)
        self.engine.driver = Driver(self.runtime, params, tier)
        world.engine.handler = self.engine

    def close(self) -> None:
        """End the tier and the adapter."""
        self.engine.driver.tier.close()
        release(self.runtime)


def named(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]


def packed(ids: Sequence[int]) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


@pytest.fixture
async def pod(world: World, tmp_path: Path) -> AsyncIterator[Pod]:
    await world.adapter.stop()
    world.root = replace(world.root, domain=DOMAIN)
    redis = RedisProcess(tmp_path)
    redis.start()
    made = await asyncio.to_thread(Pod, world, redis)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)
        redis.kill()


async def test_an_operator_verifies_isolation_and_fences_reuse_when_keyspaces_are_derived_wrongly(
    pod: Pod, world: World, tmp_path: Path
) -> None:
    # Pods of this model have data keys, because a tier of theirs encrypts.
    encrypted = own("CacheTier", "disk", {"medium": "NVMe", "capacityPerPod": "1Gi", "nvme": {"emptyDir": {}}})
    probe = {"interval": "10s", "onFailure": "FenceReuse"}
    served = model(tiers=("dram", "disk"), probe=probe)
    with ControlPlane(tmp_path / "control-plane") as plane:
        cluster = await asyncio.to_thread(ProbedCluster, plane, tmp_path / "cluster")
        try:
            cluster.put(own("CacheDomain", "default", {}))
            cluster.tell_domain(DOMAIN)
            cluster.put_api_keys()
            cluster.put(cpu_tier("dram"), encrypted, served, *map(policy, TENANTS))
            sound = await asyncio.to_thread(cluster.start_operator, "sound")
            changes = await asyncio.to_thread(cluster.start_pod)
            async with world.started(**changes):
                await come(
                    lambda: cluster.isolation() == ("True", "IsolationShown"),
                    lambda: (cluster.status(), sound.log_tail()),
                )
                told = cluster.status()["probe"]
                # Two others and other tokens in the tier, another in the engine; four controls.
                assert (told["pods"], told["lookups"], told["controls"], "failure" in told) == (1, 4, 4, False)
                assert "in Engine, shared" in cluster.message()
                assert reuse(world) == "Prefix"
                # The next probe may be under way by now.
                await come(lambda: stored(pod.redis) == [], lambda: stored(pod.redis))
                await asyncio.to_thread(sound.stop)

                faulty = await asyncio.to_thread(cluster.start_operator, "faulty", FAULTY)
                await come(
                    lambda: cluster.isolation() == ("False", "ForeignHit"),
                    lambda: (cluster.status(), faulty.log_tail()),
                )
                assert "which have one keyspace in Engine, shared" in cluster.message()
                await come(lambda: [reason for reason, _ in cluster.events()] == ["IsolationBroken"], cluster.events)
                await come(lambda: faulty.metric("kvstrata_isolation_broken", model="tiny") == 1, faulty.log_tail)
                await come(lambda: reuse(world) == "Disabled", faulty.log_tail)
                await asyncio.to_thread(faulty.stop)

                # Whoever leads next fences by what status says, though it derives keyspaces as it should.
                following = await asyncio.to_thread(cluster.start_operator, "next")
                await come(lambda: world.gate.enforcement.term == 3, following.log_tail)
                assert reuse(world) == "Disabled"
                assert cluster.isolation() == ("False", "ForeignHit")
        finally:
            await asyncio.to_thread(cluster.close)


def reuse(world: World) -> str:
    bundle = world.gate.enforcement.bundle
    return bundle.root.rules.reuse if bundle is not None else ""
