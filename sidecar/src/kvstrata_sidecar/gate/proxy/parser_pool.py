"""Shares the CPU of parsing between tenants.

Parsers hold the interpreter's lock, so a large body would stop the event loop even from a thread: it is parsed by one
of a few processes (`parsing`). Each tenant has one body in work at a time, and tenants take turns. All parsing is
charged to its tenant, at an estimate before and at the CPU time that it took after.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import orjson

from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import parsing
from kvstrata_sidecar.gate.proxy.bodies import Endpoint
from kvstrata_sidecar.gate.proxy.parsing import ParsedBody

INLINE_BYTES = 64 * 1024
"""Bodies up to this size may be parsed on the loop: most take 4 ms at worst, schemas full of patterns 12 ms."""

INLINE_S = 0.005
"""CPU time beyond its refill with which a tenant is parsed on the loop: it stops it for this and one more body."""

BURST_S = 1.0
"""CPU time that a tenant may use at once: 25 bodies of 8 MiB of text, or two of the worst."""

REFILL = 0.5
"""CPU seconds that a tenant gets back each second: 500 chats of 200 kB, or 12,000 of 8 kB."""

ESTIMATE_S_PER_BYTE = 20e-9
"""Charge before parsing. Text takes 5 ns a byte, the worst bodies of 8 MiB 60 ns."""

WORKERS = 2
"""With one body of a tenant in work, the second process is free for others."""

MAX_BODY_S = 60.0
"""Elapsed time for one body, the start of its process included; a busy node may take long for a little CPU time."""

_WORKER_BYTES = 32 * 1024 * 1024
_WORKER_BYTES_PER_BODY_BYTE = 48
"""Address space for data of a process, in which orjson reserves far more than it touches. Resident, the worst bodies of
8 MiB need 110 MiB; two of them, 64 MiB of bodies, the policy volume and the gate itself fit into the gate's limit."""


@dataclass(eq=False)
class CpuShares:
    """CPU time of parsing by tenant, as token buckets: seconds that were not refilled at a time."""

    clock: Callable[[], float]
    _used: dict[str, tuple[float, float]] = field(default_factory=dict)

    def used_s(self, tenant: str) -> float:
        used_s, at = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used_s - (self.clock() - at) * REFILL)

    def require(self, tenant: str, more_s: float = 0.0) -> None:
        """Raise Refusal (429) unless `more_s` fit; a single body always fits into an unused share."""
        excess_s = self.used_s(tenant) + min(more_s, BURST_S) - BURST_S
        if excess_s > 0:
            raise Refusal(
                429, Reason.PARSING, "parsing this tenant's requests takes too much CPU time of this replica: send "
                "fewer, smaller or simpler bodies", retry_after_s=math.ceil(excess_s / REFILL),
            )  # fmt: skip

    def charge(self, tenant: str, seconds: float) -> None:
        """Add CPU seconds to the use of a tenant; a negative number corrects an estimate."""
        self._used[tenant] = (max(0.0, self.used_s(tenant) + seconds), self.clock())


class ParserError(Exception):
    """A parser process ended or did not answer in time."""


class _Worker:
    """One parser process and the gate's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self.process = process
        self.used_up = False  # whether it is to be replaced
        self._socket = end
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def start(cls, model: str, memory_bytes: int) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                # Popen uses vfork, where the loop's own call would copy the page tables of this process.
                process = await asyncio.to_thread(
                    subprocess.Popen,
                    [sys.executable, "-P", "-m", parsing.__name__, str(theirs.fileno()), model, str(memory_bytes)],
                    pass_fds=[theirs.fileno()], env={"PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a traceback may quote a request
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def parse(self, endpoint: Endpoint, body: bytearray) -> tuple[float, ParsedBody | Refusal]:
        """Return the CPU seconds that it took, and the result. Raises ParserError."""
        try:
            async with asyncio.timeout(MAX_BODY_S):
                head = parsing.REQUEST.pack(len(body), parsing.ENDPOINTS.index(endpoint))
                await self._loop.sock_sendall(self._socket, head)
                await self._loop.sock_sendall(self._socket, body)
                facts_bytes, payload_bytes = parsing.REPLY.unpack(await self._receive(parsing.REPLY.size))
                facts = orjson.loads(await self._receive(facts_bytes))
                payload = await self._receive(payload_bytes)
                self.used_up = facts["used_up"]
        except (OSError, TimeoutError) as error:
            raise ParserError(type(error).__name__) from None
        try:
            return facts["cpu_s"], parsing.parsed_reply(facts, payload)
        except Refusal as refusal:
            return facts["cpu_s"], refusal

    async def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = await self._loop.sock_recv_into(self._socket, view)
            if not received:
                raise ParserError("the process ended")
            view = view[received:]
        return data

    async def stop(self) -> None:
        self._socket.close()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    endpoint: Endpoint
    body: bytearray
    result: asyncio.Future[ParsedBody]


class ParserPool:
    """Parses bodies for one model, on the loop or in processes that start when they are needed."""

    def __init__(self, model: str, max_body_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.shares = CpuShares(loop.time)
        self._inline = CpuShares(loop.time)  # the part of it that was used on the loop
        self._model = model
        self._memory_bytes = _WORKER_BYTES + _WORKER_BYTES_PER_BODY_BYTE * max_body_bytes
        self._loop = loop
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, in the order of their turns
        self._in_work: set[str] = set()
        self._idle: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def parse(self, tenant: str, endpoint: Endpoint, body: bytearray) -> ParsedBody | asyncio.Future[ParsedBody]:
        """Parse a small body at once; return a future for others, to be cancelled if its result is not needed. Raises
        Refusal, as the future does, for a body that is not accepted, and if the tenant's share is used up."""
        estimate_s = len(body) * ESTIMATE_S_PER_BYTE
        self.shares.require(tenant, estimate_s)
        self.shares.charge(tenant, estimate_s)
        if len(body) > INLINE_BYTES or self._inline.used_s(tenant) > INLINE_S:
            return self._enqueue(tenant, _Job(endpoint, body, self._loop.create_future()))
        begun_s = time.thread_time()
        try:
            return parsing.parse(endpoint, self._model, body)
        finally:
            took_s = time.thread_time() - begun_s
            self._inline.charge(tenant, took_s)
            self.shares.charge(tenant, took_s - estimate_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(worker.stop() for worker in self._idle), return_exceptions=True)

    def _enqueue(self, tenant: str, job: _Job) -> asyncio.Future[ParsedBody]:
        self._waiting.setdefault(tenant, deque()).append(job)
        job.result.add_done_callback(partial(self._forget, tenant, job))
        self._assign()
        return job.result

    def _forget(self, tenant: str, job: _Job, _: asyncio.Future[ParsedBody]) -> None:
        """Remove a cancelled job that still waits, and with it its body."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[tenant]

    def _assign(self) -> None:
        free = [tenant for tenant in self._waiting if tenant not in self._in_work]
        for tenant in free[: WORKERS - len(self._in_work)]:
            jobs = self._waiting[tenant]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[tenant]
            self._in_work.add(tenant)
            task = self._loop.create_task(self._work(tenant, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, tenant: str, job: _Job) -> None:
        worker: _Worker | None = None
        try:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._model, self._memory_bytes)
            took_s, result = await worker.parse(job.endpoint, job.body)
            self.shares.charge(tenant, took_s - len(job.body) * ESTIMATE_S_PER_BYTE)
            if not worker.used_up:
                self._idle.append(worker)
                worker = None
        except (OSError, ParserError) as error:
            if worker is not None:
                self.shares.charge(tenant, parsing.MAX_BODY_CPU_S)
            log.warning("a body was not parsed", error=type(error).__name__, problem=str(error))
            result = Refusal(503, Reason.PARSING, "the body could not be parsed", retry_after_s=1)
        except asyncio.CancelledError:
            job.result.cancel()
            raise
        finally:
            self._in_work.discard(tenant)
            if worker is not None:
                await worker.stop()
        if (jobs := self._waiting.pop(tenant, None)) is not None:
            self._waiting[tenant] = jobs  # behind the others
        if not job.result.done():
            if isinstance(result, Refusal):
                job.result.set_exception(result)
            else:
                job.result.set_result(result)
        self._assign()
