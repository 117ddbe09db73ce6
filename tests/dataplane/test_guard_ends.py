"""When the engine frees the blocks of a request that ended, without an engine: once, and not while they are loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.dataplane.lmcache_stand_in import Role, load, play

REQUEST = SimpleNamespace(request_id="request")
STORED, LOADED = "finished_sending", "finished_recving"


class Scheduler:
    """vLLM's scheduler, which frees blocks at every report about an ended request, and ends at one about another."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.ended = False
        self.freed = False

    def start_load(self) -> None:
        self.connector.update_state_after_alloc(REQUEST, None, 64)

    def end(self) -> None:
        self.ended = True
        assert self.connector.request_finished(REQUEST, []) == (True, None)

    def report(self, *reports: str) -> None:
        output = SimpleNamespace(finished_sending=None, finished_recving=None)
        for report in reports:
            setattr(output, report, {REQUEST.request_id})
        self.connector.update_connector_output(output)
        for report in (LOADED, STORED):
            if getattr(output, report):
                assert not self.freed
                self.freed = self.ended


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    play(monkeypatch, lambda client, timeout: 64)
    guard = load(monkeypatch)
    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute")
    return Scheduler(guard.GuardedConnector(SimpleNamespace(kv_transfer_config=transfer), Role.SCHEDULER))


@pytest.mark.parametrize(
    "steps", [[(LOADED, STORED)], [(STORED,), (LOADED,)], [(LOADED,), (STORED,)]], ids=["together", "stored", "loaded"]
)
def test_blocks_of_a_request_that_ends_while_it_loads_are_freed_after_the_load(
    scheduler: Scheduler, steps: list[tuple[str, ...]]
) -> None:
    scheduler.start_load()
    scheduler.end()
    for reports in steps:
        assert not scheduler.freed or LOADED not in reports
        scheduler.report(*reports)
        assert scheduler.freed or LOADED not in reports
    assert scheduler.freed


def test_blocks_of_a_request_that_ends_later_are_freed_when_they_are_stored(scheduler: Scheduler) -> None:
    scheduler.start_load()
    scheduler.report(LOADED)
    scheduler.end()
    assert not scheduler.freed
    scheduler.report(STORED)
    assert scheduler.freed


def test_blocks_of_a_request_that_loads_nothing_are_freed_when_they_are_stored(scheduler: Scheduler) -> None:
    scheduler.end()
    scheduler.report(STORED)
    assert scheduler.freed
