"""What becomes of exchanges when the connection to the cache server ends, without LMCache: its client is played."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata_sidecar.upstream.v0_5_6.connection import PING_PATIENCE_S, Line

STREAM = "subscribe_kv_events"


class Future:
    """Holds how an exchange ended."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.answer: Any = None

    def query(self) -> bool:
        return self.error is not None or self.answer is not None

    def set_result(self, answer: Any) -> None:
        self.answer = answer

    def set_exception(self, error: Exception) -> None:
        self.error = error


@dataclass
class Queue:
    """LMCache's message queue client: what is submitted is pending once the loop sends it, until an answer comes."""

    pending_futures: dict[int, tuple[Future, Any]] = field(default_factory=dict)
    input_queue: queue.Queue[Any] = field(default_factory=queue.Queue)
    socket: Any = field(default_factory=lambda: SimpleNamespace(sndtimeo=-1))
    streams_cancelled: int = 0
    sent: list[str] = field(default_factory=list)

    def submit_request(self, operation: str, payloads: list[Any]) -> Future:
        future = Future()
        self.input_queue.put(SimpleNamespace(future=future, rpc_spec=SimpleNamespace(operation=operation)))
        return future

    def process_outbound_task(self) -> None:
        while not self.input_queue.empty():
            item = self.input_queue.get_nowait()
            if isinstance(item, list):
                raise BlockingIOError("no room")
            self.sent.append(item.rpc_spec.operation)
            if item.rpc_spec.operation != STREAM:
                self.pending_futures[len(self.sent)] = (item.future, item.rpc_spec)

    def answer(self, operation: str) -> None:
        """The loop receives the answer to the oldest exchange of this kind."""
        number = next(n for n, (_, spec) in self.pending_futures.items() if spec.operation == operation)
        future, _ = self.pending_futures.pop(number)
        future.set_result(True)

    def cancel_streams(self) -> None:
        self.streams_cancelled += 1


@dataclass
class Watched:
    """A client that is watched, whether its server counts as available, and the time."""

    connected: bool = True
    queue: Queue = field(default_factory=Queue)
    health: threading.Event = field(default_factory=threading.Event)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.health.set()
        self.line = Line(
            SimpleNamespace(_message_queue_client=self.queue),
            self.health,
            Future,
            is_stream=lambda operation: operation == STREAM,
            connected=self.connected,
            clock=lambda: self.now_s,
        )

    def submit(self, operation: str) -> Future:
        future: Future = self.queue.submit_request(operation, [])
        self.queue.process_outbound_task()
        return future

    def beat(self, registrations: list[str]) -> None:
        """One beat of LMCache's heartbeat whose ping is answered."""
        was_healthy = self.health.is_set()
        self.submit("ping")
        self.queue.answer("ping")

        def register() -> bool:
            registrations.append("registered")
            return True

        if was_healthy or self.line.recover(register):
            self.health.set()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_what_waits_for_an_answer_is_given_up_when_the_connection_ends(watched: Watched) -> None:
    waiting = [watched.submit(operation) for operation in ("lookup", "ping")]
    watched.queue.cancel_streams()
    assert [type(future.error) for future in waiting] == [ConnectionError, ConnectionError]
    assert not watched.health.is_set()
    assert watched.queue.streams_cancelled == 1


def test_a_connection_that_a_dying_server_still_accepts_is_not_reported_as_another_end(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.queue.cancel_streams()
    ping = watched.submit("ping")
    watched.queue.cancel_streams()
    assert isinstance(ping.error, ConnectionError)
    assert caplog.text.count("The cache server is gone") == 1
    watched.submit("ping")
    watched.queue.answer("ping")
    watched.queue.cancel_streams()
    assert caplog.text.count("The cache server is gone") == 2


def test_nothing_but_pings_is_sent_until_the_server_answers_again(watched: Watched) -> None:
    watched.queue.cancel_streams()
    refused, ping = watched.submit("prepare_retrieve"), watched.submit("ping")
    assert isinstance(refused.error, ConnectionError)
    assert ping.error is None
    assert watched.queue.sent == ["ping"]
    watched.queue.answer("ping")
    assert ping.answer is True
    assert watched.submit("register_kv_cache").error is None


def test_a_server_that_never_answered_is_sent_pings_only() -> None:
    watched = Watched(connected=False)
    assert isinstance(watched.submit("register_kv_cache").error, ConnectionError)
    watched.submit("ping")
    watched.queue.answer("ping")
    assert watched.submit("register_kv_cache").error is None
    assert watched.queue.sent == ["ping", "register_kv_cache"]


def test_only_an_answered_ping_tells_that_the_server_is_back(watched: Watched) -> None:
    watched.queue.cancel_streams()
    # An exchange of the connection that has ended, whose answer was still to be read.
    watched.queue.pending_futures[-1] = (Future(), SimpleNamespace(operation="lookup"))
    watched.queue.answer("lookup")
    assert isinstance(watched.submit("lookup").error, ConnectionError)


def test_what_was_on_its_way_to_the_loop_when_the_connection_ended_is_not_sent(watched: Watched) -> None:
    late = watched.queue.submit_request("lookup", [])
    ping = watched.queue.submit_request("ping", [])
    watched.queue.cancel_streams()
    assert late.error is None
    watched.queue.process_outbound_task()
    assert isinstance(late.error, ConnectionError)
    assert ping.error is None
    assert watched.queue.sent == ["ping"]


@pytest.mark.parametrize("connected", [True, False])
def test_pings_do_not_pile_up_while_the_server_is_away(connected: bool) -> None:
    watched = Watched(connected)
    if connected:
        watched.queue.cancel_streams()
    pings = []
    for second in range(int(PING_PATIENCE_S)):
        watched.now_s = float(second)
        pings.append(watched.submit("ping"))
    assert watched.queue.sent == ["ping"]
    assert pings[0].error is None
    assert all(isinstance(ping.error, ConnectionError) for ping in pings[1:])


def test_a_ping_that_was_never_answered_is_followed_by_another(watched: Watched) -> None:
    watched.submit("ping")
    watched.now_s = PING_PATIENCE_S
    assert watched.submit("ping").error is None
    assert watched.queue.sent == ["ping", "ping"]


def test_a_ping_that_ended_with_its_connection_is_followed_by_another_at_once(watched: Watched) -> None:
    watched.submit("ping")
    watched.queue.cancel_streams()
    assert watched.submit("ping").error is None


def test_sending_neither_blocks_nor_ends_the_loop_that_all_clients_share(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.queue.input_queue.put([b"1", b"", b"ack"])
    watched.queue.process_outbound_task()
    assert watched.queue.socket.sndtimeo == 0
    assert "no room" in caplog.text


def test_subscriptions_are_left_to_lmcache(watched: Watched) -> None:
    before = watched.queue.submit_request(STREAM, [])
    watched.queue.cancel_streams()
    assert watched.submit(STREAM).error is None
    assert before.error is None
    assert watched.queue.sent == [STREAM, STREAM]


def test_stores_that_wait_for_their_turn_end_at_once_when_the_server_hangs(watched: Watched) -> None:
    assert watched.submit("prepare_store").error is None
    watched.health.clear()
    assert isinstance(watched.submit("prepare_store").error, ConnectionError)
    assert watched.submit("commit_store").error is None, "what is copied may still be kept"


def test_a_loss_between_a_ping_and_what_it_is_taken_for_is_not_forgotten(watched: Watched) -> None:
    registrations: list[str] = []
    watched.beat(registrations)
    watched.queue.cancel_streams()
    watched.health.set()  # What a heartbeat does whose ping was answered just before.
    assert not watched.health.is_set()
    watched.beat(registrations)
    assert registrations == ["registered"]
    assert watched.health.is_set()


def test_a_loss_during_recovery_makes_it_run_again(watched: Watched) -> None:
    watched.queue.cancel_streams()

    def interrupted() -> bool:
        watched.queue.cancel_streams()
        return True

    assert watched.line.recover(interrupted)
    watched.health.set()
    assert not watched.health.is_set()
    registrations: list[str] = []
    watched.beat(registrations)
    assert registrations == ["registered"]
    assert watched.health.is_set()


def test_a_client_of_another_transport_is_lost_and_recovered_all_the_same() -> None:
    health = threading.Event()
    line = Line(SimpleNamespace(), health, Future)
    health.set()
    line.lose()
    health.set()
    assert not health.is_set()
    assert line.recover(lambda: True)
    health.set()
    assert health.is_set()
