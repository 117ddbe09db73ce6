"""No log has a keyspace: not a real cache server's at its most talkative, while Redis goes away and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from tests.dataplane.conftest import StartServer, tier
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

KEYSPACE = "0123456789abcdef" * 2


@dataclass
class Pod:
    server: LMCacheServer
    redis: RedisProcess
    directory: Path


@pytest.fixture
def pod(start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    monkeypatch.setenv("LMCACHE_LOG_LEVEL", "DEBUG")
    redis = RedisProcess(tmp_path)
    redis.start()
    gate = GateStandIn(tmp_path)
    try:
        server = start_server(tmp_path, gate, [tier(redis.port)], memory={"tier": "dram"})
        gate.allow(KEYSPACE)
        yield Pod(server, redis, tmp_path)
    finally:
        redis.kill()


def test_a_cache_server_whose_redis_goes_away_logs_no_keyspace(pod: Pod, sequence: int) -> None:
    pod.server.store(sequence, KEYSPACE, 1)
    pod.server.forget_memory()
    until(lambda: pod.server.read(sequence, KEYSPACE)["hits"])
    pod.redis.kill()
    for number in range(1, 6):
        pod.server.store(sequence + number, KEYSPACE, 1)
        pod.server.forget_memory()
        pod.server.read(sequence + number, KEYSPACE)
    pod.redis.start()
    until(lambda: _held_again(pod, sequence + 9))
    # LMCache prints the keys of blocks that are gone when their reader releases them.
    assert pod.server.hold(sequence + 9, KEYSPACE)
    pod.server.forget_memory()
    pod.server.let_go(sequence + 9, KEYSPACE)
    assert KEYSPACE[:SCOPE_DIGITS] in pod.server.log_file.read_text()
    for log in pod.directory.glob("*.log"):
        assert KEYSPACE[SCOPE_DIGITS:] not in log.read_text(errors="replace"), log


def _held_again(pod: Pod, sequence: int) -> bool:
    pod.server.store(sequence, KEYSPACE, 1)
    pod.server.forget_memory()
    return int(pod.server.read(sequence, KEYSPACE)["hits"]) > 0
