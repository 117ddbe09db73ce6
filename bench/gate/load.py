"""The load generator: one block of requests against one address, timed, with the CPU time of one process around it."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from dataclasses import dataclass, field
from functools import partial

import uvloop

from bench.gate.processes import cpu_s

BLOCK_TIMEOUT_S = 240.0
HEAD_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_EVENT = re.compile(rb"@(\d{20})")
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Block:
    """What to send: `requests` times the bytes `request` to `port`, over `connections` connections at once.

    `pid` is the process whose CPU time is taken, 0 for none. Connections start `stagger_s` apart. With `authority`, a
    file, the connections use TLS.
    """

    port: int
    request: bytes
    requests: int
    connections: int
    pid: int = 0
    stagger_s: float = 0.0
    authority: str = ""


@dataclass(slots=True)
class Sample:
    """Times of a block's requests, in seconds. `first_s` and `event_s` are empty unless the answers are streams.

    `first_s` is from the request to the first event; `event_s` from the engine's write of an event to its arrival.
    """

    requests: int = 0
    events: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    request_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    event_s: list[float] = field(default_factory=list)


class LoadError(Exception):
    """An answer was not the one that the engine gives."""


class _Caller(asyncio.Protocol):
    """One connection that sends its requests one after another."""

    def __init__(self, block: Block, share: int, sample: Sample) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._request = block.request
        self._left = share
        self._sample = sample
        self._transport: asyncio.Transport | None = None
        self._sent_ns = 0
        self._data = b""
        self._length = 0
        """Bytes of the whole answer; 0 before its head, -1 for a stream, -2 after a stream's first event."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(LoadError(f"the connection was closed ({exc})"))

    def send(self) -> None:
        """Send the next request, or finish."""
        assert self._transport is not None  # noqa: S101
        if not self._left:
            if not self.done.done():
                self.done.set_result(None)
            self._transport.close()
            return
        self._left -= 1
        self._data, self._length = b"", 0
        self._sent_ns = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self._data += data
        if not self._length and not self._head():
            return
        if self._length < 0:
            self._events(now_ns)
            if not self._data.endswith(_END):
                return
        elif len(self._data) < self._length:
            return
        self._sample.requests += 1
        self._sample.request_s.append((now_ns - self._sent_ns) / 1e9)
        self.send()

    def _head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        if not self._data.startswith(b"HTTP/1.1 200 "):
            self.done.set_exception(LoadError(self._data[:1000].decode(errors="replace")))
            assert self._transport is not None  # noqa: S101
            self._transport.abort()
            return False
        found = HEAD_LENGTH.search(self._data, 0, end + 2)
        self._length = int(found[1]) + end + 4 if found else -1
        if not found:
            self._data = self._data[end + 4 :]
        return True

    def _events(self, now_ns: int) -> None:
        end = 0
        for match in _EVENT.finditer(self._data):
            if self._length == -1:
                self._length = -2
                self._sample.first_s.append((now_ns - self._sent_ns) / 1e9)
            self._sample.events += 1
            self._sample.event_s.append((now_ns - int(match[1])) / 1e9)
            end = match.end()
        self._data = self._data[end:]


async def _run(block: Block) -> Sample:
    loop = asyncio.get_running_loop()
    sample = Sample()
    context = ssl.create_default_context(cafile=block.authority) if block.authority else None
    callers = []
    for number in range(block.connections):
        share = block.requests // block.connections + (number < block.requests % block.connections)
        _, caller = await loop.create_connection(
            partial(_Caller, block, share, sample), "127.0.0.1", block.port, ssl=context,
            server_hostname="localhost" if context else None,
        )  # fmt: skip
        callers.append(caller)
    cpu_before, wall_before = cpu_s(block.pid) if block.pid else 0.0, time.monotonic()
    for number, caller in enumerate(callers):
        loop.call_later(number * block.stagger_s, caller.send)
    async with asyncio.timeout(BLOCK_TIMEOUT_S):
        await asyncio.gather(*(caller.done for caller in callers))
    sample.wall_s = time.monotonic() - wall_before
    sample.cpu_s = cpu_s(block.pid) - cpu_before if block.pid else 0.0
    return sample


def run(block: Block) -> Sample:
    """Send a block and return its times. Raises LoadError for a wrong answer, TimeoutError for none."""
    return uvloop.run(_run(block))


def pin(core: int) -> None:
    """Keep the calling process on one core."""
    os.sched_setaffinity(0, {core})
