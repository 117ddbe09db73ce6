"""A tier that requires encryption behind the real LMCache server: what the tier's process sees, and what keys leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvstrata.contract.policy.data_key import DataKey
from tests.dataplane import memory_scan
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.redis,
    pytest.mark.claim("Redis never holds a piece of a block, nor the cache server a piece of a dropped key"),
]

CHUNKS = 4
WITHIN_S = 60.0


def test_the_tier_never_sees_a_block_and_the_server_keeps_no_key_that_went(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory: Path = tmp_path_factory.mktemp("sealed")
    gate, redis = GateStandIn(directory), RedisProcess(directory)
    keyed, marker = KeyedGate(gate), os.urandom(16)
    going, staying = DataKey(1, os.urandom(32)), DataKey(1, os.urandom(32))
    redis.start()
    try:
        sealed = tier(redis.port, encryption="Required", **PATIENT)
        server = start_server(directory, gate, [sealed], memory={"tier": "dram"})
        keyed.allow({KEYSPACE_A: (going,), KEYSPACE_B: (staying,)})

        def state_when(stored: int) -> object:
            give_up_at_s = time.monotonic() + WITHIN_S
            while (state := gate.state().tiers[0]).breaker != "closed" or state.stored < stored:
                assert time.monotonic() < give_up_at_s, gate.state()
                time.sleep(0.02)
            return state

        state_when(0)
        assert server.store_marked(1, KEYSPACE_A, marker)["stored"]
        state_when(CHUNKS)
        assert redis._process
        assert memory_scan.in_process(server.process.pid, [marker])[0] > 0, "the search finds what is there"
        assert memory_scan.in_process(redis._process.pid, [marker]) == [0]
        server.forget_memory()
        assert server.hold(1, KEYSPACE_A) == CHUNKS, "the tier has it"
        server.let_go(1, KEYSPACE_A)
        secrets = [part for key in (going, staying) for part in (key.secret[:16], key.secret[16:])]
        assert all(memory_scan.in_process(server.process.pid, secrets))
        keyed.allow({KEYSPACE_B: (staying,)})
        left = memory_scan.in_process(server.process.pid, secrets)
        assert left[:2] == [0, 0]
        assert all(left[2:])
    finally:
        redis.kill()
