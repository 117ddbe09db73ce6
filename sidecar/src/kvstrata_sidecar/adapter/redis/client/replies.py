"""Replies of a peer, read whole or into the caller's memory, each in step or not at all.

Bytes read ahead, often the beginning of a block, are kept in one place and overwritten once they are in the block's
memory, so that no part of a tenant's block stays in the heap.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvstrata_sidecar.adapter.redis.client import resp


class Replies:
    """Reads from a socket that it does not own; exceptions leave the stream out of step. `give_up_at_s` None: never."""

    def __init__(self, raw: socket.socket, *, tls: bool) -> None:
        self._socket = raw
        # SSLSocket's recv_into only calls this, once for each record of 16 KB.
        self._read: Callable[[int, memoryview], int] | None = cast(Any, raw).read if tls else None
        self._buffer = ReadAhead(resp.MAX_LINE_BYTES + 4096)
        self._left_bytes = 0
        self.give_up_at_s: float | None = None

    @property
    def left_over(self) -> bool:
        return len(self._buffer) > 0

    def forget(self) -> None:
        """Overwrite bytes that were received and not read."""
        self._buffer.clear()

    def line(self) -> bytes:
        """Return the next line without its end. Raises ReplyError if it is an error reply."""
        while (end := self._buffer.find(resp.CRLF)) < 0:
            if len(self._buffer) > resp.MAX_LINE_BYTES:
                raise resp.FramingError("a reply line has no end")
            self.check_time()
            if not self._buffer.receive(self._socket.recv_into):
                raise resp.PeerClosedError("the peer closed the connection")
        line = self._buffer.take(end + len(resp.CRLF))[: -len(resp.CRLF)]
        if line[:1] == b"-":
            raise resp.ReplyError(line[1:].decode("utf-8", "replace"))
        return line

    def answers(self, commands: Sequence[resp.Command]) -> list[Any]:
        """Return the next results or errors. Copies all received bytes: no block may be expected behind them."""
        answers: list[Any] = []
        while len(answers) < len(commands):
            lines = self._buffer.peek().split(resp.CRLF)
            behind, index = 0, 0
            for one in commands[len(answers) :]:
                reply, index = resp.parse(lines, index)
                if index < 0:
                    break
                behind = index
                answers.append(one.read(reply))
            self._buffer.skip(sum(map(len, lines[:behind])) + len(resp.CRLF) * behind)
            if len(answers) < len(commands):
                answers.append(self.answer(commands[len(answers)]))
        return answers

    def answer(self, one: resp.Command) -> Any:
        """Return the next result, or the error if the connection stays in step."""
        self._left_bytes = resp.MAX_REPLY_BYTES
        try:
            reply = self._reply(self.line())
        except resp.ReplyError as error:  # the other replies of the pipeline still come
            if not error.in_frame:
                raise
            return error
        return one.read(reply)

    def _reply(self, line: bytes, depth: int = 0) -> resp.Reply:
        kind, rest = line[:1], line[1:]
        self._left_bytes -= len(line) + len(resp.CRLF)
        if self._left_bytes < 0:
            raise resp.FramingError("an answer exceeds the maximum for its question")
        if kind == b"+":
            return rest
        if kind == b":":
            return -resp.integer(rest[1:]) if rest[:1] == b"-" else resp.integer(rest)
        if kind == b"$":
            if rest == b"-1":
                return None
            data = bytearray(resp.within(rest, resp.MAX_LINE_BYTES))
            self._left_bytes -= len(data)
            self.fill(memoryview(data))
            self.expect_end_of_value()
            return bytes(data)
        if kind == b"*" and depth < resp.MAX_DEPTH:
            if rest == b"-1":
                return None
            try:
                return [self._reply(self.line(), depth + 1) for _ in range(resp.within(rest, resp.MAX_ELEMENTS))]
            except resp.ReplyError as error:
                raise resp.FramingError(f"an error within an answer: {error}") from error
        raise resp.FramingError("an answer of an unknown kind")

    def fill(self, view: memoryview) -> None:
        position = self._buffer.pour(view)
        while position < len(view):
            self.check_time()
            rest = view[position:]
            if self._read is not None:
                count = self._read(len(rest), rest)
            else:
                count = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
            if count == 0:
                raise resp.PeerClosedError("the peer closed the connection within a value")
            position += count

    def expect_end_of_value(self) -> None:
        end = bytearray(len(resp.CRLF))
        self.fill(memoryview(end))
        if bytes(end) != resp.CRLF:
            raise resp.FramingError("a value does not end at its length")

    def check_time(self) -> None:
        if self.give_up_at_s is not None and time.monotonic() > self.give_up_at_s:
            raise resp.PeerTimeoutError("timed out")


class ReadAhead:
    """At most `capacity` bytes received and not yet read; `step` are requested at a time."""

    def __init__(self, capacity: int, step: int = 4096) -> None:
        self._memory = bytearray(capacity)
        self._view = memoryview(self._memory)
        self._zeros = memoryview(bytes(capacity))
        self._step = step
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def find(self, what: bytes) -> int:
        """Return how many bytes come before `what`, -1 without it."""
        place = self._memory.find(what, self._start, self._end)
        return place - self._start if place >= 0 else -1

    def receive(self, receive_into: Callable[[memoryview], int]) -> int:
        """Receive more bytes; return how many came. Raises BufferError when it is full."""
        if self._end + self._step > len(self._memory):
            held, end = len(self), self._end
            # A memoryview moves overlapping bytes in place, without a copy.
            self._view[:held] = self._view[self._start : end]
            self._wipe(held, end)
            self._start, self._end = 0, held
        if self._end == len(self._memory):
            raise BufferError("there is no room to read ahead")
        count = receive_into(self._view[self._end : self._end + self._step])
        self._end += count
        return count

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes, which are available and not secret."""
        taken = bytes(self._view[self._start : self._start + length])
        self.skip(length)
        return taken

    def peek(self) -> bytes:
        """Return a copy of the received bytes: for replies, which are not secret."""
        return bytes(self._view[self._start : self._end])

    def skip(self, length: int) -> None:
        """Skip the next `length` bytes, which are available, and not secret or overwritten."""
        self._start += length
        if self._start == self._end:
            self._start = self._end = 0

    def pour(self, target: memoryview) -> int:
        """Move the next bytes into `target` and overwrite them here; return how many there were."""
        count = min(len(self), len(target))
        target[:count] = self._view[self._start : self._start + count]
        self._wipe(self._start, self._start + count)
        self.skip(count)
        return count

    def clear(self) -> None:
        """Overwrite the rest."""
        self._wipe(self._start, self._end)
        self._start = self._end = 0

    def _wipe(self, start: int, end: int) -> None:
        if start < end:
            self._view[start:end] = self._zeros[: end - start]
