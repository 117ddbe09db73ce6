"""A real engine with a real model, and a Redis tier behind a network that becomes slow, and fast again.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import itertools
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import pytest

from e2e.engine.models import SMOLLM2
from kvstrata.contract.messages.adapter import PrefillCost, RestoreState, TierState
from kvstrata_sidecar.adapter.tier.restoring import FIRST_PAUSE_S
from kvstrata_sidecar.gate.prefill import PrefillCost as Measured
from tests.dataplane.conftest import StartServer, tier
from tests.dataplane.engine_process import CHUNK_TOKENS, EngineProcess, engine_python
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.faulty_proxy import FaultyProxy
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import DEFAULT

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

CHUNKS = 2
"""Each prompt has at least as many."""

ROUNDS = 6
SLOWER = 6
"""Times that a load takes of its prefill, behind the slow network."""

TOKEN_BYTES = 46_080
"""Of the model."""

AT_MOST = 1.5
"""Times the median of computing; a busy machine needs the tolerance."""

_words = itertools.count(1)


def prompt() -> str:
    """Return a new prompt of at least CHUNKS chunks."""
    return " ".join(f"{number} sheep and {next(_words)} goats" for number in range(CHUNKS * CHUNK_TOKENS // 6))


class Pod:
    """An engine, its cache server and a gate that passes the engine's measurements on."""

    def __init__(self, engine: EngineProcess, server: LMCacheServer, gate: GateStandIn) -> None:
        self.engine, self.server, self.gate = engine, server, gate
        self._cost = Measured()

    def measure(self) -> TierState:
        """Pass on the cost of prefill; return the tier's state."""
        self.gate.write_freshness()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.engine.port}/metrics", timeout=60) as page:
            self._cost.observe(page.read())
        costs = (PrefillCost(tokens, round(1e9 * seconds)) for tokens, seconds in self._cost.by_length().items())
        return next(one for one in self.gate.state(*costs).tiers if one.medium == "Redis")

    def request(self, text: str) -> float:
        """Have one token generated, without anything in the memory of the pod; return the seconds."""
        self.server.forget_memory()
        began_s = time.monotonic()
        assert self.engine.completion(prompt=text, cache_salt=KEYSPACE_A, max_tokens=1)["choices"]
        took_s = time.monotonic() - began_s
        self.measure()
        return took_s

    def restores(self) -> RestoreState:
        found = self.measure().restore
        assert found is not None
        return found


@pytest.fixture
def network(tmp_path: Path) -> Iterator[FaultyProxy]:
    server = RedisProcess(tmp_path, command=DEFAULT.command())
    server.start()
    proxy = FaultyProxy(server.port)
    yield proxy
    proxy.close()
    server.kill()


def test_a_slow_tier_costs_no_request_more_than_computing_and_is_used_again_when_it_is_fast(
    start_server: StartServer, tmp_path: Path, network: FaultyProxy
) -> None:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    gate = GateStandIn(tmp_path)
    shared = tier(network.port, load_deadline_ms=60_000, store_deadline_ms=60_000, lookup_deadline_ms=2_000)
    server = start_server(tmp_path, gate, [shared], chunk_tokens=CHUNK_TOKENS, memory={"tier": "dram"}, memory_gb=0.5)
    gate.allow(KEYSPACE_A)
    engine = EngineProcess(python, tmp_path, server.rpc_port, model=SMOLLM2)
    try:
        engine.wait_until_connected()
        pod = Pod(engine, server, gate)
        pod.request(prompt())  # the first one compiles
        texts = [prompt() for _ in range(3)]
        for number, text in enumerate(texts, 2):
            pod.request(text)
            until(lambda n=number: pod.measure().stored >= n * CHUNKS, gate.state)  # type: ignore[misc]

        before = engine.external_hits()
        for text in texts:
            pod.request(text)
        assert engine.external_hits() - before >= 3 * CHUNKS * CHUNK_TOKENS, "a fast tier serves"
        assert (pod.restores().restored, pod.restores().declined) == (3, 0)
        assert pod.restores().saved_ms > 0

        network.bytes_per_s = pod.restores().prefill_tokens_per_s * TOKEN_BYTES / SLOWER
        computed, slow, began_s = [], [], time.monotonic()
        for number in range(ROUNDS):
            computed.append(pod.request(prompt()))
            slow.append(pod.request(texts[number % len(texts)]))
        state = pod.restores()
        print(f"computed {computed}, with the slow tier {slow}, {state}")
        assert median(slow) <= AT_MOST * median(computed)
        assert state.declined >= ROUNDS - 2
        # What a stalled machine adds to one request, it adds to a load that is given up as well.
        assert state.lost_ms <= 1000 * AT_MOST * mean(computed), "one load was given up, and few trials made"
        assert state.given_up <= 2 + (time.monotonic() - began_s) / FIRST_PAUSE_S
        assert pod.measure().breaker == "closed", "slow is not away"

        network.bytes_per_s = None
        served, give_up_at_s = engine.external_hits(), time.monotonic() + 300
        while engine.external_hits() - served < CHUNKS * CHUNK_TOKENS:
            assert time.monotonic() < give_up_at_s, pod.restores()
            served = engine.external_hits()
            pod.request(texts[0])
        assert pod.restores().restored > 3
    finally:
        engine.stop()
