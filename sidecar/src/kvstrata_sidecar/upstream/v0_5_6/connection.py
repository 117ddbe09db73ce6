"""The connection to the cache server; detects its end at once instead of by a timeout.

LMCache's message queue client (0.5.6) keeps requests until they are answered, and its callers wait for seconds. A
server that ends closes its connections at once, though, and ZeroMQ reports that. `Line` gets the report on the client's
own thread, fails pending requests, and refuses new ones until the server has answered a ping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvstrata_sidecar.connector.failures import logger

PING = "ping"
PREPARE_STORE = "prepare_store"
CLOSED = "the cache server closed the connection"

PING_PATIENCE_S = 30.0
"""After this long a pending ping is replaced. ZeroMQ queues each for an absent server."""


class Line:
    """Watches one request client over ZeroMQ; other transports report a lost connection to their callers themselves.
    `health` is LMCache's event for an available server. It is cleared on the client's thread before any caller sees a
    failed exchange, and cannot be set again before `recover` has run. `is_stream`: whether an operation's answers are a
    stream. `connected` is False for a server that has never answered."""

    def __init__(
        self,
        client: Any,
        health: Any,
        new_future: Callable[[], Any],
        *,
        is_stream: Callable[[str], bool] = lambda _: False,
        connected: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._health, self._set_health = health, health.set
        self._new_future, self._is_stream, self._clock = new_future, is_stream, clock
        self._lock = threading.Lock()
        self._owes_recovery = False
        health.set = self._on_healthy
        self._down = not connected
        self._ping: Any = None
        self._ping_patience_ends_s = 0.0
        watched = getattr(client, "_message_queue_client", None)
        if watched is None:
            return
        self._queue = watched
        self._cancel_streams, self._submit = watched.cancel_streams, watched.submit_request
        self._send = watched.process_outbound_task
        watched.cancel_streams = self._on_disconnect
        watched.submit_request = self._on_submit
        watched.process_outbound_task = self._on_send

    def lose(self) -> None:
        """Mark the server as away until `recover` has run and a heartbeat succeeded."""
        with self._lock:
            self._owes_recovery = True
            self._health.clear()

    def recover(self, recovery: Callable[[], bool]) -> bool:
        """Run `recovery` before LMCache's heartbeat marks a server as available, unless it is lost meanwhile."""
        with self._lock:
            self._owes_recovery = False
        return recovery()

    def _on_healthy(self) -> None:
        """The heartbeat's result may be older than a loss, which then stands."""
        with self._lock:
            if not self._owes_recovery:
                self._set_health()

    def _on_disconnect(self) -> None:
        """LMCache calls this when the connection has ended. Of a server that is killed, the kernel ends connections
        before it stops listening: a connection that is made again meanwhile ends too, which is no news."""
        was_down, self._down = self._down, True
        self.lose()
        self._cancel_streams()
        given_up = self._give_up()
        if not was_down:
            logger.warning("The cache server is gone; %d exchanges with it are given up", given_up)

    def _on_submit(self, operation: str, payloads: list[Any]) -> Any:
        if operation == PING:
            return self._on_ping(payloads)
        if self._is_stream(operation):
            return self._submit(operation, payloads)
        if self._down:
            # Sent now, it would reach the next server, long after its caller gave up.
            return self._refused(CLOSED)
        if operation == PREPARE_STORE and not self._health.is_set():
            # Queued stores end at once, so that the engine's blocks are free within one time limit.
            return self._refused("the cache server is away")
        return self._submit(operation, payloads)

    def _on_ping(self, payloads: list[Any]) -> Any:
        """One ping at a time: unanswered ones pile up until ZeroMQ's queue is full."""
        now_s = self._clock()
        if self._ping is not None and not self._ping.query() and now_s < self._ping_patience_ends_s:
            return self._refused("the cache server has not answered the last ping")
        ping = self._submit(PING, payloads)
        take_answer = ping.set_result

        def on_answer(result: Any) -> None:
            # Before the waiter learns of it: its next requests must not be refused.
            self._down = False
            take_answer(result)

        ping.set_result = on_answer
        self._ping, self._ping_patience_ends_s = ping, now_s + PING_PATIENCE_S
        return ping

    def _on_send(self) -> None:
        if self._down:
            self._give_up_unsent()
        try:
            # Fail if ZeroMQ's queue is full, rather than block the thread that all clients share.
            self._queue.socket.sndtimeo = 0
            self._send()
        except Exception as error:
            logger.warning("A request to the cache server was dropped: %r", error)

    def _give_up_unsent(self) -> None:
        """Fail requests that were queued when the connection ended."""
        waiting = self._queue.input_queue
        kept = []
        while not waiting.empty():
            item = waiting.get_nowait()
            spec = getattr(item, "rpc_spec", None)
            if spec is None or spec.operation == PING or self._is_stream(spec.operation):
                kept.append(item)
            else:
                item.future.set_exception(ConnectionError(CLOSED))
        for item in kept:
            waiting.put(item)

    def _give_up(self) -> int:
        """Fail pending exchanges. Only for the client's own thread, which owns the table."""
        pending = self._queue.pending_futures
        given_up = list(pending.values())
        pending.clear()
        for future, _ in given_up:
            future.set_exception(ConnectionError(CLOSED))
        return len(given_up)

    def _refused(self, why: str) -> Any:
        refused = self._new_future()
        refused.set_exception(ConnectionError(why))
        return refused
