"""Slots that move between real servers: nothing is lost that need not be, wherever it is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.clients.redis import slot_keys, slot_mover
from kvstrata.clients.redis.key_names import bucket_of, part_of
from kvstrata.contract.store.redis_scripts import script
from kvstrata.objects.redis.users import user_rules
from kvstrata.plan.redis.topology import StepReason
from kvstrata_sidecar.adapter.redis.client.slots import slot_of
from tests.tiers.server_kinds import KINDS, REDIS_7, REDIS_8, REDIS_8_2, VALKEY_9, ServerKind
from tests.topology.mover_rig import MoverRig, total

pytestmark = pytest.mark.redis

DOMAIN = "d0d0d0d0d0d0d0d0"
BLOCK = 4096
GET_JOBS = ("CLUSTER", "GETSLOTMIGRATIONS")
MEMBERS = [f"{'1d' * 8}:00000000:0:{number:064x}" for number in range(20)]


def base(number: int) -> str:
    return f"kvs1:{DOMAIN}:{{{number:032x}:00}}"


def bucket_in(first: int, last: int) -> str:
    """A bucket in one of these slots."""
    return next(name for number in range(10_000) if first <= slot_of((name := base(number)).encode()) <= last)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory, server_kind: ServerKind) -> Iterator[MoverRig]:
    rig = MoverRig(tmp_path_factory.mktemp("rig"), server_kind.command(), replicas=0)
    rig.start()
    yield rig
    rig.close()


@pytest.fixture
async def rig(pods: MoverRig) -> AsyncIterator[MoverRig]:
    """Three shards without replicas and keys, which the tests of a module pass on to each other."""
    await pods.made_anew()
    yield pods
    await pods.nodes.close()


async def store(rig: MoverRig, bucket: str, size: int = BLOCK, members: list[str] = MEMBERS) -> None:
    """Store blocks as an adapter does: reserve, write, commit."""
    with rig.admin(await rig.owner(slot_of(bucket.encode()))) as client:
        for member in members:
            reserve = {
                "member": member, "size": size, "token": "token", "window_ms": 30_000, "keep_ms": 60_000, "life_ms": 0,
                "limited": False, "evict_before_ms": 0, "encrypts": False, "age_ms": 0,
            }  # fmt: skip
            assert run(client, "reserve", bucket, reserve)[0] == b"ok"
            client.set(f"{bucket}:{member}", b"v" * size, px=30_000)
            commit = {"member": member, "token": "token", "ttl_ms": 3_600_000, "age_ms": 0, "keep_ms": 60_000}
            assert run(client, "commit", bucket, commit) == b"ok"


def run(client: Any, name: str, bucket: str, arguments: Mapping[str, Any]) -> Any:
    """Run a script on a bucket."""
    return client.eval(script(name).text, 1, f"{bucket}:#s", *script(name).words(arguments))


async def audited(rig: MoverRig, bucket: str) -> int:
    """How many blocks a bucket has, of which index, values and accounting say the same."""
    with rig.admin(await rig.owner(slot_of(bucket.encode()))) as client:
        entries = client.hlen(f"{bucket}:#m")
        assert run(client, "audit", bucket, {"cursor": 0, "count": 10_000, "encrypts": False}) == [b"0", 0, 0, 0]
        assert run(client, "recount", bucket, {"step": 500}) == [b"ok", 0, 0, 0]
        assert client.zcard(f"{bucket}:#x") == client.zcard(f"{bucket}:#a") == entries
        return int(entries)


async def ends(rig: MoverRig, slot: int) -> tuple[int, int]:
    """The shard that has a slot, and another of the first three."""
    here = (await rig.owner(slot)).shard
    return here, (here + 1) % 3


every_kind = pytest.mark.parametrize("server_kind", KINDS, ids=str, scope="module")
key_by_key = pytest.mark.parametrize("server_kind", [REDIS_7, REDIS_8, REDIS_8_2], ids=str, scope="module")
on_redis_7 = pytest.mark.parametrize("server_kind", [REDIS_7], ids=str, scope="module")
on_valkey_9 = pytest.mark.parametrize("server_kind", [VALKEY_9], ids=str, scope="module")


@key_by_key
async def test_interrupted_after_each_command_a_move_goes_on_with_nothing_lost(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    await store(rig, bucket)
    before = set(await rig.keys())
    here, there = await ends(rig, slot)
    commands = 0
    while True:
        # What was cut off between the two slots left the second where it was.
        both = [one for one in (slot, slot + 1) if (await rig.owner(one)).shard == here]
        cluster = await rig.heard()
        order = rig.order(cluster, here, there, *both)
        failure = await rig.mover(commands).carry_out(order, cluster)
        if not failure:
            break
        assert failure == slot_mover.NOT_LEADING
        is_open = slot in (await rig.server(rig.pod(here, 0))).itself.migrating
        with rig.admin(rig.pod(here, 0)) as client:
            index_here = [name for name in client.scan_iter() if part_of(name).startswith(b"#")]
        assert not (is_open and index_here), "no script meets half a bucket"
        await rig.settled()
        await rig.assert_whole()
        assert set(await rig.keys()) == before, commands
        assert await audited(rig, bucket) == len(MEMBERS)
        here, there = await ends(rig, slot)
        commands += 1
    assert commands > 10
    await rig.settled()
    await rig.assert_whole()
    assert set(await rig.keys()) == before


@key_by_key
async def test_the_rights_of_the_admin_user_are_enough_and_its_password_is_in_no_report(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket)
    for pod in rig.pods.values():
        with rig.admin(pod) as client:
            client.execute_command("ACL", "SETUSER", "admin", *user_rules("admin", DOMAIN, ["sesame"]))
    rig.credentials = ("admin", "sesame")
    cluster = await rig.heard()
    order = rig.order(cluster, here, there, slot, movable_bytes=BLOCK - 1)
    assert await rig.mover().carry_out(order, cluster, rig.count) == ""
    assert total(rig.reports).dropped == len(MEMBERS), "the index is corrected, too"
    for pod in rig.pods.values():
        with rig.admin(pod) as client:
            client.execute_command("ACL", "SETUSER", "admin", "-restore-asking")
    cluster = await rig.heard()
    await store(rig, bucket)
    failure = await rig.mover().carry_out(rig.order(cluster, there, here, slot), cluster)
    assert "NOPERM" in failure
    assert "sesame" not in failure


@key_by_key
async def test_values_over_the_bound_are_dropped_counted_and_leave_the_index(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket)
    large = [f"{'1d' * 8}:00000001:0:{number:064x}" for number in range(3)]
    await store(rig, bucket, 2 * BLOCK, large)
    cluster = await rig.heard()
    order = rig.order(cluster, here, there, slot, movable_bytes=BLOCK)
    assert await rig.mover().carry_out(order, cluster, rig.count) == ""
    assert total(rig.reports).dropped == 3
    assert (await rig.owner(slot)).shard == there
    assert await audited(rig, bucket) == len(MEMBERS), "it holds no drift: books were kept"


@every_kind
async def test_slots_that_go_without_what_they_hold_arrive_empty(rig: MoverRig) -> None:
    moved, stays = bucket_in(0, 100), bucket_in(101, 5460)
    for bucket in (moved, stays):
        await store(rig, bucket)
    here, there = await ends(rig, 0)
    cluster = await rig.heard()
    order = replace(rig.order(cluster, here, there), slots=((0, 100),), drops=True)
    assert await rig.mover().carry_out(order, cluster, rig.count) == ""
    assert total(rig.reports).slots == 101
    assert total(rig.reports).dropped == len(MEMBERS) + 4, "values, #s, #x, #a and #m"
    await rig.assert_whole()
    assert {bucket_of(name) for name in await rig.keys()} == {stays.encode()}
    await store(rig, moved)
    assert await audited(rig, moved) == len(MEMBERS), "and it is used on"


@on_redis_7
async def test_what_the_target_has_no_room_for_is_dropped_and_counted(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket, 64 * 1024)
    with rig.admin(await rig.primary(there)) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 700_000)
    cluster = await rig.heard()
    assert await rig.mover().carry_out(rig.order(cluster, here, there, slot), cluster, rig.count) == ""
    assert 0 < total(rig.reports).dropped < len(MEMBERS)
    with rig.admin(await rig.primary(there)) as client:
        client.config_set("maxmemory", "64mb")
    assert await audited(rig, bucket) == len(MEMBERS) - total(rig.reports).dropped
    with rig.admin(await rig.primary(here)) as client:
        client.config_set("maxmemory", 1)
    cluster = await rig.heard()
    failure = await rig.mover().carry_out(rig.order(cluster, there, here, slot), cluster)
    assert failure == "", "not even the index has room"
    assert set(await rig.keys()) == set()


@on_redis_7
async def test_a_target_that_is_lost_in_the_middle_costs_the_slot_that_was_on_its_way_and_leaves_no_orphan(
    rig: MoverRig,
) -> None:
    buckets = [bucket_in(0, 100), bucket_in(101, 5460)]
    slot = slot_of(buckets[0].encode())
    for bucket in buckets:
        await store(rig, bucket)
    await rig.scale(4)
    while (found := await rig.pass_once(rig.mover(0))) is None or found.reason is not StepReason.MOVING_SLOTS:
        pass
    await half_way(rig, (await rig.owner(slot)).shard, 3, slot)
    lost = rig.pod(3, 0)
    rig.kill(lost)
    rig.restart(lost)
    await rig.settled()
    await rig.assert_whole()
    assert "closing slot" in " ".join(one.message for one in rig.steps)
    held = {bucket_of(name) for name in await rig.keys()}
    assert held == {buckets[1].encode()}
    await store(rig, buckets[0])
    assert await audited(rig, buckets[0]) == len(MEMBERS), "and it is used on"


@on_redis_7
async def test_a_target_that_imports_a_slot_whose_owner_it_does_not_know_is_told(rig: MoverRig) -> None:
    """It learns no owner from others: gossip about a slot that a server imports is ignored."""
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket)
    order = rig.order(await rig.heard(), here, there, slot)
    with rig.admin(rig.pod(there, 0)) as target, rig.admin(rig.pod(here, 0)) as source:
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", order.source)
        target.execute_command("CLUSTER", "DELSLOTS", slot)
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", order.target)
    await rig.settled()
    await rig.assert_whole()
    assert "1 open slots have no owner in their target's view" in [one.message for one in rig.steps]
    assert await audited(rig, bucket) == len(MEMBERS)


@on_redis_7
async def test_a_source_that_is_lost_in_the_middle_leaves_what_had_arrived(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket)
    await half_way(rig, here, there, slot)
    with rig.admin(rig.pod(there, 0)) as client:
        arrived = set(client.keys())
    assert f"{bucket}:#s".encode() in arrived
    rig.restart(rig.pod(here, 0))
    await rig.settled()
    await rig.assert_whole()
    assert set(await rig.keys()) == arrived


@on_redis_7
async def test_a_bucket_that_was_begun_anew_after_a_failover_goes_at_both_ends(rig: MoverRig) -> None:
    """Redis tells no replica that a slot is open: what is promoted takes stores, into an empty index."""
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket)
    await half_way(rig, here, there, slot)
    with rig.admin(rig.pod(here, 0)) as client:
        client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    await store(rig, bucket, members=[f"{'1d' * 8}:00000001:0:{7:064x}"])
    await rig.settled()
    await rig.assert_whole()
    assert set(await rig.keys()) == set()


@on_redis_7
async def test_a_value_that_expired_but_is_still_counted_does_not_keep_a_slot_open(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    await store(rig, bucket)
    for source, target, drops in ((here, there, False), (there, here, True)):
        with rig.admin(rig.pod(source, 0)) as client:
            client.config_set("hz", 1)  # so that it does not look for expired keys now
            for member in MEMBERS[:10] if drops else MEMBERS[10:]:
                client.pexpire(f"{bucket}:{member}", 1)
            await asyncio.sleep(0.01)
            cluster = await rig.heard()
            failure = await rig.mover().carry_out(rig.order(cluster, source, target, slot, drops=drops), cluster)
            client.config_set("hz", 10)
        assert failure == ""


@on_valkey_9
async def test_a_job_that_hangs_is_given_up_and_says_so(rig: MoverRig) -> None:
    cluster = await rig.heard()
    here, there = await ends(rig, 0)
    order = rig.order(cluster, here, there, 0, atomic=True)
    rig.freeze(rig.pod(there, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_mover, "HANGS_AFTER_S", 0.3)
        failure = await rig.mover(pause=asyncio.sleep).carry_out(order, cluster)
    assert "hung" in failure
    rig.thaw(rig.pod(there, 0))
    await rig.settled()
    assert await rig.mover().carry_out(order, await rig.heard()) == ""


@on_valkey_9
async def test_a_job_whose_watcher_was_lost_is_watched_on_and_not_begun_twice(rig: MoverRig) -> None:
    bucket = bucket_in(0, 5460)
    await store(rig, bucket, 64 * 1024)
    cluster = await rig.heard()
    slot = slot_of(bucket.encode())
    here, there = await ends(rig, slot)
    order = rig.order(cluster, here, there, slot, atomic=True)
    lost = 0
    while (failure := await rig.mover(5).carry_out(order, cluster)) == slot_mover.NOT_LEADING:
        lost += 1
    assert lost > 0
    assert (await rig.owner(slot)).shard == there, failure
    with rig.admin(rig.pod(here, 0)) as client:
        jobs = [job for job in client.execute_command(*GET_JOBS) if b"EXPORT" in job and b"%d-%d" % (slot, slot) in job]
    assert len(jobs) == 1
    assert await audited(rig, bucket) == len(MEMBERS)


class EnoughError(Exception):
    """Ends a move from without."""


async def half_way(rig: MoverRig, source: int, target: int, slot: int) -> None:
    """Leave a slot when its index and some of its values have gone."""
    pauses = iter(range(2))  # after the index, and after the first values

    async def pause(_: float) -> None:
        if next(pauses) > 0:
            raise EnoughError

    cluster = await rig.heard()
    order = rig.order(cluster, source, target, slot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_keys, "BATCH_KEYS", 5)
        with pytest.raises(EnoughError):
            await rig.mover(pause=pause).carry_out(order, cluster)
