"""What the operator asks: `GET /v1/state?after=<acked revision>&wait=<seconds>`, over mutual TLS.

The answer comes at once when the acknowledged revision is not `after`; otherwise when anything in it changes, and
after `wait` seconds at the latest. It carries an entity tag: a caller that sends it back as `If-None-Match` is also
told at once of what changed between two of its polls.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

from kvstrata.contract.ack import ACK_TOKEN_HEADER, OPERATOR_COMMON_NAME, STATE_PATH, PodState

from .errors import Reason, Refusal, bad_request
from .messages import Connection, Request

MAX_WAIT_S = 120.0
_TICK_S = 1.0


class ControlService:
    """Serves the pod's state to the operator and to nobody else."""

    def __init__(self, state: Callable[[], PodState], token_file: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
        self._token_file = token_file
        self._loop = loop
        self._polls: set[_LongPoll] = set()
        self._ticker: asyncio.TimerHandle | None = None

    def check_head(self, request: Request) -> None:
        """Refuse whoever is not the operator, and everything but the one question."""
        if request.peer != OPERATOR_COMMON_NAME:
            raise Refusal(403, Reason.UNAUTHENTICATED, "this port is the operator's")
        request.subject = request.peer
        if request.path.decode("latin-1") != STATE_PATH:
            raise Refusal(404, Reason.NOT_FOUND, f"the only path here is {STATE_PATH}")
        if request.method != b"GET":
            raise Refusal(405, Reason.METHOD, "use GET here", allow="GET")

    def serve(self, request: Request, connection: Connection) -> None:
        """Answer now or hold the poll."""
        query = parse_qs(request.query.decode("latin-1"))
        try:
            after = int(query.get("after", ["-1"])[0])
            wait_s = min(max(float(query.get("wait", ["0"])[0]), 0.0), MAX_WAIT_S)
        except ValueError:
            raise bad_request(Reason.BAD_VALUE, "'after' is a revision and 'wait' a number of seconds") from None
        state = self._state()
        tag = entity_tag(state)
        known = request.headers.get(b"if-none-match", tag)
        if state.acked != after or known != tag or not wait_s > 0:
            self._answer(connection, state)
            return
        poll = _LongPoll(self, connection, tag, self._loop.time() + wait_s)
        connection.hold(poll)
        self._polls.add(poll)
        if self._ticker is None:
            self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def refused(self, request: Request, refusal: Refusal) -> None:
        """Nothing to note: the operator's mistakes are in its own log."""

    def changed(self) -> None:
        """Answer every poll whose state is no longer what it was."""
        if self._polls:
            self._settle()

    def forget(self, poll: _LongPoll) -> None:
        """The poll's caller has gone."""
        self._polls.discard(poll)

    def close(self) -> None:
        """Answer everybody who waits."""
        if self._ticker is not None:
            self._ticker.cancel()
        for poll in tuple(self._polls):
            self._polls.discard(poll)
            self._answer(poll.connection, self._state())

    def _tick(self) -> None:
        # Freshness ends without an event, so the state is also looked at by the clock.
        self._ticker = None
        self._settle()
        if self._polls:
            self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def _settle(self) -> None:
        state = self._state()
        tag, now = entity_tag(state), self._loop.time()
        for poll in [poll for poll in self._polls if poll.tag != tag or poll.deadline <= now]:
            self._polls.discard(poll)
            self._answer(poll.connection, state)

    def _answer(self, connection: Connection, state: PodState) -> None:
        try:
            token = self._token_file.read_bytes().strip()
        except OSError:
            connection.refuse(Refusal(503, Reason.NO_POLICY, "the pod's token cannot be read", retry_after_s=1))
            return
        extra = b"%s: %s\r\nETag: %s\r\n" % (ACK_TOKEN_HEADER.encode(), token, entity_tag(state))
        connection.reply(200, state.encode(), extra=extra)


class _LongPoll:
    """One question that waits for its answer."""

    __slots__ = ("_service", "connection", "deadline", "tag")

    def __init__(self, service: ControlService, connection: Connection, tag: bytes, deadline: float) -> None:
        self._service = service
        self.connection = connection
        self.tag = tag
        self.deadline = deadline

    def client_gone(self) -> None:
        self._service.forget(self)

    def client_paused(self) -> None:
        pass

    def client_resumed(self) -> None:
        pass


def entity_tag(state: PodState) -> bytes:
    """Return a tag that changes with everything that is worth an answer: not with ages, counters and use."""
    tiers = tuple(
        replace(
            tier,
            stored=0,
            loaded=0,
            refused=0,
            errors=0,
            settling=0,
            unseen=min(1, tier.unseen),
            plaintext=min(1, tier.plaintext),
        )
        for tier in state.tiers
    )
    stable = replace(state, fresh_age_ms=0, tiers=tiers, usage=(), usage_left_out=0, tier_usage=())
    return b'"%s"' % hashlib.sha256(stable.encode()).hexdigest()[:16].encode()
