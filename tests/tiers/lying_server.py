"""A server that knows the right answer to everything the adapter asks, and says what a test makes of it.

Each command takes the next of the test's `Lie`s until there are none left; from then on answers are right. Replies go
out in the pieces and with the pauses that a lie names.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.contract.store.redis_scripts import script
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS, slot_of
from tests.tiers.hostile_server import HostileServer

SCRIPTS = {script(name).sha: name for name in ("reserve", "commit", "abandon", "touch", "discard")}
NULL = b"$-1\r\n"


@dataclass(frozen=True)
class Lie:
    """What becomes of one answer: `says` gets the right one, the command and this server's world.

    It comes `late_s` after the question, in pieces of these lengths with a pause between them.
    """

    says: Callable[[bytes, list[bytes], World], bytes]
    pieces: tuple[int, ...] = ()
    pause_s: float = 0.0
    late_s: float = 0.0
    closes: bool = False


@dataclass
class World:
    """What the lying servers of one test have in common."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    received: list[bytes] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    dead_port: int = 1
    lies: list[Lie] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    cut_short: threading.Event = field(default_factory=threading.Event)

    def next_lie(self) -> Lie | None:
        with self.lock:
            return self.lies.pop(0) if self.lies else None


class LyingServer(HostileServer):
    """One server of a world; in a cluster the servers share the slots, half each."""

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(self._lie)
        world.ports.append(self.port)

    def _lie(self, connection: socket.socket, arguments: list[bytes]) -> None:
        right = right_answer(arguments, self._world)
        lie = self._world.next_lie()
        if lie is None:
            connection.sendall(right)
            return
        said = lie.says(right, arguments, self._world)
        self._world.cut_short.wait(lie.late_s)
        start = 0
        for length in (*lie.pieces, len(said)):
            if 0 < start < len(said):
                self._world.cut_short.wait(lie.pause_s)
            connection.sendall(said[start : start + length])
            start += length
        if lie.closes:
            connection.shutdown(socket.SHUT_RDWR)


def right_answer(arguments: list[bytes], world: World) -> bytes:
    """Return what an honest server would answer, about blocks that live for ever."""
    name = arguments[0]
    if name == b"CLUSTER":
        half = SLOTS // len(world.ports)
        ranges = [(n * half, SLOTS - 1 if n == len(world.ports) - 1 else (n + 1) * half - 1) for n in range(2)]
        return _array(
            *(
                _array(
                    b":%d\r\n" % first, b":%d\r\n" % last, _array(bulk(b"127.0.0.1"), b":%d\r\n" % port, bulk(b"id"))
                )
                for (first, last), port in zip(ranges, world.ports, strict=False)
            )
        )
    if name == b"ZMSCORE":
        score = NULL if arguments[1].endswith(b"#k") else b"$13\r\n9000000000000\r\n"
        return _array(*[score] * (len(arguments) - 2))
    if name == b"GET":
        value = world.values.get(arguments[1])
        return NULL if value is None else bulk(value)
    if name == b"SET":
        with world.lock:
            world.received.append(arguments[2])
        return b"+OK\r\n"
    if name in (b"EVALSHA", b"EVAL"):
        which = SCRIPTS.get(arguments[1], "other")
        return {"reserve": _array(bulk(b"ok"), b":0\r\n", b":0\r\n", b":0\r\n", bulk(b"")), "commit": bulk(b"ok")}.get(
            which, b":0\r\n"
        )
    fixed = {
        b"TIME": _array(bulk(str(int(time.time())).encode()), bulk(b"0")),
        b"HMGET": _array(*[NULL] * (len(arguments) - 2)),
        b"ZSCORE": b"$13\r\n9000000000000\r\n",
        b"HGET": bulk(b"1:1700000000000"),
        b"STRLEN": b":0\r\n",
        b"ASKING": b"+OK\r\n",
        b"ZRANGE": _array(),
    }
    return fixed.get(name, b":0\r\n")


def moved(kind: bytes, where: Callable[[World], bytes], slot: int | None = None) -> Callable[..., bytes]:
    """Return a lie that redirects, about the right slot unless another is named."""

    def says(_: bytes, arguments: list[bytes], world: World) -> bytes:
        key = arguments[3] if arguments[0] in (b"EVALSHA", b"EVAL") and len(arguments) > 3 else arguments[-1]
        key = arguments[1] if len(arguments) > 1 and arguments[1].startswith(b"kvs1") else key
        return b"-%b %d %b\r\n" % (kind, slot_of(key) if slot is None else slot, where(world))

    return says


def _array(*parts: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def bulk(value: bytes) -> bytes:
    """Return a string as a server sends it."""
    return b"$%d\r\n%b\r\n" % (len(value), value)
