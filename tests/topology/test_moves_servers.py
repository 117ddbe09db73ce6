"""Slots that move between real servers: nothing is lost that need not be, wherever it is interrupted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata.adapters.slot_moves import MoveReason
from kvstrata.contract.scripts import script
from kvstrata_sidecar.adapter.slots import slot_of
from tests.tiers.server_kinds import KINDS, REDIS_7, REDIS_8, VALKEY_9, ServerKind
from tests.topology.mover_rig import MoverRig, total

pytestmark = pytest.mark.redis

DOMAIN = "d0d0d0d0d0d0d0d0"
BLOCK = 4096
MEMBERS = [f"{'1d' * 8}:00000000:0:{number:064x}" for number in range(20)]


def base(number: int) -> str:
    return f"kvs1:{DOMAIN}:{{{number:032x}:00}}"


def bucket_in(first: int, last: int) -> str:
    """A bucket in one of these slots."""
    return next(name for number in range(10_000) if first <= slot_of((name := base(number)).encode()) <= last)


@pytest.fixture
async def rig(tmp_path: Path, server_kind: ServerKind) -> AsyncIterator[MoverRig]:
    rig = MoverRig(tmp_path, server_kind.command(), replicas=0)
    rig.start()
    await rig.settled()
    yield rig
    await rig.nodes.close()
    rig.close()


async def store(rig: MoverRig, bucket: str, size: int = BLOCK, members: list[str] = MEMBERS) -> None:
    """Store blocks as an adapter does: reserve, write, commit."""
    with rig.admin(await rig.owner(slot_of(bucket.encode()))) as client:
        for member in members:
            reserve = (member, size, "token", 30_000, 60_000, 0, 0, 0, 0, 0, 0)
            assert client.eval(script("reserve").text, 1, f"{bucket}:#s", *reserve)[0] == b"ok"
            client.set(f"{bucket}:{member}", b"v" * size, px=30_000)
            commit = (member, "token", 3_600_000, 0, 60_000, 0)
            assert client.eval(script("commit").text, 1, f"{bucket}:#s", *commit) == b"ok"


async def audited(rig: MoverRig, bucket: str) -> int:
    """How many blocks a bucket has, of which index, values and accounting say the same."""
    with rig.admin(await rig.owner(slot_of(bucket.encode()))) as client:
        entries = client.hlen(f"{bucket}:#m")
        assert client.eval(script("audit").text, 1, f"{bucket}:#s", 0, 10_000) == [b"0", 0, 0]
        assert client.eval(script("recount").text, 1, f"{bucket}:#s", 10_000, 500) == [b"ok", 0, 0, 0]
        assert client.zcard(f"{bucket}:#x") == client.zcard(f"{bucket}:#a") == entries
        return int(entries)


every_kind = pytest.mark.parametrize("server_kind", KINDS, ids=str)
key_by_key = pytest.mark.parametrize("server_kind", [REDIS_7, REDIS_8], ids=str)
on_redis_7 = pytest.mark.parametrize("server_kind", [REDIS_7], ids=str)
on_valkey_9 = pytest.mark.parametrize("server_kind", [VALKEY_9], ids=str)


@every_kind
async def test_a_shard_comes_and_goes_and_every_block_is_where_its_slot_is(rig: MoverRig) -> None:
    buckets = [base(number) for number in range(12)]
    for bucket in buckets:
        await store(rig, bucket)
    before = set(await rig.keys())
    await rig.scale(4)
    await rig.settled()
    await rig.assert_whole()
    assert set(await rig.keys()) == before
    assert len({await rig.owner(slot) for slot in range(0, 16_384, 512)}) == 4
    await rig.scale(3)
    await rig.settled()
    await rig.assert_whole()
    assert set(await rig.keys()) == before
    assert {pod.shard for pod in rig.pods.values()} == {0, 1, 2}
    assert [await audited(rig, bucket) for bucket in buckets] == [len(MEMBERS)] * len(buckets)
    assert all(report.done for report in rig.reports), rig.reports
    done = total(rig.reports)
    assert (done.slots, done.dropped, done.orphans) == (2 * 4096, 0, 0)


@key_by_key
async def test_interrupted_after_each_command_a_move_goes_on_with_nothing_lost(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    await store(rig, bucket)
    before = set(await rig.keys())
    here, there = 0, 1
    commands = 0
    while True:
        cluster = await rig.look()
        order = rig.order(cluster, here, there, slot, slot + 1)
        report = await rig.mover(commands).carry_out(order, cluster)
        if report.done:
            break
        assert report.reason is MoveReason.NOT_LEADING
        await rig.settled()
        await rig.assert_whole()
        assert set(await rig.keys()) == before, commands
        assert await audited(rig, bucket) == len(MEMBERS)
        here = (await rig.owner(slot)).shard
        there = 1 - here
        commands += 1
    assert commands > 10
    await rig.settled()
    await rig.assert_whole()
    assert set(await rig.keys()) == before
