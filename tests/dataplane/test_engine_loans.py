"""A real engine whose tenants read a pool in the memory of their cache server, without any shared tier.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvstrata.contract.messages.adapter import ChunkHashes, HashRequest
from kvstrata.contract.policy.pools import PoolState, PoolVersion, pack_hashes
from tests.dataplane.conftest import StartServer
from tests.dataplane.engine_process import CHUNK_TOKENS, PATIENT, EngineProcess, engine_python
from tests.dataplane.fresh import until
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.pool_gate import POOL, PoolGate, reader, reader_space

pytestmark = [pytest.mark.lmcache]

READERS = (1, 2, 3)
STRANGER, UNCACHED = 50, 51
PREFIX = "You answer questions about the weather in one sentence. ".ljust(5 * CHUNK_TOKENS, "=")


def nearly(ones: list[dict[str, float]], others: list[dict[str, float]]) -> bool:
    """Whether the likeliest tokens and their log probabilities are the same but for rounding."""
    return len(ones) == len(others) and all(
        one.keys() == other.keys() and all(one[token] == pytest.approx(other[token], abs=0.02) for token in one)
        for one, other in zip(ones, others, strict=True)
    )


def test_readers_get_what_an_engine_without_a_cache_computes_out_of_one_copy(
    start_server: StartServer, tmp_path: Path
) -> None:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    gate = GateStandIn(tmp_path)
    pools = PoolGate(gate)
    server = start_server(tmp_path, gate, [None], chunk_tokens=CHUNK_TOKENS, memory={"tier": "dram"})
    engine = EngineProcess(python, tmp_path, server.rpc_port, PATIENT)
    try:
        engine.wait_until_connected()
        ids = engine.tokens(PREFIX)
        told = gate.put(HashRequest(struct.pack(f"<{len(ids)}I", *ids)), ChunkHashes)
        assert told.chunk_tokens == CHUNK_TOKENS
        hashes = pack_hashes(told.hashes[start : start + 32] for start in range(0, len(told.hashes), 32))
        chunks = len(hashes) // 32
        assert chunks >= 5

        def publish(state: PoolState, *readers: int) -> None:
            entries = [reader(number, "docs") for number in readers] + [reader(STRANGER)]
            pools.publish(entries, docs=(PoolVersion(POOL, "r", state, hashes, ("dram",)),))

        def blocks(keyspace: str) -> int:
            return sum(row.blocks for row in gate.state().usage if row.scope == keyspace[:12])

        publish(PoolState.WARMING)
        engine.complete(PREFIX, POOL)
        until(lambda: blocks(POOL) == chunks, gate.state)
        publish(PoolState.PUBLISHED, *READERS)

        prompts = {number: f"{PREFIX} Question {number}: what about the rain?" for number in READERS}
        uncached = {number: engine.logprobs(prompts[number], reader_space(UNCACHED)) for number in READERS}
        assert not nearly(uncached[1], engine.logprobs(PREFIX[::-1], reader_space(UNCACHED))), "the prompt matters"
        for number in READERS:
            gate.write_freshness()
            before = engine.external_hits()
            assert nearly(engine.logprobs(prompts[number], reader_space(number)), uncached[number])
            assert engine.external_hits() - before == chunks * CHUNK_TOKENS
        assert gate.state().counters["memory.lent_blocks"] == chunks * len(READERS)
        until(lambda: gate.state().counters["memory.loans"] == 0, gate.state)
        assert blocks(POOL) == chunks
        assert [blocks(reader_space(number)) for number in READERS] == [0] * len(READERS), "no chunk of their own"
        before = engine.external_hits()
        engine.complete(prompts[1], reader_space(STRANGER))
        assert engine.external_hits() == before
    finally:
        engine.stop()
