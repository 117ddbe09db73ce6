"""A real engine whose LMCache cannot be governed serves, and reports the version."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster.ports import free_port
from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, EngineIdentity
from kvstrata_sidecar.upstream.resolved_identity import IDENTITY_DIRECTORY_KEY
from tests.dataplane.engine_process import EngineProcess, engine_python

pytestmark = pytest.mark.lmcache


def test_an_engine_with_an_unknown_lmcache_serves_without_it(tmp_path: Path) -> None:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    metadata = tmp_path / "packages/lmcache-0.5.7.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.7\n")
    extra: dict[str, object] = {IDENTITY_DIRECTORY_KEY: str(tmp_path)}
    engine = EngineProcess(python, tmp_path, free_port(), extra, packages=metadata.parents[1])
    try:
        engine.wait_until_ready()
        report = EngineIdentity.decode((tmp_path / IDENTITY_FILE).read_bytes())
        problem = "LMCache 0.5.7 is none of the governed versions (0.5.6)"
        assert report == EngineIdentity(problem=problem, ungoverned=True)
        for _ in range(2):
            engine.complete("the same prompt " * 40, "a" * 32)
    finally:
        engine.stop()
