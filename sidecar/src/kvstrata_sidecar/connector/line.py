"""The connection to the cache server: its end is noticed when it comes, not when a timer has run out.

LMCache's message queue client (0.5.6) keeps whatever it sent until an answer comes, and its callers wait for seconds. A
server that ends closes its connections at once, though, which ZeroMQ reports. `Line` hears of it on the client's own
thread, gives up what was sent, and refuses what is to be sent until the server has answered a ping again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .failures import logger

PING = "ping"


class Line:
    """Watches one request client over ZeroMQ; other transports report a lost connection to their callers themselves.

    `lost()` is called on the client's thread before anybody learns of an exchange that was given up. `new_future` makes
    one of LMCache's futures.
    """

    def __init__(self, client: Any, lost: Callable[[], None], new_future: Callable[[], Any]) -> None:
        self._lost, self._new_future = lost, new_future
        self._down = False
        queue = getattr(client, "_message_queue_client", None)
        if queue is None:
            return
        self._queue = queue
        self._cancel_streams, self._submit = queue.cancel_streams, queue.submit_request
        self._send, self._receive = queue.process_outbound_task, queue.process_inbound
        queue.cancel_streams = self._on_disconnect
        queue.submit_request = self._on_submit
        queue.process_outbound_task = self._on_send
        queue.process_inbound = self._on_receive

    def _on_disconnect(self) -> None:
        """LMCache calls this when the connection has ended."""
        self._down = True
        self._lost()
        self._cancel_streams()
        given_up = self._give_up()
        logger.warning("The cache server is gone; %d exchanges with it are given up", given_up)

    def _on_submit(self, operation: str, payloads: list[Any]) -> Any:
        if not self._down or operation == PING:
            return self._submit(operation, payloads)
        # Sent now, it would reach the next server, long after its caller gave it up.
        refused = self._new_future()
        refused.set_exception(_gone())
        return refused

    def _on_send(self) -> None:
        self._send()
        if self._down:
            # What was on its way here when the connection ended.
            self._give_up(spared=PING)

    def _on_receive(self) -> None:
        self._down = False
        self._receive()

    def _give_up(self, spared: str = "") -> int:
        """Fail pending exchanges. Only the client's own thread may: the table of them is that thread's."""
        pending = self._queue.pending_futures
        chosen = [uid for uid, (_, spec) in pending.items() if spec.operation != spared]
        for uid in chosen:
            future, _ = pending.pop(uid)
            future.set_exception(_gone())
        return len(chosen)


def _gone() -> ConnectionError:
    return ConnectionError("the cache server closed the connection")
