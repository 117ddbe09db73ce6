"""Hundreds of generated objects of every kind, valid and not, through a real API server to a real operator.

The API server refuses some, and names the field. Whatever it accepts must end Ready or Stalled with a reason of the API
and a sentence, or wait for what a control plane alone does not have (see `WAITS`); no plan may fail; and then the
operator must be at rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.control_plane import ControlPlane
from tests.apiserver.conftest import OPERATOR_NAMESPACE, REPOSITORY, install_crds
from tests.apiserver.operator_process import Operators, total
from tests.apiserver.server import Server
from tests.support import amounts
from tests.support.amounts import GENERATED_PER_KIND
from tests.support.generated.crowd import Crowd
from tests.support.generated.generator import load_schemas

PER_KIND = int(GENERATED_PER_KIND)
NAMESPACES = int(os.environ.get("KVSTRATA_GENERATED_NAMESPACES", str(max(3, PER_KIND // 33))))
SEED = int(os.environ.get("KVSTRATA_GENERATED_SEED") or 1 + amounts.SEED)
SETTLES_WITHIN_S = 300.0 * max(1, PER_KIND // 500)
REST_S = 6.0
RESTS_WITHIN_S = 120.0
JUDGED_WITHIN_S = 60.0
ANSWERS_WITHIN_S = 60.0
LOOK_EVERY_S = 2.0
ORDER = ("CacheTier", "TenantGroup", "TenantCachePolicy", "CachedModel", "PrefixPool", "CacheInvalidation")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own, with the CRDs."""
    with ControlPlane(tmp_path_factory.mktemp("generated")) as started:
        server = Server(started.kubectl, started.kubeconfig)
        install_crds(server)
        server.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        yield started


class Judge:
    """An operator that is started anew when it ended without an error, as the kubelet does: an API server that answers
    nothing for ten seconds, because a machine has too much else to do, ends a leadership.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._start()

    @property
    def starts(self) -> int:
        """How often it was started."""
        return len(self._operators.started)

    def keep_alive(self) -> None:
        """Start it again if it ended without an error."""
        if self._running.process.poll() is not None:
            assert self._running.process.returncode == 0, self._running.log_tail()
            self._start()

    def writes(self) -> float:
        """How many writes the process that runs has made."""
        return total(self._page(), "kvstrata_writes_total")

    def processor_s(self) -> float:
        """Processor time of the process that runs, in seconds."""
        return total(self._page(), "process_cpu_seconds_total")

    def log_tail(self) -> str:
        """The last lines of its log."""
        return self._running.log_tail()

    def defects(self) -> list[str]:
        """What its processes logged of plans that failed, and of every other exception of its own code."""
        lines = [json.loads(text) for one in self._operators.started for text in _json_lines(one.log)]
        own = [line for line in lines if line["logger"].startswith(("kvstrata", "__main__"))]
        return [json.dumps(line)[:3000] for line in own if line.get("exception")]

    def failures(self) -> float:
        """How many plans failed in the process that runs."""
        return total(self._page(), "kvstrata_reconcile_failures_total", reason="Bug")

    def _page(self) -> str:
        """Its metrics. On a busy machine it may not answer at once, which must not count as no writes."""
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while not (page := self._running.page("/metrics")[1]):
            assert time.monotonic() < deadline, self._running.log_tail()
            time.sleep(0.2)
        return page

    def _start(self) -> None:
        self._running = self._operators.start(f"judge-{self.starts}", KVSTRATA_LOG_LEVEL="WARNING")
        self._running.wait_until_leading(90)


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """An operator of its own, for all namespaces."""
    operators = Operators(plane.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, tmp_path_factory.mktemp("operators"))
    judge = Judge(operators)
    yield judge
    for running in operators.running():
        running.kill()


@pytest.mark.claim(
    "generated objects, valid and not, end Ready or Stalled with a reason, and the operator comes to rest"
)
@pytest.mark.timeout(2400 * max(1, PER_KIND // 500))
async def test_every_generated_object_ends_ready_or_stalled_with_a_reason(plane: ControlPlane, operator: Judge) -> None:
    began = time.monotonic()
    crowd = Crowd(plane, load_schemas(REPOSITORY / "crds"), per_kind=PER_KIND, namespaces=NAMESPACES, seed=SEED)
    async with crowd:
        await crowd.open()
        _say("namespaces", began)
        await crowd.edit_domains()
        _say("domains", began)
        for kind in ORDER:
            await crowd.send(kind)
            _say(f"sent {kind}", began)
        deadline = time.monotonic() + SETTLES_WITHIN_S
        while left := crowd.left:
            operator.keep_alive()
            few = {kind: (len(some), some[:3]) for kind, some in left.items()}
            assert time.monotonic() < deadline, f"{few}\n{operator.log_tail()}"
            _say(f"to settle: { {kind: (len(some), some[0]) for kind, some in left.items()} }", began)
            await asyncio.sleep(LOOK_EVERY_S)
        _say("settled", began)
        writes = -1.0
        deadline = time.monotonic() + RESTS_WITHIN_S
        while (now := operator.writes()) != writes:
            assert time.monotonic() < deadline, f"the operator goes on writing: {writes:.0f} and then {now:.0f} writes"
            writes = now
            await asyncio.sleep(REST_S)
            operator.keep_alive()
        _say("at rest", began)
        # Events, and what the operator put off, may come late.
        deadline = time.monotonic() + JUDGED_WITHIN_S
        while (unsettled := await crowd.judge()) or lost(crowd):
            assert time.monotonic() < deadline, f"{unsettled}; lost: {lost(crowd)}"
            await asyncio.sleep(LOOK_EVERY_S)
    _say(
        f"{crowd.events} events; operator: {writes:.0f} writes, {operator.processor_s():.0f} s of processor time", began
    )
    for kind, tally in crowd.tallies.items():
        _say(f"{kind}: {tally}", began)
    for kind, tally in crowd.tallies.items():
        assert tally.problems == []
        assert tally.sent == PER_KIND
        # A small crowd has relatively more mutants: each namespace's first specs are mutants.
        mutants = sum(mutant for *_, mutant in crowd._objects(kind))
        assert tally.accepted - tally.mutants_accepted >= (PER_KIND - mutants) / 2, "most specs must be worth something"
        assert tally.mutants_accepted <= mutants / 2, "most mutants must be refused"
        assert not tally.gone or kind == "CacheInvalidation", "nobody asked for the deletion of anything else"
    assert operator.defects() == []
    assert operator.failures() == 0
    _say(f"the operator was started {operator.starts} times", began)


def lost(crowd: Crowd) -> dict[str, int]:
    """By kind, how many of the accepted objects are neither stored nor were seen to be deleted."""
    kept = {kind: tally.accepted if kind in ORDER else len(crowd.used) for kind, tally in crowd.tallies.items()}
    left = {kind: kept[kind] - tally.stored - tally.gone for kind, tally in crowd.tallies.items()}
    return {kind: count for kind, count in left.items() if count}


def _json_lines(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("{")]


def _say(what: str, began: float) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)
