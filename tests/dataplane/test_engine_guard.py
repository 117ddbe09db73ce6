"""A real engine whose cache server is absent, hangs or comes and goes: every request is answered, and reuse comes back.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, EngineIdentity
from kvstrata.contract.wire import decode
from kvstrata_sidecar.upstream.resolved_identity import IDENTITY_DIRECTORY_KEY
from tests.dataplane.conftest import StartServer
from tests.dataplane.engine_process import CHUNK_TOKENS, EngineProcess, engine_python
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn

pytestmark = [pytest.mark.lmcache]

PROMPT_BYTES = 600
BOUND_S = 30.0
"""No request may take longer, whatever the cache server does: ten message queue timeouts of 3 s."""


@dataclass
class Pod:
    server: LMCacheServer
    engine: EngineProcess
    directory: Path


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("engine")
    server = start_server(directory, GateStandIn(directory), [None], chunk_tokens=CHUNK_TOKENS)
    server.kill_server()
    engine = EngineProcess(python, directory, server.rpc_port, {IDENTITY_DIRECTORY_KEY: str(directory)})
    try:
        engine.wait_until_ready()
        yield Pod(server, engine, directory)
    finally:
        engine.stop()


def prompt(name: str) -> str:
    return (name + " ").ljust(PROMPT_BYTES, "x")


def reuse_is_back(pod: Pod, name: str) -> bool:
    """Whether a prompt that is sent a second time is found in the cache server."""
    pod.engine.complete(prompt(name), KEYSPACE_A)
    time.sleep(0.3)
    before = pod.engine.external_hits()
    pod.engine.complete(prompt(name), KEYSPACE_A)
    return pod.engine.external_hits() > before


def test_an_engine_starts_without_its_cache_server_and_uses_it_when_it_appears(pod: Pod) -> None:
    assert pod.engine.complete(prompt("alone"), KEYSPACE_A) < BOUND_S
    assert pod.engine.external_hits() == 0
    pod.server.start_server_again()
    until_reuse_is_back(pod)


def until_reuse_is_back(pod: Pod) -> None:
    give_up_at_s = time.monotonic() + 60
    while not reuse_is_back(pod, f"again {time.monotonic()}"):
        assert time.monotonic() < give_up_at_s, pod.engine.log_file.read_text()[-6000:]


@contextmanager
def requests_under_way(pod: Pod, name: str) -> Iterator[Callable[[int], None]]:
    """Send prompts from three threads, each prompt twice: one time to store, one to load. All must be answered.

    Yields a function that waits until so many more are.
    """
    durations_s: list[float] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def ask(worker: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                durations_s.append(pod.engine.complete(prompt(f"{name} {worker} {number // 2}"), KEYSPACE_A))
            except (OSError, AssertionError) as error:
                failures.append(error)
                return

    def until_answered(count: int) -> None:
        wanted = len(durations_s) + count
        until(lambda: len(durations_s) >= wanted or failures, lambda: "requests hang")

    askers = [threading.Thread(target=ask, args=(worker,)) for worker in range(3)]
    for asker in askers:
        asker.start()
    try:
        until_answered(6)
        yield until_answered
    finally:
        over.set()
        for asker in askers:
            asker.join()
    assert not failures, pod.engine.log_file.read_text()[-6000:]
    assert max(durations_s) < BOUND_S


def test_an_engine_reports_its_fingerprint(pod: Pod) -> None:
    reported = decode(EngineIdentity, (pod.directory / IDENTITY_FILE).read_bytes())
    assert reported.fingerprint, reported.problem
    assert {"files", "vllm", "torch", "lmcache", "attentionBackend", "kvCacheDtype", "blockSizes"} <= set(
        reported.facts
    )
    assert "" not in reported.facts.values()


def test_requests_are_answered_while_the_server_dies_is_away_and_comes_back(pod: Pod) -> None:
    with requests_under_way(pod, "killed") as until_answered:
        pod.server.kill_server()
        time.sleep(8)
        until_answered(6)
        pod.server.start_server_again()
        time.sleep(5)
        until_answered(6)
    until_reuse_is_back(pod)


def test_requests_are_answered_while_the_server_is_frozen(pod: Pod) -> None:
    with requests_under_way(pod, "frozen") as until_answered:
        pod.server.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(10)
            until_answered(6)
        finally:
            pod.server.process.send_signal(signal.SIGCONT)
        time.sleep(3)
        until_answered(6)
    until_reuse_is_back(pod)


def test_a_server_that_restarts_between_two_heartbeats_is_registered_with_again(pod: Pod) -> None:
    pod.server.kill_server()
    pod.server.start_server_again()
    until_reuse_is_back(pod)


def test_the_first_request_to_a_server_that_died_while_idle_is_answered(pod: Pod) -> None:
    pod.server.kill_server()
    assert pod.engine.complete(prompt("idle"), KEYSPACE_A) < BOUND_S
    assert pod.engine.complete(prompt("idle"), KEYSPACE_A) < BOUND_S
    pod.server.start_server_again()


def in_use(pod: Pod) -> dict[str, int]:
    """How many blocks are locked for readers, and of how many lookups the cache server still has a record."""
    status = pod.server.get("/status")
    storage = status["storage_manager"]
    return {
        "locked blocks": storage["l1_manager"]["read_locked_count"],
        "lookups": status["active_prefetch_jobs"],
        "results": storage["prefetch_controller"]["completed_results_count"],
    }


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}], ids=["prompt_logprobs", "echo"]
)
def test_a_request_for_logprobs_of_its_prompt_stores_it_and_leaves_no_lock_and_no_record(
    pod: Pod, asked: dict[str, Any]
) -> None:
    pod.server.kill_server()  # one that was lost in the middle of lookups may have records of them
    pod.server.start_server_again()
    until_reuse_is_back(pod)
    until(lambda: not any(in_use(pod).values()), lambda: in_use(pod))
    numbers = itertools.count()

    def stored_by_it() -> bool:
        """Whether it stores a prompt that is new; what a busy machine stores later does not count."""
        text = prompt(f"logprobs {next(iter(asked))} {next(numbers)}")
        for _ in range(3):  # its blocks are there from the second time on
            pod.engine.completion(prompt=text, cache_salt=KEYSPACE_A, max_tokens=1, **asked)
            time.sleep(0.3)
        until(lambda: not any(in_use(pod).values()), lambda: in_use(pod))
        before = pod.engine.external_hits()
        pod.engine.complete(text, KEYSPACE_A)
        return pod.engine.external_hits() > before

    until(stored_by_it, lambda: in_use(pod))
    until(lambda: not any(in_use(pod).values()), lambda: in_use(pod))
