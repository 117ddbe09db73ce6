"""A cache server that ends, in three ways and at three moments, under a real engine: nobody waits for it.

    python -m pytest -s tests/dataplane/test_cache_server_ends.py      # prints what requests took

The engine hears of the closed connection, so that none of the timers has to run out that bound what a hanging server
costs. That is asserted by the engine's own words, because durations say little on a machine with other work.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.dataplane.conftest import StartServer
from tests.dataplane.engine_process import CHUNK_TOKENS, EngineProcess, engine_python
from tests.dataplane.lmcache_server import LMCacheServer
from tests.dataplane.memory_killer import kill_for_memory
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn

pytestmark = [pytest.mark.lmcache]

PROMPT_BYTES = 600
BOUND_S = 15.0
"""No request may take longer on a busy machine."""

REUSE_IS_BACK_S = 60.0

HEARD = "The cache server is gone"
"""The guard's words, of the scheduler's and of the worker's connection, when they are closed."""

WAITED = re.compile(r"A lookup was given up after (\d+) ms: the cache|The cache server failed in .* after (\d+) ms")
TIMED_OUT = re.compile(r"given up after \d+ ms: no answer|timed out|not available within timeout")
"""What the guard, lookups and transfers say when a timer has run out."""


def kill(server: LMCacheServer) -> None:
    server.kill_server()


def terminate(server: LMCacheServer) -> None:
    server.kill_server(signal.SIGTERM)


def run_out_of_memory(server: LMCacheServer) -> None:
    kill_for_memory(server.process)


@dataclass
class Pod:
    """An engine of its own for each way to end, with a cache server that ends in it."""

    server: LMCacheServer
    engine: EngineProcess
    end: Callable[[LMCacheServer], None]
    _asked: int = 0

    def ask(self) -> float:
        """Ask what nobody asked before; return the seconds that it took."""
        self._asked += 1
        return self.engine.complete(f"{self.end.__name__} {self._asked} ".ljust(PROMPT_BYTES, "x"), KEYSPACE_A)

    def reuse_is_back(self) -> bool:
        """Whether a prompt that is sent a second time is found in the cache server."""
        self._asked += 1
        text = f"{self.end.__name__} again {self._asked} ".ljust(PROMPT_BYTES, "x")
        self.engine.complete(text, KEYSPACE_A)
        time.sleep(0.3)
        before = self.engine.external_hits()
        self.engine.complete(text, KEYSPACE_A)
        return self.engine.external_hits() > before

    def come_back(self) -> None:
        """Start the server and see reuse return, without touching the engine."""
        self.server.start_server_again()
        give_up_at_s = time.monotonic() + REUSE_IS_BACK_S
        while not self.reuse_is_back():
            assert time.monotonic() < give_up_at_s, self.engine.log_file.read_text()[-6000:]

    @contextmanager
    def nobody_waits(self) -> Iterator[list[int]]:
        """See that the engine hears of the server's end in the block, and that no timer runs out.

        Yields a list that holds, in the end, each wait for the server that was in vain, in milliseconds.
        """
        before = len(self.engine.log_file.read_text())
        waits_ms: list[int] = []
        yield waits_ms
        said = self.engine.log_file.read_text()[before:]
        assert said.count(HEARD) == 2, said[-6000:]
        assert not TIMED_OUT.findall(said), said[-6000:]
        waits_ms += [int(one or other) for one, other in WAITED.findall(said)]


@pytest.fixture(scope="module", params=[kill, run_out_of_memory, terminate], ids=lambda end: end.__name__)
def pod(
    request: pytest.FixtureRequest, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("engine")
    server = start_server(directory, GateStandIn(directory), [None], chunk_tokens=CHUNK_TOKENS)
    engine = EngineProcess(python, directory, server.rpc_port)
    try:
        engine.wait_until_ready()
        yield Pod(server, engine, request.param)
    finally:
        engine.stop()
        server.stop()


def test_before_an_engines_first_request(pod: Pod) -> None:
    with pod.nobody_waits():
        pod.end(pod.server)
        first_s, second_s = pod.ask(), pod.ask()
    print(f"\n{pod.end.__name__}: the first request took {1000 * first_s:.0f} ms, the second {1000 * second_s:.0f}")
    assert max(first_s, second_s) < BOUND_S
    pod.come_back()


def test_while_nobody_asks(pod: Pod) -> None:
    usual_s = sorted(pod.ask() for _ in range(5))
    with pod.nobody_waits():
        pod.end(pod.server)
        after_s = [pod.ask() for _ in range(5)]
    print(f"\n{pod.end.__name__}: usually {_told(usual_s)}, after it {_told(after_s)}")
    assert max(after_s) < BOUND_S
    pod.come_back()


def test_while_requests_are_in_flight(pod: Pod) -> None:
    spans: list[tuple[float, float]] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def ask_for_ever() -> None:
        while not over.is_set():
            began_s = time.monotonic()
            try:
                pod.ask()
            except (OSError, AssertionError) as error:
                failures.append(error)
                return
            spans.append((began_s, time.monotonic()))

    askers = [threading.Thread(target=ask_for_ever) for _ in range(3)]
    for asker in askers:
        asker.start()
    until(lambda: len(spans) >= 6 or failures)
    with pod.nobody_waits() as waits_ms:
        ended_at_s = time.monotonic()
        pod.end(pod.server)
        took_s = time.monotonic() - ended_at_s
        wanted = len(spans) + 6
        until(lambda: len(spans) >= wanted or failures)
        over.set()
        for asker in askers:
            asker.join()
    assert not failures, pod.engine.log_file.read_text()[-6000:]
    usual_s = [end - began for began, end in spans if end < ended_at_s]
    across_s = [end - began for began, end in spans if began <= ended_at_s <= end]
    after_s = [end - began for began, end in spans if began > ended_at_s]
    print(
        f"\n{pod.end.__name__} (took {1000 * took_s:.0f} ms): usually {_told(usual_s)}, "
        f"across its end {_told(across_s)}, after it {_told(after_s)}; waits in vain {waits_ms} ms"
    )
    assert across_s, "no request was in flight"
    assert max(across_s + after_s) < BOUND_S
    pod.come_back()


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    give_up_at_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up_at_s, "requests hang"
        time.sleep(0.01)


def _told(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    median_ms, slowest_ms = 1000 * sorted(seconds)[len(seconds) // 2], 1000 * max(seconds)
    return f"{median_ms:.0f} ms (at most {slowest_ms:.0f}, {len(seconds)} requests)"
