"""Blocks of 16 MiB whose slot moves while they are read: none is torn, and only what may not move is missed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import redis

from kvstrata_sidecar.adapter.redis.client.slots import slot_of
from tests.tiers.server_kinds import REDIS_7, VALKEY_9, ServerKind
from tests.topology.mover_rig import MoverRig, total
from tests.topology.rig import Patience
from tests.topology.test_moves_servers import MEMBERS, audited, bucket_in, ends, store

pytestmark = pytest.mark.redis

MEBIBYTE = 1 << 20
LARGE = 16 * MEBIBYTE
LARGE_MEMBERS = [f"{'1d' * 8}:00000001:0:{number:064x}" for number in range(3)]
ROOM = 256 * MEBIBYTE


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory, server_kind: ServerKind) -> Iterator[MoverRig]:
    rig = MoverRig(tmp_path_factory.mktemp("rig"), server_kind.command(), replicas=0)
    rig.start()
    yield rig
    rig.close()


@pytest.fixture
async def rig(pods: MoverRig) -> AsyncIterator[MoverRig]:
    """Three shards without replicas, with room for large values."""
    pods.goal = replace(pods.goal, max_bytes_each=ROOM)
    await pods.made_anew()
    yield pods
    await pods.nodes.close()


class Reader:
    """A client that asks for values all the time, wherever they are, until the end.

    `missed` are names that it did not find; `problems` are errors, and values that are another's or not whole.
    """

    def __init__(self, rig: MoverRig, values: Mapping[str, int]) -> None:
        self.problems: list[str] = []
        self.missed: set[str] = set()
        self.rounds = 0
        self._values, self._ended = values, threading.Event()
        host = str(next(iter(rig.pods.values())).ip)
        self._client: Any = redis.RedisCluster(host=host, port=rig.port, protocol=2)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                for name, size in self._values.items():
                    found = self._client.get(name)
                    if found is None:
                        self.missed.add(name)
                    elif found != b"v" * size:
                        self.problems.append(f"{name} has {len(found)} bytes")
                self.rounds += 1
                self._ended.wait(0.005)  # the mover runs in this process, too
        except Exception as problem:
            self.problems.append(repr(problem))


async def rounds(reader: Reader, more: int) -> None:
    """Wait until everything was asked for so many times more."""
    until, patience = reader.rounds + more, Patience()
    while reader.rounds < until and not reader.problems:
        patience.ask(reader.rounds)
        await asyncio.sleep(0.01)


def named(bucket: str) -> tuple[dict[str, int], dict[str, int]]:
    """The small and the large values of a bucket, and how long they are."""
    return {f"{bucket}:{one}": 4096 for one in MEMBERS}, {f"{bucket}:{one}": LARGE for one in LARGE_MEMBERS}


@pytest.mark.parametrize("server_kind", [VALKEY_9], ids=str, scope="module")
async def test_blocks_of_16_mib_go_with_their_slot_and_are_read_all_the_time(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    await store(rig, bucket)
    await store(rig, bucket, LARGE, LARGE_MEMBERS)
    small, large = named(bucket)
    here, there = await ends(rig, slot)
    with Reader(rig, small | large) as reader:
        await rounds(reader, 1)
        cluster = await rig.heard()
        order = rig.order(cluster, here, there, slot, atomic=True)
        failure = await rig.mover(pause=asyncio.sleep).carry_out(order, cluster)
        await rounds(reader, 2)
    assert failure == ""
    assert (reader.problems, reader.missed) == ([], set())
    assert (await rig.owner(slot)).shard == there
    assert await audited(rig, bucket) == len(MEMBERS) + len(LARGE_MEMBERS)


@pytest.mark.parametrize("server_kind", [REDIS_7], ids=str, scope="module")
async def test_key_by_key_blocks_over_the_bound_are_missed_and_nothing_else(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    await store(rig, bucket)
    await store(rig, bucket, LARGE, LARGE_MEMBERS)
    small, large = named(bucket)
    here, there = await ends(rig, slot)
    with Reader(rig, small | large) as reader:
        await rounds(reader, 1)
        assert not reader.missed
        cluster = await rig.heard()
        order = rig.order(cluster, here, there, slot)
        failure = await rig.mover(pause=asyncio.sleep).carry_out(order, cluster, rig.count)
        await rounds(reader, 2)
    assert failure == ""
    assert total(rig.reports).dropped == len(large)
    assert (reader.problems, reader.missed) == ([], set(large))
    assert await audited(rig, bucket) == len(MEMBERS), "the index says so, too"
