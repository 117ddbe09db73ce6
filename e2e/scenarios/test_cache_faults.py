"""A cache container that ends under its engine: requests are answered as if nothing were cached, and hits return with
it, without a restart of the engine.

Three ways to end and three moments; all nine are gone through with a real engine and a real cache server in
`tests/dataplane/test_cache_server_ends.py`, and the benchmark `outages` judges their cost for requests. Here each way
and each moment comes once, in real pods. Kubernetes starts a container again at once the first time it ends, and waits
longer each time, so each pod loses its own only once.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from e2e.product.calls import Replica
from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, MODEL, Stage, open_stage
from e2e.product.direct import direct_replica
from e2e.product.faults import Victim
from e2e.product.faults_traffic import (
    product_lives,
    tenants_ask,
    wait_until_well,
)
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import fresh_prompt, shared
from e2e.product.shared_tier import make_room
from e2e.product.streams import streaming

pytestmark = pytest.mark.cluster

RUNS_AGAIN_WITHIN_S = 600
"""Kubernetes waits up to five minutes with a container that has ended several times of late."""

STREAM_TOKENS, SEQUENCES = 120, 4
"""Together more than an engine computes until the container has been killed, on a busy machine too."""

NOTICED = "The cache server is gone"
BACK_AGAIN = "LMCache server is healthy again"
TIMED_OUT = re.compile(r"given up after \d+ ms: no answer|timed out|not available within timeout")


@pytest.mark.claim("a cache container that is killed with requests in flight fails none, and hits return")
def test_killed_with_requests_in_flight(stage: Stage) -> None:
    with a_cache_container_ends(stage, stage.first) as cache, tenants_ask(stage) as ordeal:
        body = {
            "model": MODEL,
            "prompt": fresh_prompt(),
            "max_tokens": STREAM_TOKENS,
            "n": SEQUENCES,
            "ignore_eos": True,
        }
        # Looked up before, and streamed without the API server between, which hands over in one piece a stream that a
        # fast engine has finished meanwhile.
        server, where = cache.first_pid(), direct_replica(stage.kubectl, DEMO_NAMESPACE, MODEL, stage.first.pod)
        with streaming(where, ACME_KEY, body) as stream:
            os.kill(server, signal.SIGKILL)
            killed_at = time.monotonic()
        assert stream.done, stream.problem
        assert stream.arrived[0] < killed_at < stream.arrived[-1], "no request was in flight when the server was killed"
        ordeal.lasts_for(16)
        hits_return(stage, stage.second, stage.first)


def test_out_of_memory_while_nobody_asks(stage: Stage) -> None:
    with a_cache_container_ends(stage, stage.second) as cache:
        usual_s = slowest_s(stage.second, 4)
        cache.run_out_of_memory()
        after_s = slowest_s(stage.second, 4)
        stage.report(f"the slowest of 4 requests took {usual_s:.2f} s before, {after_s:.2f} s after")
        hits_return(stage, stage.first, stage.second)


def test_terminated_before_an_engines_first_request(kubectl: Kubectl, stage: Stage) -> None:
    kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", stage.second.pod)
    with open_stage(kubectl, print) as opened:
        new = next(one for one in (opened.first, opened.second) if one.pod != stage.first.pod)
        with a_cache_container_ends(opened, new) as cache:
            cache.send(signal.SIGTERM)
            first_s, second_s = slowest_s(new, 1), slowest_s(new, 1)
            stage.report(f"the engine's first request took {first_s:.2f} s, its second {second_s:.2f} s")
            hits_return(opened, stage.first, new)


@pytest.fixture(autouse=True)
def room(stage: Stage) -> None:
    """The shared tier takes blocks, also when earlier tests filled it."""
    make_room(stage)


@contextmanager
def a_cache_container_ends(stage: Stage, where: Replica) -> Iterator[Victim]:
    """Let the block end a pod's cache container.

    It is restarted, and no other container of the product is. The engine notices it, and no timer runs out.
    """
    cache = Victim(stage.kubectl, DEMO_NAMESPACE, where.pod, "cache")
    was = cache.life()
    others = product_lives(stage.kubectl, (was.pod_uid, "cache"))
    began = datetime.now(UTC)
    try:
        yield cache
    finally:
        wait_until("the cache container runs again", cache.running, RUNS_AGAIN_WITHIN_S)
        wait_until_well(stage.kubectl)
    assert replace(cache.life(), started_at="") == replace(was, restarts=was.restarts + 1, started_at="")
    assert product_lives(stage.kubectl, (was.pod_uid, "cache")) == others
    log = stage.kubectl.run(
        "-n", DEMO_NAMESPACE, "logs", where.pod, "-c", "engine", f"--since-time={began:%Y-%m-%dT%H:%M:%SZ}"
    )
    # An answer that is late before, or from a server that has just started, is no part of this.
    while_away = log[log.find(NOTICED) :].partition(BACK_AGAIN)[0]
    assert while_away.count(NOTICED) == 2, while_away[-4000:]
    assert not TIMED_OUT.findall(while_away), while_away[-4000:]
    stage.report("".join(line + "\n" for line in log.splitlines() if NOTICED in line or "given up after" in line))


def hits_return(stage: Stage, leads: Replica, follows: Replica) -> None:
    """See one replica find blocks that the other has stored, for each tenant."""
    since = time.monotonic()
    for key in (ACME_KEY, GLOBEX_KEY):
        shared(leads, follows, key)
    stage.report(f"hits of both tenants are back {time.monotonic() - since:.1f} s after the container ended")


def slowest_s(where: Replica, requests: int) -> float:
    """Send new prompts; return the longest time of an answer."""
    return max(where.ask(ACME_KEY, fresh_prompt()).took_s for _ in range(requests))
