"""RESP2 on plain sockets, into and out of the caller's memory.

A connection is closed at the first sign that its bytes may not be the expected answer: wrong type, malformed number,
surplus bytes, timeout, abort. Only an error reply that Redis sends in full leaves it usable. Every value starts with a
header made from its key, so a well-formed answer to another question is a miss. Bulk bytes are never copied.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstrata_sidecar.adapter.redis.client.block_io import Parts, Read, Write
from kvstrata_sidecar.adapter.redis.client.replies import Replies
from kvstrata_sidecar.adapter.redis.client.resp import (
    ACCESS_CODES,
    ASKING,
    CRLF,
    PIPELINE_COMMANDS,
    REPLICA_CODE,
    AccessError,
    AccessLostError,
    Command,
    DemotedError,
    FramingError,
    PeerClosedError,
    PeerTimeoutError,
    Reply,
    ReplyError,
    TransportError,
    command,
    integer,
    read_ok,
    reason,
    spelled_out,
    unknown_script,
)

__all__ = [
    "AccessError",
    "Command",
    "Connection",
    "FramingError",
    "PeerClosedError",
    "PeerTimeoutError",
    "Reply",
    "ReplyError",
    "TransportError",
    "command",
    "reason",
]

REPLICA_ROLE = b"role:slave"
"""A replica's role in INFO, in Redis and Valkey."""


def clear_tls_errors() -> None:
    """Empty OpenSSL's queue of errors of this thread.

    With OpenSSL 3.4 or later, Python leaves a system call's error there, such as EPIPE, and every later read of this
    thread that has to wait fails with it, over any connection (https://github.com/python/cpython/issues/148594).
    The beginning of a handshake empties the queue.
    """
    idle = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="idle")
    try:
        idle.do_handshake()
    except ssl.SSLWantReadError:
        pass


class Connection:
    """One authenticated connection. Not thread-safe, except for `abort`."""

    def __init__(self, raw: socket.socket, io_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = raw
        self._tls = isinstance(raw, ssl.SSLSocket)
        self._clock = clock
        self._replies = Replies(raw, clock, tls=self._tls)
        self._open = True
        self.commands = 0
        if self._tls:
            raw.settimeout(io_timeout_s)
        else:
            # A timeout of Python's own makes the socket non-blocking, and MSG_WAITALL needs it to block.
            raw.settimeout(None)
            seconds, rest = divmod(io_timeout_s, 1)
            timeval = struct.pack("ll", int(seconds), int(rest * 1_000_000))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    @property
    def usable(self) -> bool:
        return self._open

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        answers = self.ask_each(commands)
        for answer in answers:
            if isinstance(answer, ReplyError):
                raise answer
        return answers

    def ask_each(self, commands: Sequence[Command]) -> list[Any]:
        answers = self.exchange(commands)
        unknown = [index for index, answer in enumerate(answers) if unknown_script(commands[index], answer)]
        if unknown:
            for index, answer in zip(unknown, self.exchange([spelled_out(commands[i]) for i in unknown]), strict=True):
                answers[index] = answer
        return answers

    def exchange(
        self, commands: Sequence[Command], *, asking: bool = False, give_up_after_s: float | None = None
    ) -> list[Any]:
        """Send commands in pipelines; return each result or ReplyError. `asking` also reaches slots being imported."""
        answers: list[Any] = []
        for start in range(0, len(commands), PIPELINE_COMMANDS):
            batch = commands[start : start + PIPELINE_COMMANDS]
            self.start(batch, asking=asking, give_up_after_s=give_up_after_s)
            answers += self.finish(batch, asking=asking)
        return answers

    def start(self, commands: Sequence[Command], *, asking: bool = False, give_up_after_s: float | None = None) -> None:
        """Send at most PIPELINE_COMMANDS; `finish` with the same ones must follow before anything else."""
        with self._exchange(give_up_after_s):
            prefix = ASKING if asking else b""
            self._send([b"".join(prefix + (one.encoded or command(*one.arguments)) for one in commands)])

    def finish(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """Return the results or ReplyErrors of started commands."""
        if not self._open:
            raise PeerClosedError("the connection was closed")
        answers: list[Any] = []
        with self._in_step():
            if not asking:
                return self._replies.answers(commands)
            for one in commands:
                self._replies.answer(Command(one.key, (), read_ok))
                answers.append(self._replies.answer(one))
        return answers

    def set_each(self, writes: Sequence[Write]) -> None:
        """Write values in one pipeline and set each answer. The command behind a refused value is still executed."""
        with self._exchange():
            carried = b""
            for number, write in enumerate(writes, 1):
                first, *rest = write.parts()
                size = len(first) + sum(map(len, rest))
                ttl = b"%d" % write.ttl_ms
                head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(write.key), write.key, size)
                tail = CRLF + b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
                if write.after is not None:
                    tail += command(*write.after.arguments)
                # Send small pieces together with a body: fewer calls, fewer TLS records.
                small = carried + head if isinstance(first, memoryview) else carried + head + first
                bodies = [first, *rest] if isinstance(first, memoryview) else rest
                self._send([small, *bodies, tail] if number == len(writes) else [small, *bodies])
                carried = tail
            for write in writes:
                answer = self._replies.answer(Command(write.key, (), read_ok))
                accepted = True if write.after is None else self._replies.answer(write.after)
                write.answer = answer if isinstance(answer, ReplyError) else accepted
        unknown = [write for write in writes if write.after is not None and unknown_script(write.after, write.answer)]
        if unknown:
            texts = [spelled_out(write.after) for write in unknown if write.after is not None]
            for write, answer in zip(unknown, self.exchange(texts), strict=True):
                write.answer = answer

    def set(self, key: bytes, parts: Parts, ttl_ms: int, after: Command | None = None) -> Any:
        """Write one value; return the result of `after`. Raises ReplyError if either is refused."""
        write = Write(key, lambda: parts, ttl_ms, after)
        self.set_each([write])
        if isinstance(write.answer, ReplyError):
            raise write.answer
        return write.answer

    def get_each(self, reads: Sequence[Read], *, asking: bool = False) -> list[bool | ReplyError | None]:
        """Read values one by one; for each whether it is there and counts, or the error.

        An unwanted value closes the connection, because draining it costs as much as a block and a new connection less
        than a millisecond; those behind it are None. `asking` applies to the values alone.
        """
        outcomes: list[bool | ReplyError | None] = [None] * len(reads)
        with self._exchange():
            for number, read in enumerate(reads):
                # One by one: otherwise the server would buffer all the blocks.
                self._send([self._question(read, asking=asking)])
                outcomes[number] = self._get(read, asking=asking)
                if not self._open:
                    break
                if self._replies.left_over:
                    raise FramingError("bytes are left over after a reply")
        return outcomes

    @staticmethod
    def _question(read: Read, *, asking: bool) -> bytes:
        words = [command(*one.arguments) for one in read.before]
        return b"".join([*words, ASKING if asking else b"", command(b"GET", read.key)])

    def _get(self, read: Read, *, asking: bool) -> bool | ReplyError:
        """Read one value; framing errors and unwanted values close the connection."""
        # One by one: the bytes behind them begin a block, which must not be copied.
        answers = [self._replies.answer(one) for one in read.before]
        if asking:
            self._replies.answer(Command(read.key, (), read_ok))
        refused = next((answer for answer in answers if isinstance(answer, ReplyError)), None)
        try:
            header = self._replies.line()
        except ReplyError as error:
            if not error.in_frame:
                raise
            return refused or error
        if header == b"$-1":
            if refused is None:
                read.accept(answers)
            return refused or False
        length = self._length(header)
        if refused is not None or not read.accept(answers):
            self.close()
            return refused or False
        opening = read.open()
        first, *rest = opening.parts
        if length != len(first) + sum(map(len, rest)):
            self.close()
            return False
        self._replies.fill(first)
        if not opening.header_holds():
            self.close()
            return False
        for part in rest:
            self._replies.fill(part)
        self._replies.expect_end_of_value()
        return read.take(opening)

    def greet(self, username: str | None, password: bytes | None, give_up_after_s: float) -> None:
        """Authenticate and check that the peer speaks RESP. Raises AccessError if it refuses the credentials."""
        with self._exchange(give_up_after_s):
            if password is not None:
                name = (username or "default").encode()
                self._send([command(b"AUTH", name, password)])
                self._expect_access(b"+OK")
            self._send([command(b"PING")])
            self._expect_access(b"+PONG")

    def ping(self, give_up_after_s: float) -> None:
        with self._exchange(give_up_after_s):
            self._send([command(b"PING")])
            if self._replies.line() != b"+PONG":
                raise FramingError("PING was not answered with PONG")

    def expect_primary(self, give_up_after_s: float) -> None:
        """Raise TransportError, and close, if the peer reports itself as replica; no report passes."""
        (info,) = self.exchange([Command(b"", (b"INFO", b"replication"))], give_up_after_s=give_up_after_s)
        if isinstance(info, bytes) and REPLICA_ROLE in info.splitlines():
            self.close()
            raise TransportError("it is a replica, which takes no blocks")

    def abort(self) -> None:
        """Make the command under way and the next one fail at once."""
        # The base class's method: SSLSocket's own would make a running reader continue in clear text.
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._open = False
        self._replies.forget()
        try:
            self._socket.close()
        except OSError:
            pass

    @contextmanager
    def _exchange(self, give_up_after_s: float | None = None) -> Iterator[None]:
        """One command and its replies: closes the connection for every outcome but a whole, expected answer."""
        if not self._open:
            raise PeerClosedError("the connection was closed")
        self._replies.give_up_at_s = None if give_up_after_s is None else self._clock() + give_up_after_s
        with self._in_step():
            self._require_no_data()
            self.commands += 1
            yield

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Close the connection unless the body leaves it in step."""
        try:
            yield
            if self._replies.left_over:
                raise FramingError("bytes are left over after a reply")
        except ReplyError as error:
            if not error.in_frame or self._replies.left_over:
                self.close()
            if error.code in ACCESS_CODES:
                self.close()
                raise AccessLostError(f"access refused: {error}") from error
            if error.code == REPLICA_CODE:
                raise DemotedError(f"it has become a replica: {error}") from error
            raise
        except TransportError:
            self.close()
            raise
        except TimeoutError as error:
            self.close()
            raise PeerTimeoutError("timed out") from error
        except BlockingIOError as error:
            self.close()
            raise PeerTimeoutError("timed out") from error
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            self.close()
            clear_tls_errors()
            raise PeerClosedError(reason(error)) from error
        except (OSError, ValueError) as error:
            self.close()
            clear_tls_errors()
            raise TransportError(reason(error)) from error
        except BaseException:
            self.close()
            raise

    def _require_no_data(self) -> None:
        """Raise if the peer sent anything before the command."""
        if self._tls:
            timeout_s = self._socket.gettimeout()
            self._socket.settimeout(0)
            try:
                surplus = self._socket.recv(1)  # also consumes session tickets, which are no data
            except ssl.SSLWantReadError:
                return
            finally:
                self._socket.settimeout(timeout_s)
        else:
            try:
                surplus = self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            except BlockingIOError:
                return
        raise FramingError("bytes came unasked") if surplus else PeerClosedError("closed while idle")

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if self._tls:
            for part in parts:
                self._socket.sendall(part)
            return
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            self._replies.check_time()
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _expect_access(self, expected: bytes) -> None:
        try:
            line = self._replies.line()
        except ReplyError as error:
            if error.in_frame and error.code != "NOPERM":
                raise
            raise AccessError(f"access refused: {error}") from error
        if line != expected:
            raise FramingError("the peer does not speak RESP as Redis does")

    @staticmethod
    def _length(header: bytes) -> int:
        if header[:1] != b"$":
            raise FramingError("GET was not answered with a value")
        return integer(header[1:])
