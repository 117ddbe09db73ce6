"""The page of a real gate before a real engine and a real LMCache: all metrics of both, and no salt.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.engine.models import RANDOM_WITH_MERGES
from kvstrata.contract.policy.bundle import Entry
from kvstrata_sidecar.gate.prefill import EXTERNAL
from kvstrata_sidecar.gate.relay import CACHE_NAMES, ENGINE_NAMES, FRESH_S, relayed
from tests.dataplane.conftest import StartServer
from tests.dataplane.engine_process import CHUNK_TOKENS, MODEL, EngineProcess, engine_python
from tests.dataplane.lmcache_server import LMCacheServer
from tests.gate.stand_in_api import StandInApi
from tests.gate.world import ACME, GLOBEX, World, entry, post, until
from tests.tiers.gate_stand_in import DOMAIN

pytestmark = pytest.mark.lmcache

LOOKUPS = "lmcache_mp_lookups_requests_total"
WORD = "unheardof"
PROMPT = f"The {WORD} of the tenant is the policy of the engine and the block of the tier and the cache. " * 30
FOR_DASHBOARDS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:time_to_first_token_seconds", "vllm:request_success",
    "vllm:e2e_request_latency_seconds", "vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits",
    "lmcache_mp_lookup_requested_tokens", "lmcache_mp_lookup_hit_tokens", "lmcache_mp_lookup_hit_l1_tokens",
    "lmcache_mp_l1_memory_usage_bytes",
}  # fmt: skip
"""Families that vLLM's and LMCache's own dashboards and endpoint pickers for vLLM read."""


@dataclass
class Pod:
    world: World
    server: LMCacheServer


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("metrics")
    with tempfile.TemporaryDirectory(prefix="pod") as name:
        world = World(Path(name))
        folders: Any = SimpleNamespace(policy_dir=world.directory / "policy", link_dir=world.directory / "link")
        server = start_server(directory, folders, [None], CHUNK_TOKENS, memory={"tier": "dram"})
        engine = EngineProcess(
            python, directory, server.rpc_port, model=RANDOM_WITH_MERGES, socket_path=world.engine.socket_path
        )
        try:
            engine.wait_until_connected()
            yield Pod(world, server)
        finally:
            engine.stop()


@pytest.fixture
async def gate(pod: Pod) -> AsyncIterator[World]:
    world = pod.world
    world.api, world.root = StandInApi(), replace(world.root, domain=DOMAIN, shards=(), pools=())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.gate_tls / "tls.crt", world.gate_tls / "tls.key")
    await world.api.start(context)
    await world.publish_keys(acme=ACME, globex=GLOBEX)
    try:
        async with world.started(served_model=MODEL, cache_http_port=pod.server.http_port):
            await until(lambda: world.gate.engine_ready)
            yield world
    finally:
        await world.api.stop()


async def complete(world: World, key: str) -> None:
    answer = await world.ask(post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, key))
    assert answer.status == 200, answer.body


async def test_the_page_has_all_metrics_of_engine_and_lmcache_and_no_salt(gate: World, pod: Pod) -> None:
    tenants: list[Entry] = [entry("acme"), entry("globex")]
    await gate.acked(await gate.publish(tenants))
    for key in (ACME, GLOBEX, ACME, GLOBEX):
        await complete(gate, key)
        await asyncio.sleep(0.5)
    lookups = 0.0
    async with asyncio.timeout(60):
        while lookups < 4:  # LMCache counts a lookup some time after it
            await asyncio.sleep(FRESH_S + 0.1)
            page = (await gate.get("/metrics")).body
            found = list(text_string_to_metric_families(page.decode()))
            series = [one for family in found for one in family.samples if one.name == LOOKUPS]
            assert len(series) <= 1, "one series counts all scopes"
            lookups = sum(one.value for one in series)
    assert lookups == 4
    names = [family.name for family in found]
    assert sorted(names) == sorted(set(names)), "a family is on the page twice"
    assert set(names) >= FOR_DASHBOARDS
    reported = {(one.name, *sorted(one.labels.items())): one.value for family in found for one in family.samples}
    assert reported["kvstrata_gate_relay_up", ("source", "engine")] == 1
    assert reported["kvstrata_gate_relay_up", ("source", "cache")] == 1
    # LMCache's label is removed where it counts, not by leaving out lines.
    assert reported["kvstrata_gate_relay_left_out_lines", ("source", "cache")] == 0
    assert reported["kvstrata_gate_relay_left_out_lines", ("source", "engine")] == 0
    assert reported["kvstrata_gate_prefill_avoided_seconds_total", ("source", EXTERNAL)] > 0
    for secret in (ACME, GLOBEX, WORD, *(one.keyspace for one in tenants)):
        assert secret.encode() not in page
    upstream = relayed(page, [*ENGINE_NAMES, *CACHE_NAMES])[0]
    assert len(upstream) > 10_000
    for name in (b"acme", b"globex", b'cache_salt="', b"tenant"):
        assert name not in upstream


async def test_engine_and_cache_server_agree_on_a_fingerprint(gate: World) -> None:
    state = gate.gate.state()
    assert re.fullmatch("[0-9a-f]{16}", state.fingerprint), state.unresolved
    assert state.facts["vllm"]


async def test_callers_find_no_metrics_behind_the_gate(gate: World) -> None:
    for path in ("/metrics", "/metrics/", "/load", "/v1/metrics"):
        assert (await gate.get(path, "http")).status == 404
