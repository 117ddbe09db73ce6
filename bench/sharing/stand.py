"""The benchmark's processes: a cache server with its gate, tiers and engine; and the contents of Redis."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bench.adapter.stand import ROOT, Redis
from bench.sharing.scopes import Gate
from bench.sharing.trace import CHUNK_TOKENS, PREFIX
from e2e.cluster.progress import ClusterError, Progress
from kvstrata.contract.store.redis_keys import parse_block_key
from tests.dataplane.conftest import tier
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn

SHARED, MEMORY = "shared", "dram"
PREFIX_IDS = tuple(name for name in PREFIX for _ in range(CHUNK_TOKENS))
"""The shared prefix's tokens, as the engine without a model makes them of their chunks' names."""

SETTLE_TIMEOUT_S = 60.0
PATIENT = {
    "io_timeout_ms": 10_000,
    "lookup_deadline_ms": 10_000,
    "load_deadline_ms": 20_000,
    "store_deadline_ms": 60_000,
}
"""Counts must be the same on a busy machine: nothing is given up for being late."""


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of some keyspaces: the names of their chunks, and the bytes of their values."""

    chunks: dict[str, set[bytes]]
    value_bytes: dict[str, int]


def engine_python(progress: Progress) -> Path:
    """Return the interpreter that has the engine and LMCache, installed if need be. Raises ClusterError if it fails."""
    named = os.environ.get("KVSTRATA_ENGINE_PYTHON")
    if named:
        return Path(named)
    with progress.step("the engine for processors and LMCache, as the tests install them"):
        command = [sys.executable, str(ROOT / "tests/dataplane/install_lmcache.py"), "--engine"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"the engine could not be installed:\n{done.stdout[-2000:]}", advice="run it again")
    return ROOT / ".local/venv-engine/bin/python"


class Stand:
    """A cache container's server with one tier, whose memory takes `memory_gb`, and its gate.

    With `backing` the tier is that Redis, and the server's memory is a passage to it; without, it is the memory. Pools
    consist of the tokens `prefix`.
    """

    def __init__(
        self,
        python: Path,
        directory: Path,
        backing: Redis | None,
        *,
        memory_gb: float,
        chunk_tokens: int = CHUNK_TOKENS,
        prefix: Sequence[int] = PREFIX_IDS,
    ) -> None:
        directory.mkdir()
        self.stand_in = GateStandIn(directory)
        self.backing = backing
        name = SHARED if backing else MEMORY
        self.gate = Gate(self.stand_in, name, prefix)
        tiers: list[dict[str, Any] | None] = [None]
        if backing:
            tiers = [tier(backing.port, name, **PATIENT | {"workers": 4})]
        memory = {"tier": None if backing else MEMORY}
        self.server = LMCacheServer(python, directory, self.stand_in, tiers, chunk_tokens, memory, memory_gb=memory_gb)

    def wait_until_ready(self) -> None:
        """Wait for the server and its tier."""
        self.server.wait_until_ready()
        if self.backing:
            until(lambda: self.stand_in.state().tiers[0].breaker == "closed", self.stand_in.state)

    def attach_engine(self, bytes_per_token: int) -> None:
        """Start an engine without a model whose tokens take so many bytes."""
        engine = Path(__file__).with_name("engine.py")
        self.server.attach_engine_stand_in(engine, str(CHUNK_TOKENS), str(bytes_per_token))

    def serve(self, salt: str, prompts: Sequence[Sequence[int]], *, stores: bool = True) -> list[int]:
        """Have the engine serve prompts; return how many chunks of each it found.

        Raises ClusterError if any chunk held something else than it should.
        """
        operation = "serve" if stores else "read"
        answer = self.server.ask_engine(op=operation, salt=salt, prompts=[list(prompt) for prompt in prompts])
        if answer["wrong"]:
            raise ClusterError(f"{answer['wrong']} chunks were served with other content than theirs")
        hits: list[int] = answer["hits"]
        return hits

    def counters(self) -> dict[str, int]:
        """The adapter's counters."""
        return dict(self.stand_in.state().counters)

    def quiet(self) -> None:
        """Wait until the cache server has stored in its tier all that it wants to."""
        controllers: list[dict[str, Any]] = []

        def idle() -> bool:
            controllers[:] = self.server.get("/status")["storage_manager"]["store_controllers"].values()
            return not any(one["pending_keys_count"] or one["in_flight_task_count"] for one in controllers)

        # The last write may be on its way to the controller.
        time.sleep(0.1)
        until(idle, lambda: controllers)

    def in_memory(self) -> tuple[int, int]:
        """Return how many blocks and bytes the cache server itself reports in its memory."""
        (manager,) = self.server.get("/status")["storage_manager"]["l1_managers"].values()
        return manager["total_object_count"], manager["memory_used_bytes"]

    def forget_memory(self) -> None:
        """Empty the cache server's memory, and wait until its blocks are overwritten and free."""

        def empty() -> bool:
            # Not by force: blocks that are still read, as a prompt's are for a moment after it, go a moment later.
            self.server.post("/cache/clear", {"tier": "l1"})
            return self.in_memory() == (0, 0)

        until(empty, self.in_memory)

    def cpu_s(self) -> float:
        """Return the processor seconds that the cache server and its tier took so far."""
        pids = [self.server.process.pid, *([self.backing.pid] if self.backing else [])]
        return sum(time.clock_gettime(_processor_clock(pid)) for pid in pids)

    def stop(self) -> None:
        """End it."""
        self.server.stop()


def _processor_clock(pid: int) -> int:
    # As clock_getcpuclockid(3) returns it: nanoseconds, where /proc counts in hundredths of a second.
    return (~pid << 3) | 2


def until(condition: Callable[[], bool], what: Callable[[], Any]) -> None:
    """Wait for a condition. Raises ClusterError with the result of `what` if it does not come true."""
    give_up_at_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not condition():
        if time.monotonic() > give_up_at_s:
            raise ClusterError(f"it did not settle: {what()}")
        time.sleep(0.02)


def held(server: Redis, keyspaces: frozenset[str]) -> Held:
    """Return the contents of these keyspaces, read from Redis without the product: every key, every value's length."""
    chunks: dict[str, set[bytes]] = {keyspace: set() for keyspace in keyspaces}
    value_bytes = dict.fromkeys(keyspaces, 0)
    with redis.Redis(port=server.port) as admin:
        for names in _batches(admin.scan_iter(count=1000)):
            keys = [parse_block_key(name.decode()) for name in names]
            asked = [(key, name) for key, name in zip(keys, names, strict=True) if key and key.keyspace in chunks]
            pipeline = admin.pipeline(transaction=False)
            for _, name in asked:
                pipeline.strlen(name)
            for (key, _), length in zip(asked, pipeline.execute(), strict=True):
                chunks[key.keyspace].add(key.chunk_hash)
                value_bytes[key.keyspace] += length
    return Held(chunks, value_bytes)


def erase(server: Redis, keyspaces: frozenset[str]) -> None:
    """Remove everything of keyspaces that are used no more, so that runs do not add up in memory."""
    with redis.Redis(port=server.port) as admin:
        for names in _batches(admin.scan_iter(count=1000)):
            gone = [name for name in names if any(keyspace.encode() in name for keyspace in keyspaces)]
            if gone:
                admin.unlink(*gone)


def _batches(names: Iterator[bytes], size: int = 1000) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for name in names:
        batch.append(name)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
