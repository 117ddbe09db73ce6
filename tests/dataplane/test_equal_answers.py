"""Answers out of a cache are bit for bit those of an engine that computes everything, from every tier.

The engine's steps have as many tokens as a chunk, so that a cold prompt is computed in the same pieces as one whose
beginning is restored: then its numbers are the same. With longer steps they differ by rounding, as they do with vLLM's
own prefix cache (docs/concepts/blocks.md). Needs vLLM for CPUs: see test_engine_guard.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from e2e.cluster.settings import REPOSITORY
from e2e.engine.models import RANDOM_WITH_WINDOWS, SMOLLM2
from e2e.product.prompts import continuation, fresh_prompt, whole_chunks
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.data_key import DataKey
from tests.dataplane import engine_process
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.engine_process import CHUNK_TOKENS, EngineProcess, engine_python
from tests.dataplane.fresh import fresh_keyspace, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.support.amounts import SOAK
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

MEMORY, PLAIN_FILES, FILES, PLAIN, SEALED = "dram", "plain-disk", "disk", "plain", "sealed"
TIERS = (MEMORY, PLAIN_FILES, FILES, PLAIN, SEALED)
DOCUMENT = (REPOSITORY / "LICENSE").read_text()
LONG = 4000
"""Characters of it, about 850 tokens."""

ATTEMPTS = 5
"""A lookup that is late on a busy machine is a miss: its answer must be equal, too, but shows nothing about a tier."""


@dataclass
class Pod:
    """An engine, its cache server with every kind of tier, and the gate."""

    engine: EngineProcess
    server: LMCacheServer
    gate: GateStandIn

    def allow(self, keyspace: str, *tiers: str) -> None:
        """Let a keyspace be kept in these tiers alone."""
        nothing = tuple(EnforcedBudget(name, limit_bytes=0) for name in TIERS if name not in tiers)
        KeyedGate(self.gate).allow({keyspace: (DataKey(1, os.urandom(32)),)}, {keyspace: nothing})

    def loaded(self) -> dict[str, int]:
        """How many blocks each tier behind the memory has served."""
        counters = self.gate.state().counters
        return {name: counters.get(f"{name}.loaded", 0) for name in TIERS if name != MEMORY}

    def stored(self, keyspace: str, tier: str) -> int:
        """How many blocks of a keyspace a tier has, as far as this pod stored them."""
        if tier in (MEMORY, PLAIN_FILES, FILES):
            rows = self.gate.state().usage
            return sum(row.blocks for row in rows if (row.scope, row.tier) == (keyspace[:12], tier))
        return next(state.stored for state in self.gate.state().tiers if state.name == tier)

    def store(self, prompt: str, keyspace: str, tiers: Sequence[str], computed: list[dict[str, float]]) -> None:
        """Ask for a new prompt, and wait until each of the tiers has its chunks."""
        chunks = whole_chunks(len(self.engine.tokens(prompt))) // CHUNK_TOKENS
        until(lambda: all(state.breaker == "closed" for state in self.gate.state().tiers), self.gate.state)
        wanted = {name: self.stored(keyspace, name) + chunks for name in tiers}
        assert self.answer(prompt, keyspace) == (computed, 0)
        until(lambda: all(self.stored(keyspace, name) >= wanted[name] for name in tiers), self.gate.state)

    def answer(self, prompt: str, keyspace: str) -> tuple[list[dict[str, float]], int]:
        """Return the likeliest tokens with their log probabilities, and how many tokens came from the cache server."""
        self.gate.write_freshness()
        before = self.engine.external_hits()
        return self.engine.logprobs(prompt, keyspace), int(self.engine.external_hits() - before)


@pytest.fixture(scope="class")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("equal")
    for name in (PLAIN_FILES, FILES, PLAIN, SEALED):
        (directory / name).mkdir()
    redis = {name: RedisProcess(directory / name) for name in (PLAIN, SEALED)}
    for one in redis.values():
        one.start()
    gate = GateStandIn(directory)
    tiers = [
        file_tier(directory / PLAIN_FILES, name=PLAIN_FILES, capacity_bytes=512 << 20, **PATIENT_FILES),
        file_tier(directory / FILES, encryption="Required", capacity_bytes=512 << 20, **PATIENT_FILES),
        tier(redis[PLAIN].port, PLAIN, **PATIENT),
        tier(redis[SEALED].port, SEALED, encryption="Required", **PATIENT),
    ]
    server = start_server(directory, gate, tiers, CHUNK_TOKENS, memory={"tier": MEMORY}, memory_gb=0.3)
    flags = {"--max-num-batched-tokens": str(CHUNK_TOKENS)}
    engine = EngineProcess(python, directory, server.rpc_port, engine_process.PATIENT, model=SMOLLM2, flags=flags)
    try:
        engine.wait_until_connected()
        yield Pod(engine, server, gate)
    finally:
        engine.stop()
        for one in redis.values():
            one.kill()


class TestStepsOfAChunk:
    @pytest.mark.parametrize(
        "kept", [(MEMORY,), (PLAIN_FILES,), (FILES,), (PLAIN,), (SEALED,), (FILES, SEALED)], ids=" then ".join
    )
    def test_a_prompt_out_of_a_tier_has_the_log_probabilities_of_a_computed_one(
        self, pod: Pod, kept: tuple[str, ...]
    ) -> None:
        for prompt in (fresh_prompt(200), DOCUMENT[:1300]):
            keyspace = fresh_keyspace()
            computed, found = pod.answer(prompt, fresh_keyspace())
            assert found == 0, "no policy allows that keyspace"
            pod.allow(keyspace, *kept)
            pod.store(prompt, keyspace, kept, computed)
            tokens = whole_chunks(len(pod.engine.tokens(prompt)))
            served = {name: tokens // CHUNK_TOKENS * (name == kept[0]) for name in TIERS if name != MEMORY}
            for _ in range(ATTEMPTS):
                if kept != (MEMORY,):
                    pod.server.forget_memory()
                before = pod.loaded()
                again, found = pod.answer(prompt, keyspace)
                assert again == computed, f"{found} tokens from {kept}"
                if found == tokens:
                    assert {name: blocks - before[name] for name, blocks in pod.loaded().items()} == served
                    break
            else:
                pytest.fail("every lookup was late")

    def test_blocks_of_another_prompt_would_show(self, pod: Pod) -> None:
        """The control of the tests above, and of the stories, which compare answers: the answer is in the blocks."""
        first, second = fresh_prompt(), fresh_prompt()
        assert pod.answer(first, fresh_keyspace())[0] != pod.answer(second, fresh_keyspace())[0]
        for prompt in (first, second):
            answer = pod.engine.completion(prompt=prompt, max_tokens=8)
            assert answer["choices"][0]["text"] == continuation(prompt, 8)
            assert answer["usage"]["prompt_tokens"] == 193


if SOAK:

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_with_longer_steps_reuse_changes_log_probabilities_by_rounding_as_the_engines_own_does(
        start_server: StartServer, tmp_path: Path, dtype: str
    ) -> None:
        """The measurement of docs/concepts/blocks.md, at vLLM's default of `--max-num-batched-tokens`."""
        python = engine_python()
        if python is None:
            pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
        gate = GateStandIn(tmp_path)
        server = start_server(tmp_path, gate, [None], CHUNK_TOKENS, memory={"tier": MEMORY}, memory_gb=0.3)
        model = replace(SMOLLM2, dtype=dtype)
        engine = EngineProcess(
            python, tmp_path, server.rpc_port, engine_process.PATIENT, model=model, prefix_caching=True
        )
        pod = Pod(engine, server, gate)
        try:
            engine.wait_until_connected()
            own, tier = [0.0], [0.0]
            for start in (0, LONG):
                prompt, keyspace = DOCUMENT[start : start + LONG], fresh_keyspace()
                pod.allow(keyspace, MEMORY)
                computed, _ = pod.answer(prompt, keyspace)
                assert pod.answer(prompt, fresh_keyspace()) == (computed, 0), "computed twice, the numbers are the same"
                again, found = pod.answer(prompt, keyspace)
                assert found < CHUNK_TOKENS, "the engine's own memory serves all that its blocks of 32 can"
                own.append(difference(computed, again))
                engine.forget()
                again, found = pod.answer(prompt, keyspace)
                assert found > 0, "the cache server serves"
                tier.append(difference(computed, again))
            print(
                f"{dtype}: log probabilities differ by {max(own):.1g} (vLLM's prefix cache), {max(tier):.1g} (LMCache)"
            )
            assert max(own) < 1
            assert max(tier) < 1
        finally:
            engine.stop()


def test_layers_with_a_sliding_window_are_restored_like_others(start_server: StartServer, tmp_path: Path) -> None:
    """As `objects/pod/engine.py` starts it, the engine has one group of KV: LMCache refuses two, and nothing hits."""
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    gate = GateStandIn(tmp_path)
    server = start_server(tmp_path, gate, [None], CHUNK_TOKENS, memory={"tier": MEMORY}, memory_gb=0.3)
    flags = {"--max-num-batched-tokens": str(CHUNK_TOKENS)}
    engine = EngineProcess(
        python, tmp_path, server.rpc_port, engine_process.PATIENT, model=RANDOM_WITH_WINDOWS, flags=flags
    )
    pod = Pod(engine, server, gate)
    try:
        engine.wait_until_connected()
        prompt, keyspace = DOCUMENT[:1000], fresh_keyspace()
        pod.allow(keyspace, MEMORY)
        computed, _ = pod.answer(prompt, keyspace)
        until(lambda: pod.answer(prompt, keyspace) == (computed, whole_chunks(len(prompt))), gate.state)
    finally:
        engine.stop()


def difference(ones: list[dict[str, float]], others: list[dict[str, float]]) -> float:
    """The largest difference of a log probability up to the first token that is not the same."""
    largest = 0.0
    for one, other in zip(ones, others, strict=True):
        largest = max([largest, *(abs(one[token] - other[token]) for token in one.keys() & other.keys())])
        if max(one, key=one.__getitem__) != max(other, key=other.__getitem__):
            break
    return largest
