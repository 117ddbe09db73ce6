"""The metrics of a real LMCache server under the adapter: without the label that holds salts."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.dataplane.conftest import StartServer
from tests.dataplane.fresh import fresh_keyspace, until
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn

pytestmark = pytest.mark.lmcache


def test_lmcache_counts_without_the_label_that_holds_salts(
    start_server: StartServer, tmp_path: Path, sequence: int
) -> None:
    gate, salts = GateStandIn(tmp_path), (KEYSPACE_A, KEYSPACE_B, fresh_keyspace())
    server = start_server(tmp_path, gate, [None], memory={"tier": "dram"})
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    for salt in salts:
        server.store(sequence, salt, 1)
        server.read(sequence, salt)

    def lookups() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=10) as response:
            page = response.read().decode()
        assert 'cache_salt="' not in page
        assert not any(salt in page for salt in salts)
        return [line for line in page.splitlines() if line.startswith("lmcache_mp_lookups_requests_total")]

    until(lambda: [line.split()[-1] for line in lookups()] == ["3.0"], lookups)
