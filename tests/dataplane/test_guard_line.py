"""What becomes of exchanges when the connection to the cache server ends, without LMCache: its client is played."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata_sidecar.connector.line import Line


class Future:
    """Holds how an exchange ended."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def set_exception(self, error: Exception) -> None:
        self.error = error


@dataclass
class Queue:
    """LMCache's message queue client: what is submitted is pending once the loop sends it, until an answer comes."""

    pending_futures: dict[int, tuple[Future, Any]] = field(default_factory=dict)
    submitted: list[tuple[Future, str]] = field(default_factory=list)
    streams_cancelled: int = 0

    def submit_request(self, operation: str, payloads: list[Any]) -> Future:
        self.submitted.append((Future(), operation))
        return self.submitted[-1][0]

    def process_outbound_task(self) -> None:
        for future, operation in self.submitted:
            self.pending_futures[len(self.pending_futures)] = (future, SimpleNamespace(operation=operation))
        self.submitted.clear()

    def process_inbound(self) -> None:
        self.pending_futures.popitem()

    def cancel_streams(self) -> None:
        self.streams_cancelled += 1


@dataclass
class Watched:
    queue: Queue
    available: list[bool]


@pytest.fixture
def watched() -> Watched:
    """A client that is watched, and whether its server counts as available."""
    found = Watched(Queue(), [True])
    Line(SimpleNamespace(_message_queue_client=found.queue), lambda: found.available.append(False), Future)
    return found


def submit(watched: Watched, operation: str) -> Future:
    future = watched.queue.submit_request(operation, [])
    watched.queue.process_outbound_task()
    return future


def test_what_waits_for_an_answer_is_given_up_when_the_connection_ends(watched: Watched) -> None:
    waiting = [submit(watched, operation) for operation in ("lookup", "ping")]
    watched.queue.cancel_streams()
    assert [type(future.error) for future in waiting] == [ConnectionError, ConnectionError]
    assert watched.available[-1] is False
    assert watched.queue.streams_cancelled == 1


def test_nothing_but_pings_is_sent_until_the_server_answers_again(watched: Watched) -> None:
    watched.queue.cancel_streams()
    refused, ping = submit(watched, "prepare_store"), submit(watched, "ping")
    assert isinstance(refused.error, ConnectionError)
    assert ping.error is None
    assert [spec.operation for _, spec in watched.queue.pending_futures.values()] == ["ping"]
    watched.queue.process_inbound()
    assert submit(watched, "register_kv_cache").error is None


def test_what_was_on_its_way_to_the_loop_when_the_connection_ended_does_not_wait_either(watched: Watched) -> None:
    late = watched.queue.submit_request("lookup", [])
    watched.queue.cancel_streams()
    assert late.error is None
    watched.queue.process_outbound_task()
    assert isinstance(late.error, ConnectionError)


def test_a_client_of_another_transport_is_left_alone() -> None:
    Line(SimpleNamespace(), lambda: None, Future)
