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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.redis.client.replies import Replies

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


class Connection(resp.Transport):
    """One authenticated connection. Not thread-safe, except for `abort`."""

    def __init__(self, raw: socket.socket, io_timeout_s: float) -> None:
        self._socket = raw
        self._tls = isinstance(raw, ssl.SSLSocket)
        self._replies = Replies(raw, tls=self._tls)
        self.usable = True
        self._started: Sequence[resp.Command] = ()
        self._asking = False
        if self._tls:
            raw.settimeout(io_timeout_s)
        else:
            # A timeout of Python's own makes the socket non-blocking, and MSG_WAITALL needs it to block.
            raw.settimeout(None)
            seconds, rest = divmod(io_timeout_s, 1)
            timeval = struct.pack("ll", int(seconds), int(rest * 1_000_000))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def ask_each(self, commands: Sequence[resp.Command]) -> list[Any]:
        answers = self.exchange(commands)
        unknown = [index for index, answer in enumerate(answers) if resp.unknown_script(commands[index], answer)]
        for index, answer in zip(unknown, self.exchange([resp.spelled_out(commands[i]) for i in unknown]), strict=True):
            answers[index] = answer
        return answers

    def exchange(
        self, commands: Sequence[resp.Command], *, asking: bool = False, give_up_after_s: float | None = None
    ) -> list[Any]:
        """Send commands in pipelines; return each result or ReplyError. `asking` also reaches slots being imported."""
        answers: list[Any] = []
        for start in range(0, len(commands), resp.PIPELINE_COMMANDS):
            batch = commands[start : start + resp.PIPELINE_COMMANDS]
            self.start(batch, asking=asking, give_up_after_s=give_up_after_s)
            answers += self.finish()
        return answers

    def start(
        self, commands: Sequence[resp.Command], *, asking: bool = False, give_up_after_s: float | None = None
    ) -> None:
        """Send at most PIPELINE_COMMANDS; `finish` must follow before anything else."""
        self._started = [one for asked in commands for one in (resp.ASKING, asked)] if asking else commands
        self._asking = asking
        with self._exchange(give_up_after_s):
            self._send([b"".join(one.encoded or resp.command(*one.arguments) for one in self._started)])

    def finish(self) -> list[Any]:
        """Return the results or ReplyErrors of started commands."""
        if not self.usable:
            raise resp.PeerClosedError("the connection was closed")
        with self._in_step():
            answers = self._replies.answers(self._started)
        return answers[1::2] if self._asking else answers

    def set_each(self, writes: Sequence[resp.Write]) -> None:
        """Write values in one pipeline and set each answer. The command behind a refused value is still executed."""
        with self._exchange():
            carried = b""
            for number, write in enumerate(writes, 1):
                first, *rest = write.parts()
                size = len(first) + sum(map(len, rest))
                ttl = b"%d" % write.ttl_ms
                head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(write.key), write.key, size)
                tail = resp.CRLF + b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
                tail += resp.command(*write.after.arguments)
                # Send small pieces together with a body: fewer calls, fewer TLS records.
                small = carried + head if isinstance(first, memoryview) else carried + head + first
                bodies = [first, *rest] if isinstance(first, memoryview) else rest
                self._send([small, *bodies, tail] if number == len(writes) else [small, *bodies])
                carried = tail
            for write in writes:
                answer = self._replies.answer(resp.Command(write.key, (), resp.read_ok))
                accepted = self._replies.answer(write.after)
                write.answer = answer if isinstance(answer, resp.ReplyError) else accepted
        unknown = [write for write in writes if resp.unknown_script(write.after, write.answer)]
        for write, answer in zip(unknown, self.exchange([resp.spelled_out(one.after) for one in unknown]), strict=True):
            write.answer = answer

    def get_each(self, reads: Sequence[resp.Read], *, asking: bool = False) -> list[bool | resp.ReplyError | None]:
        """Read values one by one; for each whether it is there and counts, or the error. An unwanted value closes the
        connection, because draining it costs as much as a block and a new connection less than a millisecond; those
        behind it are None. `asking` also reaches slots being imported, for values that were accepted already."""
        outcomes: list[bool | resp.ReplyError | None] = [None] * len(reads)
        with self._exchange():
            for number, read in enumerate(reads):
                # One by one: otherwise the server would buffer all the blocks.
                outcomes[number] = self._get(read, asking=asking)
                if not self.usable:
                    break
                if self._replies.left_over:
                    raise resp.FramingError("bytes are left over after a reply")
        return outcomes

    def _get(self, read: resp.Read, *, asking: bool) -> bool | resp.ReplyError:
        """Read one value; framing errors and unwanted values close the connection."""
        before = [resp.ASKING] if asking else read.before
        self._send([b"".join([*(resp.command(*one.arguments) for one in before), resp.command(b"GET", read.key)])])
        # One by one: the bytes behind them begin a block, which must not be copied.
        answers = [self._replies.answer(one) for one in before]
        # A source that refuses ASKING may still have the value.
        errors = (answer for answer in answers if isinstance(answer, resp.ReplyError) and not asking)
        refused = next(errors, None)
        try:
            header = self._replies.line()
        except resp.ReplyError as error:
            if not error.in_frame:
                raise
            return refused or error
        if header == b"$-1":
            if refused is None and not asking:
                read.accept(answers)
            return refused or False
        if header[:1] != b"$":
            raise resp.FramingError("GET was not answered with a value")
        length = resp.integer(header[1:])
        if refused is None and (asking or read.accept(answers)):
            opening = read.open()
            first, *rest = opening.parts
            if length == len(first) + sum(map(len, rest)):
                self._replies.fill(first)
                if opening.header_holds():
                    for part in rest:
                        self._replies.fill(part)
                    self._replies.expect_end_of_value()
                    return read.take(opening)
        self.close()
        return refused or False

    def greet(self, username: str | None, password: bytes | None, give_up_after_s: float) -> None:
        """Authenticate and check that the peer speaks RESP. Raises AccessError if it refuses the credentials."""
        with self._exchange(give_up_after_s):
            if password is not None:
                self._require_access(b"+OK", b"AUTH", (username or "default").encode(), password)
            self._require_access(b"+PONG", b"PING")

    def expect_primary(self, give_up_after_s: float) -> None:
        """Raise TransportError, and close, if the peer reports itself as replica; no report passes."""
        (info,) = self.exchange([resp.Command(b"", (b"INFO", b"replication"))], give_up_after_s=give_up_after_s)
        if isinstance(info, bytes) and REPLICA_ROLE in info.splitlines():
            self.close()
            raise resp.TransportError("it is a replica, which takes no blocks")

    def abort(self) -> None:
        """Make the command under way and the next one fail at once."""
        # The base class's method: SSLSocket's own would make a running reader continue in clear text.
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.usable = False
        self._replies.forget()
        try:
            self._socket.close()
        except OSError:
            pass

    @contextmanager
    def _exchange(self, give_up_after_s: float | None = None) -> Iterator[None]:
        """One command and its replies: closes the connection for every outcome but a whole, expected answer."""
        if not self.usable:
            raise resp.PeerClosedError("the connection was closed")
        self._replies.give_up_at_s = None if give_up_after_s is None else time.monotonic() + give_up_after_s
        with self._in_step():
            self._require_no_data()
            yield

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Close the connection unless the body leaves it in step."""
        try:
            yield
            if self._replies.left_over:
                raise resp.FramingError("bytes are left over after a reply")
        except resp.ReplyError as error:
            if not error.in_frame or self._replies.left_over:
                self.close()
            if error.code in resp.ACCESS_CODES:
                # A new connection sends the current credentials.
                raise resp.PeerClosedError(f"access refused: {error}") from error
            if error.code == resp.REPLICA_CODE:
                raise resp.DemotedError(f"it has become a replica: {error}") from error
            raise
        except (TimeoutError, BlockingIOError) as error:
            self.close()
            raise resp.PeerTimeoutError("timed out") from error
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            self.close()
            clear_tls_errors()
            raise resp.PeerClosedError(resp.reason(error)) from error
        except (OSError, ValueError) as error:
            self.close()
            clear_tls_errors()
            raise resp.TransportError(resp.reason(error)) from error
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
        raise resp.FramingError("bytes came unasked") if surplus else resp.PeerClosedError("closed while idle")

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

    def _require_access(self, expected: bytes, *arguments: bytes) -> None:
        self._send([resp.command(*arguments)])
        try:
            line = self._replies.line()
        except resp.ReplyError as error:
            if error.in_frame and error.code != "NOPERM":
                raise
            raise resp.AccessError(f"access refused: {error}") from error
        if line != expected:
            raise resp.FramingError("the peer does not speak RESP as Redis does")
