"""Looks at and commands to single servers that can be reached, and that cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.ports import free_port
from kvstrata.api.reasons import TierReason
from kvstrata.clients.redis.nodes import RedisNodes
from kvstrata.clients.redis.probe import Access
from kvstrata.model.redis.cluster import Command, ServerPod
from tests.support.redis_binary import needs_redis
from tests.tiers.certificates import SERVER_NAME, Authority, issue
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import DEFAULT

pytestmark = needs_redis

PATIENT_S, SHORT_S = 30.0, 1.0
CLUSTER = ("--cluster-enabled", "yes")
Start = Callable[..., RedisProcess]


def pod(uid: str = "uid", ip: str | None = "127.0.0.1") -> ServerPod:
    return ServerPod("redis-0-0", uid, 0, 0, ip, ready=True, deleting=False, revision="a")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[RedisProcess] = []

    def start(*options: str, **settings: Any) -> RedisProcess:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(RedisProcess(directory, *options, command=DEFAULT.command(), **settings))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
async def reach() -> AsyncIterator[Callable[..., RedisNodes]]:
    made: list[RedisNodes] = []

    def reach(port: int, server_name: str | None = None, **access: Any) -> RedisNodes:
        chosen = Access(**({"password": None, "ca_pem": None} | access))
        made.append(RedisNodes(port, chosen, server_name, look_timeout_s=PATIENT_S, timeout_s=PATIENT_S))
        return made[-1]

    yield reach
    for nodes in made:
        await nodes.close()


async def failure(nodes: RedisNodes, of: ServerPod | None = None) -> str:
    """Why the server does not answer; empty if it does."""
    cluster = await nodes.look([of or pod()])
    assert cluster.servers.keys().isdisjoint(cluster.silent)
    assert cluster.servers.keys() | cluster.silent.keys() == {"uid"}
    reason, message = cluster.silent.get("uid", ("", ""))
    assert bool(reason) == bool(message)
    assert "secret" not in message
    return reason


async def test_every_way_not_to_answer_has_its_name(start: Start, reach: Callable[..., RedisNodes]) -> None:
    protected = start(*CLUSTER, "--requirepass", "secret", *["--user", "poor", "on", ">poor", "+cluster"]).port
    assert await failure(reach(protected, password="secret")) == ""
    assert await failure(reach(protected, password="secrets")) == TierReason.WRONG_PASSWORD
    assert await failure(reach(protected)) == TierReason.PASSWORD_REQUIRED
    assert await failure(reach(protected, username="poor", password="poor")) == TierReason.NO_PERMISSION
    assert await failure(reach(free_port())) == TierReason.CONNECTION_REFUSED
    assert await failure(reach(protected), pod(ip=None)) == TierReason.NO_SUCH_HOST
    assert await failure(reach(start().port)) == TierReason.NOT_A_CLUSTER


async def test_tls_is_spoken_with_who_is_named_and_trusted(
    start: Start, reach: Callable[..., RedisNodes], tmp_path: Path
) -> None:
    certificates = issue(tmp_path)
    port = start(*CLUSTER, tls=certificates.redis_options).port
    ca = certificates.ca.read_bytes()
    assert await failure(reach(port, ca_pem=ca, server_name=SERVER_NAME)) == ""
    assert await failure(reach(port, ca_pem=ca, server_name="other.test")) == TierReason.CERTIFICATE_REFUSED
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").file.read_bytes()
    assert await failure(reach(port, ca_pem=stranger, server_name=SERVER_NAME)) == TierReason.CERTIFICATE_REFUSED
    assert await failure(reach(port)) != ""


async def test_a_frozen_server_is_given_up_and_asked_over_another_connection(
    start: Start, reach: Callable[..., RedisNodes]
) -> None:
    server = start(*CLUSTER)
    nodes = reach(server.port)
    assert await failure(nodes) == ""
    server.freeze()
    nodes._look_timeout_s = nodes._timeout_s = SHORT_S
    assert await failure(nodes) == TierReason.TIMEOUT
    told = await nodes.send([Command("uid", "x", ("PING",)), Command("uid", "x", ("PING",))], {"uid": pod()}, yes)
    assert [sent.failure for sent in told] == [TierReason.TIMEOUT, "NotSent"]
    server.thaw()
    nodes._look_timeout_s = nodes._timeout_s = PATIENT_S
    # What the frozen one answers late to the first question is no answer to the next.
    assert await failure(nodes) == ""


async def test_an_operator_that_is_cancelled_between_question_and_answer_leaves_no_old_answers(
    start: Start, reach: Callable[..., RedisNodes]
) -> None:
    server = start(*CLUSTER)
    nodes = reach(server.port)
    identity = (await nodes.look([pod()])).servers["uid"].node_id
    server.freeze()
    asking = asyncio.ensure_future(nodes.look([pod()]))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    server.thaw()
    told = await nodes.send([Command("uid", identity, ("PING",))], {"uid": pod()}, yes)
    assert [(sent.failure, sent.answer) for sent in told] == [("", "PONG")]


async def test_a_connection_does_not_outlive_its_server(start: Start, reach: Callable[..., RedisNodes]) -> None:
    server = start(*CLUSTER)
    nodes = reach(server.port)
    identity = (await nodes.look([pod()])).servers["uid"].node_id
    server.kill()
    assert await failure(nodes) in (TierReason.CONNECTION_REFUSED, TierReason.DISCONNECTED)
    for file in Path(server.admin_socket).parent.glob("nodes.conf"):
        file.unlink()
    server.start()
    told = await nodes.send([Command("uid", identity, ("PING",))], {"uid": pod()}, yes)
    assert [sent.failure for sent in told] == ["IdentityChanged"]


async def test_a_command_to_a_pod_that_is_gone_is_not_sent(reach: Callable[..., RedisNodes]) -> None:
    told = await reach(free_port()).send([Command("uid", "x", ("PING",))], {}, yes)
    assert [sent.failure for sent in told] == ["NotSent"]


def yes() -> bool:
    return True
