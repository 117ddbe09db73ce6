"""The operator's own loop over real servers: killed after any command it is continued, and two of it do no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.plan.redis.topology import StepReason
from tests.support.redis_binary import needs_redis
from tests.tiers.certificates import issue
from tests.tiers.server_kinds import DEFAULT, VALKEY_9
from tests.topology.test_healing import assert_sound, written
from tests.topology.wired import Permits, WiredRig

pytestmark = needs_redis

Happens = Callable[[WiredRig], Awaitable[None]]


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredRig]:
    """Three shards of two servers: with TLS where the server has it, where slots move key by key; and atomically."""
    rig = started(tmp_path_factory.mktemp("wired"), request.param)
    yield rig
    rig.close()


def started(directory: Path, server: str, **options: Any) -> WiredRig:
    with_tls = server == WITH_TLS
    command = (DEFAULT if with_tls else VALKEY_9).command()
    rig = WiredRig(directory, command, tls=issue(directory) if with_tls else None, **options)
    rig.start()
    return rig


@pytest.fixture
async def rig(servers: WiredRig) -> AsyncIterator[WiredRig]:
    """Settled, and passed on from test to test."""
    servers.nodes = servers.connect()
    await servers.tended()
    yield servers
    await servers.nodes.close()


def ever_longer() -> Iterator[int]:
    """Lives of 1, 2, 3, 5, 8 … commands: each gets further than what it does again."""
    shorter, longer = 1, 2
    while True:
        yield shorter
        shorter, longer = longer, shorter + longer


async def a_replica_is_lost(rig: WiredRig) -> None:
    rig.replace(await rig.replica(0))


async def a_primary_is_lost(rig: WiredRig) -> None:
    rig.replace(await rig.primary(1))


async def a_shard_more(rig: WiredRig) -> None:
    rig.goal = replace(rig.goal, shards=4, revisions=dict.fromkeys(range(4), rig.goal.revisions[0]))
    for ordinal in range(1 + rig.goal.replicas):
        rig.add(3, ordinal)


async def a_shard_fewer(rig: WiredRig) -> None:
    rig.goal = replace(rig.goal, shards=3)


async def no_replicas(rig: WiredRig) -> None:
    rig.goal = replace(rig.goal, replicas=0)


async def replicas_again(rig: WiredRig) -> None:
    rig.goal = replace(rig.goal, replicas=1)
    for shard in range(rig.goal.shards):
        rig.add(shard, 1)


async def a_new_template(rig: WiredRig) -> None:
    revision = f"{rig.goal.revisions[0]}+"
    rig.goal = replace(rig.goal, revisions=dict.fromkeys(range(3), revision), max_bytes_each=48 << 20)


WITH_TLS, ATOMICALLY = "redis-7.0-tls", "valkey-9.1"
LOST_REPLICA = ("a lost replica", a_replica_is_lost)
LOST_PRIMARY = ("a lost primary", a_primary_is_lost)
SCALED = ("a shard more and fewer", a_shard_more, a_shard_fewer)
MORE = ("a shard more", a_shard_more)
REPLICAS = ("no replicas and one", no_replicas, replicas_again)
ROLL = ("a roll", a_new_template)

Transition = tuple[str | Happens, ...]


def on(**transitions: list[Transition]) -> pytest.MarkDecorator:
    """Parametrize a test with a server and what happens to it."""
    servers = {"with_tls": WITH_TLS, "atomically": ATOMICALLY}
    found = [
        pytest.param(servers[server], happenings, id=f"{servers[server]}-{name}")
        for server, those in transitions.items()
        for name, *happenings in those
    ]
    return pytest.mark.parametrize(("servers", "transition"), found, indirect=["servers"], scope="module")


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(
            WITH_TLS,
            marks=pytest.mark.claim(
                "on real servers a cluster forms although its operators are killed again and again"
            ),
        ),
        ATOMICALLY,
    ],
)
async def test_operators_that_are_killed_command_after_command_form_a_cluster(tmp_path: Path, server: str) -> None:
    # No server dies here, and none is taken for dead because the machine has other work.
    rig = started(tmp_path, server, node_timeout_ms=15_000)
    try:
        killed = await rig.outlive(ever_longer())
        assert killed > 4
        await assert_sound(rig)
    finally:
        await rig.nodes.close()
        rig.close()


@on(with_tls=[LOST_REPLICA, LOST_PRIMARY], atomically=[SCALED, REPLICAS, ROLL])
async def test_operators_that_are_killed_command_after_command_get_it_done_and_lose_nothing(
    rig: WiredRig, transition: list[Happens]
) -> None:
    values, before = await written(rig), len(rig.told)
    for happens in transition:
        await happens(rig)
        killed = await rig.outlive(ever_longer())
        assert killed > 1
        await assert_sound(rig)
        assert rig.read() == values
    assert not [message for message in rig.told[before:] if message.startswith(StepReason.SLOTS_LOST)]


@on(with_tls=[LOST_PRIMARY, ROLL, MORE], atomically=[SCALED])
async def test_two_that_both_take_themselves_for_the_leader_do_no_harm(
    rig: WiredRig, transition: list[Happens]
) -> None:
    """Each command of one may come between any two of the other; what both want is sent twice."""
    values, before = await written(rig), len(rig.told)
    for happens in transition:
        await happens(rig)
        async with rig.in_office(Permits()):
            # Not in step with each other from the start.
            await asyncio.sleep(0.03)
            await rig.tended()
        await rig.tended()
        await assert_sound(rig)
        assert rig.read() == values
    assert not [message for message in rig.told[before:] if message.startswith(StepReason.SLOTS_LOST)]
