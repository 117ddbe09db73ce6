"""The blocks of stores that are given up, without an engine: nobody else gets them while they are still read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.dataplane.lmcache_stand_in import Role, load, play

FINISHED = {"request"}
PREEMPTION = SimpleNamespace(need_flush_before_forward=True)
NO_PREEMPTION = SimpleNamespace(need_flush_before_forward=False)


@dataclass
class Worker:
    """A worker's connector, and what happened in it."""

    connector: Any

    @property
    def adapter(self) -> Any:
        return self.connector.worker_adapter

    @property
    def happened(self) -> list[str]:
        happened: list[str] = self.connector.happened
        return happened

    def hangs(self) -> None:
        """The heartbeat has missed a ping."""
        self.adapter._health_event.clear()


class Server:
    tokens = 64

    def ask(self, client: object, timeout: float) -> int:
        return self.tokens


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def worker(server: Server, monkeypatch: pytest.MonkeyPatch) -> Worker:
    play(monkeypatch, server.ask)
    guard = load(monkeypatch)
    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute")
    return Worker(guard.GuardedConnector(SimpleNamespace(kv_transfer_config=transfer), Role.WORKER))


def test_blocks_of_a_server_that_is_away_are_freed_when_nobody_reads_them_any_more(worker: Worker) -> None:
    worker.hangs()
    assert worker.connector.get_finished(FINISHED) == (FINISHED, set())
    assert worker.happened == ["forgotten", "flushed"]


def test_a_failure_that_makes_lmcache_forget_its_stores_waits_for_them_too(worker: Worker) -> None:
    worker.adapter.failure = ConnectionError("closed")
    assert worker.connector.get_finished(FINISHED) == (FINISHED, set())
    assert worker.happened == ["forgotten", "flushed"]


def test_a_heartbeat_that_was_under_way_does_not_undo_what_a_failure_told(worker: Worker) -> None:
    worker.adapter.failure = ConnectionError("closed")
    worker.connector.get_finished(FINISHED)
    worker.adapter._health_event.set()
    assert not worker.adapter.is_healthy
    assert worker.adapter._reregister_kv_caches_callback()
    worker.adapter._health_event.set()
    assert worker.adapter.is_healthy


def test_stores_to_a_server_that_is_well_are_not_waited_for(worker: Worker) -> None:
    worker.connector.get_finished(FINISHED)
    worker.connector.handle_preemptions(NO_PREEMPTION)
    assert worker.happened == []


def test_blocks_are_overwritten_by_a_preemption_when_nobody_reads_them_any_more(worker: Worker) -> None:
    worker.connector.handle_preemptions(PREEMPTION)
    assert worker.happened == ["flushed"]
    worker.hangs()
    worker.connector.handle_preemptions(PREEMPTION)
    assert worker.happened == ["flushed", "flushed"]
    worker.connector.handle_preemptions(NO_PREEMPTION)
    assert worker.happened == ["flushed", "flushed"]


def test_stores_have_ended_before_a_server_is_registered_with_again(worker: Worker) -> None:
    worker.hangs()
    assert worker.adapter._reregister_kv_caches_callback()
    assert worker.happened == ["flushed", "registered"]


def test_a_server_with_another_chunk_size_is_not_registered_with(worker: Worker, server: Server) -> None:
    worker.hangs()
    server.tokens = 256
    assert not worker.adapter._reregister_kv_caches_callback()
    assert worker.happened == []


def test_an_engine_that_has_registered_nothing_yet_waits_for_nothing(worker: Worker) -> None:
    worker.adapter.transfer_ctx = None
    worker.hangs()
    assert worker.connector.get_finished(FINISHED) == (FINISHED, set())


def test_a_wait_that_fails_ends_no_engine(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    worker.adapter.transfer_ctx.flush = fail
    worker.hangs()
    assert worker.connector.get_finished(FINISHED) == (FINISHED, set())
    assert "the device is lost" in caplog.text
