"""The cache container of a pod whose LMCache cannot be governed, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.ports import free_port
from kvstrata.contract.messages.erase import EraseOutcome
from kvstrata.contract.policy.tiers import Server, TierRules
from tests.adapter.memory_server import until
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[GateStandIn]:
    """A gate whose cache server has LMCache 0.5.7 installed and, as a tier, files of the node."""
    metadata = tmp_path / "site/lmcache-0.5.7.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.7\n")
    gate, port = GateStandIn(tmp_path), free_port()
    pod = {
        "domain": DOMAIN, "identity": IDENTITY, "policy_dir": str(gate.policy_dir), "link_dir": str(gate.link_dir)
    }  # fmt: skip
    directory = tmp_path / "files"
    directory.mkdir()
    files = {"medium": "NVMe", "name": "disk", "directory": str(directory), "free_floor_percent": 0}
    tier = files | {"capacity_bytes": 1 << 20, "max_blocks": 64}
    adapter = {"type": "plugin", "adapter_params": pod | {"tier": tier}}
    command = [
        sys.executable, "-m", "kvstrata_sidecar.adapter.start", "--port", "1", "--no-l1-use-lazy",
        "--http-host", "127.0.0.1", "--http-port", str(port), "--l2-adapter", json.dumps(adapter),
        "--server-module", json.dumps({"module_path": "m", "config": pod | {"tier": "dram"}}),
    ]  # fmt: skip
    path = f"{tmp_path}/site:{ROOT}/operator/src:{ROOT}/sidecar/src"
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    try:
        until(answers)
        yield gate
    finally:
        process.terminate()
        process.wait()


def test_it_enforces_the_policy_and_names_the_version(gate: GateStandIn) -> None:
    assert gate.allow(KEYSPACE_A).revision == gate.revision
    state = gate.state()
    assert state.ungoverned == "LMCache 0.5.7 is none of the governed versions (0.5.6)"
    assert [tier.name for tier in state.tiers] == ["disk"]


def test_it_joins_and_leaves_redis_tiers(gate: GateStandIn) -> None:
    tiers = (TierRules("shared", (Server("127.0.0.1", 1),), 1 << 20),)
    for named in (tiers, ()):
        gate.enforce({KEYSPACE_A: ()}, tiers=named)
        assert [tier.name for tier in gate.state().tiers] == ["disk", *(tier.name for tier in named)]


def test_it_erases_its_files_and_has_no_memory_to_erase(gate: GateStandIn) -> None:
    gate.allow(KEYSPACE_A)
    until(lambda: gate.erase(KEYSPACE_B).outcome is EraseOutcome.COMPLETE)
    erased = gate.erase(KEYSPACE_B)
    assert {row.tier: row.medium for row in erased.tiers} == {"dram": "CPU", "disk": "NVMe"}
