"""Waits for a file tier's answers as LMCache does, with blocks in page-aligned memory, without LMCache."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.contract.messages.erase import Amount
from kvstrata.contract.store.block_file import ROOT, file_bytes, file_name, key_of
from kvstrata.contract.store.redis_keys import resolved
from kvstrata_sidecar.adapter.files.disk import Clocks, Disk, boottime_s
from kvstrata_sidecar.adapter.files.erase import FileEraser
from kvstrata_sidecar.adapter.files.tier import FileTier
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.runtime import acquire, release
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome, Task
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY, KEYSPACE_A, GateStandIn

DEADLINE_MS = 60_000
"""Nothing is given up that a test counts on, on a busy machine too; `outlast_deadlines` lets it be."""

BLOCK_BYTES = 64 * 1024
FILE_BYTES = file_bytes(BLOCK_BYTES)
RANK = 0x01000100


def block(keyspace: str = KEYSPACE_A, number: int = 1) -> Block:
    return Block(("key", keyspace, number), keyspace, RANK, 0, number.to_bytes(4, "big") * 8, FINGERPRINT)


def blocks(keyspace: str, *numbers: int) -> list[Block]:
    return [block(keyspace, number) for number in numbers]


def content(one: Block) -> bytes:
    """Return bytes that no other block has, each page of them different."""
    return hashlib.shake_128(one.chunk_hash).digest(BLOCK_BYTES)


def aligned(length: int, fill: int = 0) -> memoryview:
    """Return page-aligned memory, as LMCache's is."""
    memory = mmap.mmap(-1, max(length, 1))
    memory.write(bytes([fill]) * length)
    return memoryview(memory)[:length]


def file_of(directory: Path, one: Block, *, encrypted: bool = False) -> Path:
    """Return where a block's file is."""
    key = key_of(one.keyspace, resolved(IDENTITY, one.fingerprint), one.rank, one.group, one.chunk_hash)
    return directory / ROOT / one.keyspace / file_name(key, encrypted=encrypted)


def files_in(directory: Path) -> list[Path]:
    """Return all files below the directories of keyspaces, temporary ones too. Directories may go meanwhile."""
    return sorted(Path(folder, name) for folder, _, names in os.walk(directory / ROOT) for name in names)


def on_disk_bytes(directory: Path) -> int:
    total = 0
    for path in files_in(directory):
        with suppress(FileNotFoundError):  # it went meanwhile
            total += path.stat().st_size
    return total


class FileDriver:
    """A file tier under a runtime of its own gate; calls return the answers that LMCache would get.

    Time is the machine's and `ahead_s`, which `let_pass` adds to.
    """

    def __init__(self, gate: GateStandIn, directory: Path, *, disk: Disk | None = None, **options: Any) -> None:
        settings: dict[str, Any] = {"capacity_bytes": 64 << 20, "max_blocks": 4096, "free_floor_percent": 0}
        settings |= {"load_deadline_ms": DEADLINE_MS, "store_deadline_ms": DEADLINE_MS}
        self.ahead_s = 0.0
        guarded: Callable[[], bool] = options.pop("guarded", lambda: False)
        identity = options.pop("identity", IDENTITY)
        tier = FileTierParams("disk", directory, **settings | options)
        params = AdapterParams(DOMAIN, identity, tier, gate.policy_dir, gate.link_dir)
        self.directory = directory
        self.runtime = acquire(params)
        self._answers: queue.Queue[Task] = queue.Queue()
        self._early: set[int] = set()
        self.tier = FileTier(
            params,
            tier,
            self.runtime.enforcement,
            self._answers.put,
            spans=self.runtime.spans,
            guarded=guarded,
            clocks=Clocks(now_s=lambda: boottime_s() + self.ahead_s),
            clock=lambda: time.monotonic() + self.ahead_s,
            disk=disk,
        )
        self.runtime.add(self.tier)

    def close(self) -> None:
        self.runtime.remove(self.tier)
        self.tier.close()
        # What it leaves of the directory is its housekeeper's last work, for which the tier waits only briefly.
        self.tier._housekeeper.join(60)
        release(self.runtime)

    def let_pass(self, seconds: float) -> None:
        """Let time pass at once, for ages and for deadlines."""
        self.ahead_s += seconds
        self.tier._io_threads.wake_by(0.0)
        self.tier._housekeeper.wake()

    def outlast_deadlines(self) -> None:
        """Let as much time pass as the disk has for what is under way."""
        self.let_pass(DEADLINE_MS / 1000 + 1)

    def store(self, wanted: list[Block], fill: int = 1, size: int = BLOCK_BYTES) -> StoreOutcome:
        return self._store(wanted, [aligned(size, fill) for _ in wanted])

    def store_content(self, wanted: list[Block]) -> StoreOutcome:
        """Store each block with its `content`."""
        views = [aligned(BLOCK_BYTES) for _ in wanted]
        for one, view in zip(wanted, views, strict=True):
            view[:] = content(one)
        return self._store(wanted, views)

    def lookup(self, wanted: list[Block]) -> list[int]:
        return self._found(self.tier.lookup(wanted))

    def load(self, wanted: list[Block], size: int = BLOCK_BYTES) -> tuple[list[int], list[memoryview]]:
        views = [aligned(size, 0xEE) for _ in wanted]
        return self._found(self.tier.load(wanted, views)), views

    def load_content(self, wanted: list[Block]) -> list[int]:
        """Load blocks that `store_content` stored. Raises AssertionError for a hit with other bytes."""
        hits, views = self.load(wanted)
        wrong = [
            one.chunk_hash for one, hit, view in zip(wanted, hits, views, strict=True) if hit and view != content(one)
        ]
        assert not wrong, "other bytes are loaded than were stored"
        return hits

    def until(self, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        give_up_at_s = time.monotonic() + timeout_s
        while not ready():
            assert time.monotonic() < give_up_at_s, self.tier.state()
            time.sleep(0.01)

    def until_ready(self) -> None:
        """Wait until the directory has been read and blocks are stored."""
        self.until(lambda: self.tier.state().breaker == "closed" and not self.tier.state().recovering)

    def refused(self, reason: str) -> int:
        return self.tier.counters().get(f"refused_{reason}", 0)

    def wait(self, task_id: int, timeout_s: float = 60.0) -> None:
        give_up_at_s = time.monotonic() + timeout_s
        while task_id not in self._early:
            self._early.add(self._answers.get(timeout=max(0.01, give_up_at_s - time.monotonic())).task_id)
        self._early.discard(task_id)

    def _store(self, wanted: list[Block], views: list[memoryview]) -> StoreOutcome:
        task_id = self.tier.store(wanted, views)
        self.wait(task_id)
        return self.tier.pop_stores()[task_id]

    def _found(self, task_id: int) -> list[int]:
        self.wait(task_id)
        found = self.tier.pop_found(task_id)
        assert found is not None
        return list(found)


class Purged(NamedTuple):
    gone: Amount
    held_blocks: int
    residue: str


def purge(
    eraser: FileEraser, keyspaces: Collection[str], timeout_s: float = 60.0, wait_s: float = 0.5
) -> Purged | None:
    """Remove all blocks of these keyspaces, as an erasure does, and wait for those in use; None if it takes longer."""
    found = eraser._within(timeout_s, lambda: eraser._purge(frozenset(keyspaces), wait_s))
    held = eraser._files.index.condemned(keyspaces)
    gone = sum((eraser._tallies.get(keyspace, Amount()) for keyspace in keyspaces), Amount())
    return None if found is None else Purged(gone, len(held), found.residue)
