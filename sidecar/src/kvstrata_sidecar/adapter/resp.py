"""RESP2 on plain sockets, into and out of the caller's memory.

A connection carries one command (or one pipeline) at a time and is closed at the first sign that the bytes on it might
not be the answer to what was asked: an unexpected type, a number that is not one, bytes left over, a timeout, an abort.
Only an error reply that Redis sends in full instead of the expected reply leaves it usable.

Every value starts with a seal made from its key, so that even a well-formed answer to another question is a miss.
Bulk bytes are never copied: `recv_into` with MSG_WAITALL fills the caller's view, `sendmsg` sends from it.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

CRLF = b"\r\n"
SEAL_BYTES = 16
MAX_LINE_BYTES = 16 * 1024
PIPELINE_KEYS = 1024
_SEAL_VERSION = b"kvs1"

IN_FRAME_ERRORS = frozenset(
    {
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOPERM",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
        "WRONGTYPE",
    }
)
"""Error replies after which a connection stays in step: Redis read the whole command and answered it once."""


class TransportError(Exception):
    """The connection is of no use any more and was closed."""


class FramingError(TransportError):
    """The peer sent something that cannot be the answer."""


class PeerClosedError(TransportError):
    """The peer ended the connection."""


class PeerTimeoutError(TransportError):
    """The peer sent or took nothing for too long."""


class AccessError(TransportError):
    """Credentials are missing or refused: trying again soon is of no use."""


class ReplyError(Exception):
    """Redis answered with an error, in step; `code` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


def seal(key: bytes) -> bytes:
    """Return the 16 bytes in front of the value of `key`."""
    return _SEAL_VERSION + hashlib.blake2b(key, digest_size=SEAL_BYTES - len(_SEAL_VERSION)).digest()


def command(*arguments: bytes) -> bytes:
    """Return a command in RESP."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in arguments)


class Connection:
    """One authenticated connection. Not safe to share, but for `abort`, which any thread may call."""

    def __init__(self, raw: socket.socket, io_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = raw
        self._tls = isinstance(raw, ssl.SSLSocket)
        self._buffer = bytearray()
        self._clock = clock
        self._give_up_at_s: float | None = None
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

    def get_into(self, key: bytes, view: memoryview) -> bool:
        """Read the value of `key` into `view`; False if there is none of exactly this length under this key's seal.

        `view` may hold part of a value after an error, never after False.
        """
        with self._exchange():
            self._send([command(b"GET", key)])
            header = self._line()
            if header == b"$-1":
                return False
            if self._length(header) != SEAL_BYTES + len(view):
                # Draining would cost as much as a block; a new connection costs less than a millisecond.
                self.close()
                return False
            found = bytearray(SEAL_BYTES)
            self._receive_exactly(memoryview(found))
            if bytes(found) != seal(key):
                self.close()
                return False
            self._receive_exactly(view)
            self._expect_end_of_value()
            return True

    def set(self, key: bytes, view: memoryview, ttl_ms: int) -> None:
        """Write `view` under `key` for `ttl_ms`. Raises ReplyError if Redis refuses, for instance with OOM."""
        with self._exchange():
            head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(key), key, SEAL_BYTES + len(view), seal(key))
            ttl = b"%d" % ttl_ms
            self._send([head, view, CRLF + b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)])
            if self._line() != b"+OK":
                raise FramingError("SET was not answered with OK")

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there."""
        return [number == 1 for number in self._numbers(b"EXISTS", keys, highest=1)]

    def unlink(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete keys; return for each whether it was there."""
        return [number == 1 for number in self._numbers(b"UNLINK", keys, highest=1)]

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
            if self._line() != b"+PONG":
                raise FramingError("PING was not answered with PONG")

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
        self._buffer.clear()
        try:
            self._socket.close()
        except OSError:
            pass

    @contextmanager
    def _exchange(self, give_up_after_s: float | None = None) -> Iterator[None]:
        """One command and its replies: closes the connection for every outcome but a whole, expected answer."""
        if not self._open:
            raise PeerClosedError("the connection was closed")
        self._give_up_at_s = None if give_up_after_s is None else self._clock() + give_up_after_s
        try:
            self._require_silence()
            self.commands += 1
            yield
            if self._buffer:
                raise FramingError("bytes are left over after a reply")
        except ReplyError as error:
            if error.code not in IN_FRAME_ERRORS or self._buffer:
                self.close()
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

    def _numbers(self, name: bytes, keys: Sequence[bytes], highest: int) -> list[int]:
        numbers: list[int] = []
        for start in range(0, len(keys), PIPELINE_KEYS):
            batch = keys[start : start + PIPELINE_KEYS]
            with self._exchange():
                self._send([b"".join(command(name, key) for key in batch)])
                refused: ReplyError | None = None
                for _ in batch:
                    try:
                        line = self._line()
                        if line[:1] != b":" or not 0 <= _integer(line[1:]) <= highest:
                            raise FramingError(f"{name.decode()} was not answered with a number in range")
                        numbers.append(_integer(line[1:]))
                    except ReplyError as error:  # the other replies of the pipeline still come
                        if error.code not in IN_FRAME_ERRORS:
                            raise
                        refused = refused or error
                if refused is not None:
                    raise refused
        return numbers

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if self._tls:
            for part in parts:
                self._socket.sendall(part)
            return
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            self._check_time()
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _line(self) -> bytes:
        """Return the next line without its end. Raises ReplyError if it is an error reply."""
        while (end := self._buffer.find(CRLF)) < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise FramingError("a reply line has no end")
            self._check_time()
            data = self._socket.recv(4096)
            if not data:
                raise PeerClosedError("the peer closed the connection")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + len(CRLF)]
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        return line

    def _receive_exactly(self, view: memoryview) -> None:
        position = min(len(self._buffer), len(view))
        view[:position] = self._buffer[:position]
        del self._buffer[:position]
        while position < len(view):
            self._check_time()
            rest = view[position:]
            count = self._socket.recv_into(rest) if self._tls else self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
            if count == 0:
                raise PeerClosedError("the peer closed the connection within a value")
            position += count

    def _expect_end_of_value(self) -> None:
        end = bytearray(len(CRLF))
        self._receive_exactly(memoryview(end))
        if bytes(end) != CRLF:
            raise FramingError("a value does not end where its length says")

    def _expect_access(self, expected: bytes) -> None:
        try:
            line = self._line()
        except ReplyError as error:
            if error.code in IN_FRAME_ERRORS - {"NOPERM"}:
                raise
            raise AccessError(f"access refused: {error}") from error
        if line != expected:
            raise FramingError("the peer does not speak RESP as Redis does")

    @staticmethod
    def _length(header: bytes) -> int:
        if header[:1] != b"$":
            raise FramingError("GET was not answered with a value")
        return _integer(header[1:])

    def _check_time(self) -> None:
        if self._give_up_at_s is not None and self._clock() > self._give_up_at_s:
            raise PeerTimeoutError("timed out")


def _integer(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 15:
        raise FramingError("a reply holds a malformed number")
    return int(digits)


def reason(error: BaseException) -> str:
    """Return what went wrong, in words."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text) or type(error).__name__
