"""A cache server that ends under a real engine, in three ways and at three moments (before the first request in one
way): no request waits for it.

    python -m pytest -s tests/dataplane/test_cache_server_ends.py      # prints what requests took

The engine hears of the closed connection, so that none of the timers has to run out that bound what a hanging server
costs. That is asserted by the engine's own words, because durations say little on a machine with other work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.dataplane.conftest import StartServer
from tests.dataplane.ending_server import ENDS, Pod, kill
from tests.dataplane.engine_process import CHUNK_TOKENS, PATIENT, EngineProcess, engine_python
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn

pytestmark = [pytest.mark.lmcache]

BOUND_S = 30.0
"""A request that takes longer hangs. What it may take on a quiet machine, the benchmark `outages` judges."""


LATE = PATIENT | {"lmcache.mp.heartbeat_interval": 1.0}
"""Time limits that are over after `BOUND_S`, so that no request ends in time by one. A heartbeat holds none up."""


@pytest.fixture(scope="module")
def parts(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LMCacheServer, EngineProcess]]:
    """A cache server and its engine, which no one has asked yet."""
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("engine")
    server = start_server(directory, GateStandIn(directory), [None], chunk_tokens=CHUNK_TOKENS)
    engine = EngineProcess(python, directory, server.rpc_port, LATE)
    try:
        engine.wait_until_connected()
        yield server, engine
    finally:
        engine.stop()
        server.stop()


@pytest.fixture(params=ENDS, ids=lambda end: end.__name__)
def pod(request: pytest.FixtureRequest, parts: tuple[LMCacheServer, EngineProcess]) -> Pod:
    return Pod(*parts, request.param)


def test_before_an_engines_first_request(parts: tuple[LMCacheServer, EngineProcess]) -> None:
    pod = Pod(*parts, kill)
    with pod.no_request_waits():
        pod.end(pod.server)
        first_s, second_s = pod.ask(), pod.ask()
    print(f"\n{pod.end.__name__}: the first request took {1000 * first_s:.0f} ms, the second {1000 * second_s:.0f}")
    assert max(first_s, second_s) < BOUND_S
    pod.come_back()


def test_while_nobody_asks(pod: Pod) -> None:
    usual_s = sorted(pod.ask() for _ in range(5))
    with pod.no_request_waits():
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
    with pod.no_request_waits() as waits_ms:
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
