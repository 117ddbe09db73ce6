"""LMCache's own benchmarks with their verification switched on, through the policy adapter, on each kind of server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_server import ROOT, LMCacheServer, adapter, lmcache_python
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import KINDS, ServerKind

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

RUN_TIMEOUT_S = 240
PROMPTS = 3
CHUNKS = 8
SHAPE = "(2,64,16,2,64):bfloat16:2"
"""KV of two layers for 64 pages of 16 tokens; a prompt of 128 tokens is eight chunks."""


@pytest.fixture(params=KINDS, ids=str)
def redis_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisProcess]:
    kind: ServerKind = request.param
    server = RedisProcess(tmp_path, command=kind.command())
    server.start()
    yield server
    server.kill()


def run(gate: GateStandIn, *arguments: str, salt: str = KEYSPACE_A) -> subprocess.CompletedProcess[str]:
    """Run one of LMCache's benchmarks; its output names what went wrong."""
    python = lmcache_python()
    if python is None:
        pytest.skip("no LMCache: run tests/dataplane/install_lmcache.py or set KVSTRATA_LMCACHE_PYTHON")
    program = Path(__file__).with_name("salted_bench.py")
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src:{ROOT}",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": str(gate.policy_dir.parent),
    }
    command = [str(python), str(program), salt, str(gate.policy_dir), str(gate.link_dir), "bench", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)


def test_what_bench_l2_stores_is_what_it_loads(redis_server: RedisProcess, tmp_path: Path) -> None:
    gate = GateStandIn(tmp_path)
    done = run(
        gate, "l2", "--l2-adapter", json.dumps(adapter(gate, tier(redis_server.port, workers=4, **PATIENT))),
        "--num-keys", "16", "--in-flight", "2", "--data-size-kb", "512", "--rounds", "3", "--warmup-rounds", "1",
        "--lookup-max-hit-rate", "0.5", "--no-skip-verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"\[Verify\].*", done.stdout)
    assert not re.search(r"mismatch|FAIL", done.stdout), done.stdout[-4000:]
    blocks = [name for name in redis_server.admin().scan_iter(count=1000) if b"#" not in name]
    assert len(blocks) >= 16 * 2 * 3
    assert all(KEYSPACE_A.encode() in name for name in blocks)


class TestBenchServer:
    def bench(self, server: LMCacheServer, gate: GateStandIn, salt: str = KEYSPACE_A) -> dict[str, object]:
        done = run(
            gate, "server", "--rpc-url", f"tcp://127.0.0.1:{server.rpc_port}",
            "--url", f"http://127.0.0.1:{server.http_port}", "--mode", "cpu", "--transfer-mode", "engine_driven",
            "--num-tokens", "128", "--kvcache-shape-spec", SHAPE, "--num-blocks", "64", "--block-size", "16",
            "--start", "0", "--end", str(PROMPTS), "--interval", "0.05", "--format", "json", "--output",
            str(gate.policy_dir.parent / "bench.json"), salt=salt,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        results: dict[str, object] = json.loads((gate.policy_dir.parent / "bench.json").read_text())
        return results

    def test_kv_that_comes_back_from_a_tier_has_the_checksum_of_what_was_stored(
        self, start_server: StartServer, redis_server: RedisProcess, tmp_path: Path
    ) -> None:
        gate = GateStandIn(tmp_path)
        server = start_server(tmp_path, gate, [tier(redis_server.port, **PATIENT)], chunk_tokens=16)
        try:
            until(lambda: gate.state().tiers[0].breaker == "closed", gate.state)
            gate.allow(KEYSPACE_A, KEYSPACE_B)
            told = json.dumps(self.bench(server, gate))
            assert re.search(rf'"checksum_ok": {PROMPTS}\b', told), told
            assert re.search(r'"checksum_fail": 0\b', told), told
            state = gate.state().tiers[0]
            assert state.stored >= PROMPTS * CHUNKS
            assert state.loaded >= PROMPTS * CHUNKS, "what was verified came from the tier"
            told = json.dumps(self.bench(server, gate, KEYSPACE_B))
            assert re.search(rf'"checksum_ok": {PROMPTS}\b', told), told
            assert gate.state().tiers[0].stored == 2 * state.stored, "another scope found nothing of the first's"
        finally:
            server.stop()
