"""RESP2 on plain sockets, into and out of the caller's memory.

A connection carries one command (or one pipeline) at a time and is closed at the first sign that the bytes on it might
not be the answer to what was asked: an unexpected type, a number that is not one, bytes left over, a timeout, an abort.
Only an error reply that Redis sends in full instead of the expected reply leaves it usable.

Every value starts with a header made from its key, so that even a well-formed answer to another question is a miss.
Bulk bytes are never copied: `recv_into` with MSG_WAITALL fills the caller's view, `sendmsg` sends from it. Small
answers are read whole, by `Command.read`, within the exchange: what it refuses closes the connection too.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .replies import Replies
from .sealer import Opening
from .wire import (
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
"""How Redis and Valkey say it in INFO."""


class Connection:
    """One authenticated connection. Not safe to share, but for `abort`, which any thread may call."""

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
        """Whether the connection is open and in step as far as is known."""
        return self._open

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Return what the replies say, in order. Raises ReplyError for the first that is an error."""
        answers = self.ask_each(commands)
        for answer in answers:
            if isinstance(answer, ReplyError):
                raise answer
        return answers

    def ask_each(self, commands: Sequence[Command]) -> list[Any]:
        """Return what each reply says, or the ReplyError that it is."""
        answers = self.exchange(commands)
        unknown = [index for index, answer in enumerate(answers) if unknown_script(commands[index], answer)]
        if unknown:
            for index, answer in zip(unknown, self.exchange([spelled_out(commands[i]) for i in unknown]), strict=True):
                answers[index] = answer
        return answers

    def exchange(
        self, commands: Sequence[Command], *, asking: bool = False, give_up_after_s: float | None = None
    ) -> list[Any]:
        """Send commands in pipelines; return what each reply says, or the ReplyError that it is.

        `asking` has a server of a cluster answer about slots that it is just taking over.
        """
        answers: list[Any] = []
        for start in range(0, len(commands), PIPELINE_COMMANDS):
            batch = commands[start : start + PIPELINE_COMMANDS]
            self.start(batch, asking=asking, give_up_after_s=give_up_after_s)
            answers += self.finish(batch, asking=asking)
        return answers

    def start(self, commands: Sequence[Command], *, asking: bool = False, give_up_after_s: float | None = None) -> None:
        """Send at most PIPELINE_COMMANDS; `finish` with the same ones has to follow before anything else."""
        with self._exchange(give_up_after_s):
            prefix = ASKING if asking else b""
            self._send([b"".join(prefix + command(*one.arguments) for one in commands)])

    def finish(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """Return what the replies to commands that were started say, or the ReplyErrors that they are."""
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

    def set(self, key: bytes, parts: Sequence[bytes | memoryview], ttl_ms: int, after: Command | None = None) -> Any:
        """Write `parts` under `key` for `ttl_ms`; return what the reply to `after`, sent right behind, says.

        Raises ReplyError if Redis refuses the value, for instance with OOM; `after` was executed all the same.
        """
        size = sum(len(part) for part in parts)
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size)
        ttl = b"%d" % ttl_ms
        tail = CRLF + b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        if after is not None:
            tail += command(*after.arguments)
        with self._exchange():
            self._send([head, *parts, tail])
            answers = [self._replies.answer(Command(key, (), read_ok))]
            if after is not None:
                answers.append(self._replies.answer(after))
        if after is not None and unknown_script(after, answers[1]):
            answers[1:] = self.exchange([spelled_out(after)])
        for answer in answers:
            if isinstance(answer, ReplyError):
                raise answer
        return answers[-1]

    def get_into(
        self,
        key: bytes,
        opening: Opening,
        before: Sequence[Command] = (),
        accept: Callable[[Sequence[Any]], bool] = lambda _: True,
        *,
        asking: bool = False,
    ) -> bool:
        """Read the value of `key` into the parts of `opening`; False if there is none of this length and header.

        `before` is asked in the same pipeline; the value counts only if `accept` takes what those replies say. The
        parts may hold a piece of a value after an error, never after False. `asking` goes for the value alone.
        """
        with self._exchange():
            prefix = ASKING if asking else b""
            self._send([b"".join(command(*one.arguments) for one in before) + prefix + command(b"GET", key)])
            # One by one: behind them comes a piece of the block, and `answers` copies whatever has come.
            answers = [self._replies.answer(one) for one in before]
            if asking:
                self._replies.answer(Command(key, (), read_ok))
            refused = next((answer for answer in answers if isinstance(answer, ReplyError)), None)
            header = self._replies.line()
            if header == b"$-1":
                if refused is not None:
                    raise refused
                accept(answers)
                return False
            first, *rest = opening.parts
            length = self._length(header)
            if refused is not None:
                self.close()
                raise refused
            if not accept(answers) or length != len(first) + sum(map(len, rest)):
                # Draining would cost as much as a block; a new connection costs less than a millisecond.
                self.close()
                return False
            self._replies.fill(first)
            if not opening.header_holds():
                self.close()
                return False
            for part in rest:
                self._replies.fill(part)
            self._replies.expect_end_of_value()
            return True

    def greet(self, username: str | None, password: bytes | None, give_up_after_s: float) -> None:
        """Authenticate and see that the peer speaks RESP. Raises AccessError if it refuses the credentials."""
        with self._exchange(give_up_after_s):
            if password is not None:
                name = (username or "default").encode()
                self._send([command(b"AUTH", name, password)])
                self._expect_access(b"+OK")
            self._send([command(b"PING")])
            self._expect_access(b"+PONG")

    def ping(self, give_up_after_s: float) -> None:
        """See that the peer answers."""
        with self._exchange(give_up_after_s):
            self._send([command(b"PING")])
            if self._replies.line() != b"+PONG":
                raise FramingError("PING was not answered with PONG")

    def expect_primary(self, give_up_after_s: float) -> None:
        """Raise TransportError, and close, if the peer says that it is a replica; one that does not tell is taken."""
        (told,) = self.exchange([Command(b"", (b"INFO", b"replication"))], give_up_after_s=give_up_after_s)
        if isinstance(told, bytes) and REPLICA_ROLE in told.splitlines():
            self.close()
            raise TransportError("it is a replica, which takes no blocks")

    def abort(self) -> None:
        """Make whatever uses this connection fail at once; the next command on it fails too."""
        # The base class's method: SSLSocket's own would make a reader under way go on in clear text.
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the connection."""
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
            self._require_silence()
            self.commands += 1
            yield

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Close the connection unless what happens within leaves it in step."""
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
            raise PeerClosedError(reason(error)) from error
        except (OSError, ValueError) as error:
            self.close()
            raise TransportError(reason(error)) from error
        except BaseException:
            self.close()
            raise

    def _require_silence(self) -> None:
        """Raise unless the peer has nothing to say before it is asked."""
        if self._tls:
            timeout_s = self._socket.gettimeout()
            self._socket.settimeout(0)
            try:
                surplus = self._socket.recv(1)  # also takes in session tickets, which are no data
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
