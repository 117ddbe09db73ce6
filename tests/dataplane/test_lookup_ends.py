"""A real engine and cache server: after every kind of request no lock, no lookup and no session is left."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from tests.dataplane.conftest import StartServer, file_tier
from tests.dataplane.engine_process import CHUNK_TOKENS, MODEL, EngineProcess, engine_python
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn

pytestmark = [pytest.mark.lmcache]

KEYSPACE = "0123456789abcdef" * 2
PROMPT_BYTES = 600
BLOCKS = 80
"""Of 32 tokens in the engine: four prompts and their answers do not fit."""

NAMES = itertools.count()


@dataclass
class Pod:
    server: LMCacheServer
    engine: EngineProcess


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("engine")
    (directory / "files").mkdir()
    gate = GateStandIn(directory)
    server = start_server(directory, gate, [file_tier(directory / "files")], CHUNK_TOKENS, memory={"tier": "dram"})
    gate.allow(KEYSPACE)
    flags = {"--num-gpu-blocks-override": str(BLOCKS)}
    with pytest.MonkeyPatch.context() as talkative:
        talkative.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
        talkative.setenv("LMCACHE_LOG_LEVEL", "DEBUG")
        engine = EngineProcess(python, directory, server.rpc_port, flags=flags, prefix_caching=True)
    try:
        engine.wait_until_connected()
        until(lambda: hits_twice(engine), lambda: engine.log_file.read_text()[-6000:])
        yield Pod(server, engine)
    finally:
        engine.stop()


def hits_twice(engine: EngineProcess) -> bool:
    """Whether a prompt that is sent a second time is found in the cache server."""
    text, before = prompt(), engine.external_hits()
    for _ in range(2):
        engine.complete(text, KEYSPACE)
        time.sleep(0.3)
        engine.forget()
    return engine.external_hits() > before


def forget(pod: Pod) -> None:
    """Empty the engine's own cache, once it has ended the requests of callers that are gone."""

    def forgot() -> bool:
        with suppress(urllib.error.HTTPError, AssertionError):
            pod.engine.forget()
            return True
        return False

    until(forgot)


def prompt() -> str:
    return f"lookup {next(NAMES)} ".ljust(PROMPT_BYTES, "x")


def left(pod: Pod) -> dict[str, int]:
    """What requests have left in the cache server."""
    status = pod.server.get("/status")
    storage = status["storage_manager"]
    return {
        "locked blocks": storage["l1_manager"]["read_locked_count"],
        "lookups": status["active_prefetch_jobs"],
        "results": storage["prefetch_controller"]["completed_results_count"],
        "sessions": status["active_sessions"],
    }


@pytest.fixture(autouse=True)
def nothing_is_left(pod: Pod) -> Iterator[None]:
    until(lambda: not any(left(pod).values()), lambda: left(pod))
    yield
    until(lambda: not any(left(pod).values()), lambda: left(pod))


def begin(pod: Pod, text: str, **asked: Any) -> socket.socket:
    """Send a request, and return its connection without an answer."""
    body = {"model": MODEL, "prompt": text, "cache_salt": KEYSPACE, "temperature": 0, "max_tokens": 400} | asked
    content = json.dumps(body | {"ignore_eos": True}).encode()
    connection = socket.create_connection(("127.0.0.1", pod.engine.port), 30)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True, "logprobs": 1},
    "n": {"n": 3, "temperature": 1.0},
    "structured": {"structured_outputs": {"choice": ["yes", "no"]}},
    "streamed": {"stream": True},
    "too long": {"prompt": list(range(10, 250)) * 10},
    "invalid": {"temperature": -1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", ["engine", "memory", "files"])
def test_a_request_leaves_nothing(pod: Pod, kind: str, held: str) -> None:
    """`held`: which cache has the prompt's blocks."""
    text = prompt()
    pod.engine.complete(text, KEYSPACE)
    time.sleep(0.3)
    if held != "engine":
        forget(pod)
    if held == "files":
        pod.server.forget_memory()
    asked = {"prompt": text, "max_tokens": 4} | KINDS[kind]
    if kind == "streamed":
        connection = begin(pod, **{"text": text, **KINDS[kind], "max_tokens": 4})
        while b"[DONE]" not in connection.recv(65536):
            pass
        connection.close()
        return
    with pytest.raises(urllib.error.HTTPError, match="400") if kind in ("too long", "invalid") else nullcontext():
        pod.engine.completion(cache_salt=KEYSPACE, **asked)


@pytest.mark.parametrize("held", ["memory", "files"])
def test_a_caller_that_goes_at_any_moment_leaves_nothing(pod: Pod, held: str) -> None:
    text = prompt()
    pod.engine.complete(text, KEYSPACE)
    time.sleep(0.3)
    for number in range(30):
        forget(pod)
        if held == "files":
            pod.server.forget_memory()
        connection = begin(pod, text, stream=True)
        time.sleep(0.002 * number)
        connection.close()
        until(lambda: not left(pod)["sessions"], lambda: left(pod))


def test_a_caller_that_goes_after_the_first_token_leaves_nothing(pod: Pod) -> None:
    text = prompt()
    pod.engine.complete(text, KEYSPACE)
    forget(pod)
    connection = begin(pod, text, stream=True)
    while b"data:" not in connection.recv(65536):
        pass
    connection.close()


def test_callers_that_go_while_their_lookups_wait_for_the_server_leave_nothing(pod: Pod) -> None:
    texts = [prompt() for _ in range(4)]
    for text in texts:
        pod.engine.complete(text, KEYSPACE)
        time.sleep(0.3)
    forget(pod)
    pod.server.process.send_signal(signal.SIGSTOP)
    try:
        with ExitStack() as connections:
            for text in texts:
                connections.enter_context(begin(pod, text, stream=True))
            time.sleep(1)
        time.sleep(0.5)
    finally:
        pod.server.process.send_signal(signal.SIGCONT)


def test_a_lookup_that_was_given_up_is_ended_when_the_server_answers(pod: Pod) -> None:
    text = prompt()
    pod.engine.complete(text, KEYSPACE)
    time.sleep(0.3)
    forget(pod)
    pod.server.process.send_signal(signal.SIGSTOP)
    thaw = threading.Timer(10, pod.server.process.send_signal, (signal.SIGCONT,))
    thaw.start()
    try:
        pod.engine.complete(text, KEYSPACE)
    finally:
        thaw.join()
    until(lambda: hits_twice(pod.engine), lambda: pod.engine.log_file.read_text()[-6000:])


def test_requests_that_preempt_each_other_leave_nothing(pod: Pod) -> None:
    texts = [prompt() for _ in range(4)]
    for text in texts:
        pod.engine.complete(text, KEYSPACE)
        time.sleep(0.3)
    forget(pod)
    before = preemptions(pod)
    with ExitStack() as connections:
        answers = [connections.enter_context(begin(pod, text)) for text in texts]
        for answer in answers:
            answer.settimeout(120)
            assert answer.recv(65536).startswith(b"HTTP/1.1 200")
    assert preemptions(pod) > before


def preemptions(pod: Pod) -> float:
    return pod.engine.counter("vllm:num_preemptions_total")


def test_a_talkative_engine_logs_no_keyspace(pod: Pod) -> None:
    # vLLM logs the names of unknown fields.
    for asked in (KINDS["invalid"], {KEYSPACE: "unknown"}):
        with suppress(urllib.error.HTTPError):
            pod.engine.completion(**{"prompt": prompt(), "cache_salt": KEYSPACE, "max_tokens": 1} | asked)
    text = pod.engine.log_file.read_text()
    assert KEYSPACE[:SCOPE_DIGITS] in text
    assert KEYSPACE[SCOPE_DIGITS:] not in text
    assert KEYSPACE[SCOPE_DIGITS:] not in pod.server.log_file.read_text()
