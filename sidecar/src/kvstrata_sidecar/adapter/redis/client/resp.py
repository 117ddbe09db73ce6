"""RESP2 without sockets: commands, values, replies and errors; `connection` moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstrata_sidecar.adapter.tier.sealer import Opening

CRLF = b"\r\n"
MAX_LINE_BYTES = 16 * 1024
MAX_ELEMENTS = 16_384
MAX_REPLY_BYTES = 4 << 20
"""The longest answer that is read whole. Longer values, blocks, are read into the caller's memory instead."""

MAX_DEPTH = 4
PIPELINE_COMMANDS = 1024

Reply = int | bytes | list["Reply"] | None
Parts = Sequence[bytes | memoryview]

IN_FRAME_ERRORS = frozenset({
    "ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOPERM", "NOREPLICAS", "NOSCRIPT",
    "OOM", "TRYAGAIN", "WRONGTYPE",
})  # fmt: skip
"""Error replies after which a connection stays in step: Redis read the whole command and answered it once."""


class TransportError(Exception):
    """The connection is unusable and was closed."""


class FramingError(TransportError):
    """The peer sent something that cannot be the answer."""


class PeerClosedError(TransportError):
    """The peer closed the connection; `reused` if it had been idle, so that a new one may work."""

    reused = False


class PeerTimeoutError(TransportError):
    """The peer sent or accepted nothing for too long."""


class AccessError(TransportError):
    """Credentials are missing or refused: an early retry is useless."""


class DemotedError(PeerClosedError):
    """The server refuses writes because it became a replica: a new connection finds the new primary."""


class NodeAwayError(TransportError):
    """The server of the slot is known to be away, or there is none; nothing was sent."""


class SlotMovingError(TransportError):
    """The slot is moving between two servers, and the command cannot be executed meanwhile."""


ACCESS_CODES = frozenset({"NOAUTH", "WRONGPASS"})
REPLICA_CODE = "READONLY"
FOREIGN_KEY = "ttempted to access a non local key in a cluster node"
"""Error of a script whose key is at another server, or missing, in a slot that is moving; Redis and Valkey begin it
differently. The connection stays in step."""


class ReplyError(Exception):
    """Redis answered with an error, in step; `code` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]

    @property
    def in_frame(self) -> bool:
        """Whether the connection stays in step behind it."""
        return self.code in IN_FRAME_ERRORS or (self.code == "ERR" and FOREIGN_KEY in str(self))


class Command(NamedTuple):
    """One command about `key`, by which a cluster routes it. A tuple, because a lookup makes dozens. `read` converts
    the reply and raises FramingError. `otherwise` is sent if the server does not know the script. `encoded` is
    `arguments` in RESP, for frequent commands."""

    key: bytes
    arguments: tuple[bytes, ...]
    read: Callable[[Reply], Any] = lambda reply: reply
    otherwise: tuple[bytes, ...] | None = None
    encoded: bytes = b""


@dataclass(slots=True)
class Write:
    """A value for `key` that lives for `ttl_ms`, and the command sent right behind it. `parts` is called when the value
    is about to be sent, so that one staging buffer per worker suffices. `answer` is the result of `after` or the error;
    None until a reply came."""

    key: bytes
    parts: Callable[[], Parts]
    ttl_ms: int
    after: Command
    answer: Any = None


class Read(ABC):
    """A value to read, and the decision whether it counts. Methods are called in this order."""

    key: bytes
    before: Sequence[Command]

    @abstractmethod
    def accept(self, answers: Sequence[Any]) -> bool:
        """Whether the value counts, given the replies to `before`."""

    @abstractmethod
    def open(self) -> Opening:
        """Return the destination of the value; called for one value at a time, when it arrives."""

    @abstractmethod
    def take(self, opening: Opening) -> bool:
        """Whether the bytes read are the value; called when all of them are there."""


class Transport(ABC):
    """Sends commands to the server, or to the server of a cluster that has the slot of their key."""

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Return the results, in order. Raises the first error."""
        answers = self.ask_each(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    @abstractmethod
    def ask_each(self, commands: Sequence[Command]) -> list[Any]:
        """Return the results or errors, in order."""


_HEADS = {size: b"$%d" % size for size in range(256)}
"""Headers of short strings, by length."""


def command(*arguments: bytes) -> bytes:
    lines = [b"*%d" % len(arguments)]
    for argument in arguments:
        size = len(argument)
        lines += (_HEADS.get(size) or b"$%d" % size, argument)
    lines.append(b"")
    return CRLF.join(lines)


def unknown_script(asked: Command, answer: Any) -> bool:
    """Whether the server does not know a script whose text can be sent."""
    return isinstance(answer, ReplyError) and answer.code == "NOSCRIPT" and asked.otherwise is not None


def spelled_out(asked: Command) -> Command:
    """Return the command that sends a script's text instead of its digest."""
    return asked if asked.otherwise is None else asked._replace(arguments=asked.otherwise, otherwise=None, encoded=b"")


def parse(lines: Sequence[bytes], index: int, depth: int = 0) -> tuple[Reply, int]:
    """Return the reply that begins with `lines[index]`, and the index behind it, -1 if it needs the full parser: it is
    incomplete, an error, negative or malformed. The last line is incomplete."""
    if index >= len(lines) - 1:
        return None, -1
    line = lines[index]
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest, index + 1
    if not rest.isdigit() or len(rest) > 16:
        return (None, index + 1) if line == b"$-1" else (None, -1)
    number = int(rest)
    if kind == b":":
        return number, index + 1
    if kind == b"$" and index + 1 < len(lines) - 1 and len(lines[index + 1]) == number <= MAX_LINE_BYTES:
        return lines[index + 1], index + 2
    if kind != b"*" or number > MAX_ELEMENTS or depth >= MAX_DEPTH:
        return None, -1
    return _parse_elements(lines, index + 1, number, depth)


def _parse_elements(lines: Sequence[bytes], index: int, number: int, depth: int) -> tuple[Reply, int]:
    """Parse the elements of an array as `parse` does, without a call for short strings and nulls."""
    last = len(lines) - 1
    elements: list[Reply] = []
    for _ in range(number):
        line = lines[index]
        if index + 1 < last and line == _HEADS.get(len(lines[index + 1])):
            elements.append(lines[index + 1])
            index += 2
        elif index < last and line == b"$-1":
            elements.append(None)
            index += 1
        else:
            element, index = parse(lines, index, depth + 1)
            if index < 0:
                return None, -1
            elements.append(element)
    return elements, index


def read_ok(reply: Reply) -> None:
    if reply != b"OK":
        raise FramingError("a write was not answered with OK")


def _read_pong(reply: Reply) -> None:
    if reply != b"PONG":
        raise FramingError("PING was not answered with PONG")


PING = Command(b"", (b"PING",), _read_pong)
ASKING = Command(b"", (b"ASKING",), read_ok, encoded=command(b"ASKING"))
"""Lets the next command reach a slot that the server is importing."""


def within(digits: bytes, highest: int) -> int:
    """Return a length or count. Raises FramingError if it is above `highest`."""
    number = integer(digits)
    if number > highest:
        raise FramingError("an answer exceeds the maximum for its question")
    return number


def integer(digits: bytes) -> int:
    """Return a number that is not negative. Raises FramingError for anything else."""
    if not digits.isdigit() or len(digits) > 16:
        raise FramingError("a reply holds a malformed number")
    return int(digits)


def reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return str(text) or type(error).__name__
