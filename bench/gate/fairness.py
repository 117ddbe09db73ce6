"""Fairness of the gate's CPU: one tenant sends the worst bodies over many connections; others and probes are timed.

The health page is asked in turn with one of an idle server on the gate's core, so that only the gate's part counts.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path

import uvloop

from bench.gate import bodies
from bench.gate.load import HEAD_LENGTH, pin
from bench.result import Figure, percentile

CONNECTIONS = 16
PHASE_S = 20.0
_HOSTILE_NICENESS = 10
"""Callers of the attack share a core with the callers that are timed, and yield to them."""

_INTERVAL_S = 0.01
_MAX_BODY_BYTES = 8 * 2**20
_PAGE = b"GET /livez HTTP/1.1\r\nHost: gate\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Target:
    """The gate, the idle server beside it, and the keys of two tenants."""

    port: int
    health_port: int
    idle_port: int
    pid: int
    log: Path
    key: str
    hostile_key: str


@dataclass(slots=True)
class Times:
    """Seconds until an answer."""

    request_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)


def hostile_bodies() -> list[bytes]:
    """Return bodies that take a parser long: whole ones, those of 64 KiB, and one of patterns; accepted and refused."""

    def numbers(one: bytes, size: int) -> bytes:
        return b'{"prompt": [' + one + (b"," + one) * min((size - 20) // (len(one) + 1), 990_000) + b"]}"

    def quotes(size: int) -> bytes:
        return b'{"prompt":"' + b'\\"' * ((size - 20) // 2) + b'"}'

    def keys(size: int) -> bytes:
        count = min((size - 60) // 14, 49_000)
        return b'{"prompt": "a","logit_bias":{' + b",".join(b'"%d": 1' % n for n in range(count)) + b',"1":1}}'

    sizes = (_MAX_BODY_BYTES, 64 * 1024)
    made = [make(size) for size in sizes for make in (quotes, keys)]
    made += [numbers(one, size) for size in sizes for one in (b"1.1e1", b"1234567")]
    made += [b"[" * size for size in sizes] + [
        b'{"prompt": "' + b"\\u00e9" * (size // 6 - 10) + b'"}' for size in sizes
    ]
    patterns = (b"%02d" % n + b"(a{1}b)" * 145 for n in range(9))
    schema = b'{"items":[' + b",".join(b'{"pattern":"%b"}' % pattern for pattern in patterns) + b"]}"
    return [*made, b'{"prompt":"a","structured_outputs":{"json":' + schema + b"}}"]


async def measure(target: Target, core: int, phase_s: float = PHASE_S) -> dict[str, Figure]:
    """Time a quiet phase, then one under attack. Both load generators run on `core`."""
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=pin, initargs=(core,)) as pool:
        run = partial(loop.run_in_executor, pool)
        quiet = await run(timed, target, phase_s)
        os.kill(target.pid, signal.SIGUSR1)
        attack = run(attacked, target, phase_s + 2)
        await asyncio.sleep(1.0)
        hostile = await run(timed, target, phase_s)
        answered = await attack
    pauses = [json.loads(line)["loop_pause_ms"] for line in target.log.read_text().splitlines() if "loop_pause" in line]
    return figures(quiet, hostile, answered, max(pauses, default=0.0))


def figures(quiet: Times, hostile: Times, answered: Mapping[int, int], pause_ms: float) -> dict[str, Figure]:
    before_ms, after_ms = (percentile(times.request_s, 99) * 1000 for times in (quiet, hostile))
    health_ms, idle_ms = (percentile(times, 99) * 1000 for times in (hostile.health_s, hostile.idle_s))
    return {
        "gate_loop_pause_cpu": Figure(pause_ms, "ms"),
        "gate_health_added_p99": Figure(health_ms - idle_ms, "ms"),
        "gate_other_tenant_quiet_p99": Figure(before_ms, "ms"),
        "gate_other_tenant_p99": Figure(after_ms, "ms"),
        "gate_other_tenant_over_twice_p99": Figure(after_ms - 2 * before_ms, "ms"),
        "gate_hostile_refused": Figure(sum(answered.values()) - answered.get(200, 0), "requests"),
        "gate_hostile_parsed": Figure(
            sum(count for status, count in answered.items() if status in (200, 400)), "requests"
        ),
    }


def timed(target: Target, seconds: float) -> Times:
    """Send chats of 8 kB of one tenant, and ask both pages, in turn."""
    return uvloop.run(_timed(target, seconds))


async def _timed(target: Target, seconds: float) -> Times:
    times = Times()
    chat = bodies.post(bodies.chat(8000), target.key)
    until_s = time.monotonic() + seconds
    turns = cycle(((target.port, chat, times.request_s), (target.health_port, _PAGE, times.health_s),
                   (target.idle_port, _PAGE, times.idle_s)))  # fmt: skip
    while time.monotonic() < until_s:
        port, request, samples = next(turns)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun_s = time.monotonic()
        writer.write(request)
        status = await _answer(reader)
        samples.append(time.monotonic() - begun_s)
        writer.close()
        if status != 200:
            raise ValueError(f"port {port} answers {status}")
        await asyncio.sleep(_INTERVAL_S)
    return times


def attacked(target: Target, seconds: float) -> dict[int, int]:
    """Send hostile bodies over all connections; return the number of answers by status, 0 for a closed connection."""
    os.nice(_HOSTILE_NICENESS)
    return uvloop.run(_attack(target, seconds))


async def _attack(target: Target, seconds: float) -> dict[int, int]:
    answered: dict[int, int] = {}
    made = hostile_bodies()
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(_attacker(target, made[n % len(made) :] + made[: n % len(made)], until_s, answered)
                           for n in range(CONNECTIONS)))  # fmt: skip
    return answered


async def _attacker(target: Target, made: list[bytes], until_s: float, answered: dict[int, int]) -> None:
    for body in cycle(made):
        status = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            writer.write(bodies.head(target.hostile_key, len(body), "/v1/completions") + body)
            status = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError):
            pass  # refused while it sent
        writer.transport.abort()
        answered[status] = answered.get(status, 0) + 1
        if time.monotonic() > until_s:
            return


async def _answer(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    found = HEAD_LENGTH.search(head)
    await reader.readexactly(int(found[1]) if found else 0)
    return int(head.split(b" ", 2)[1])
