"""A primary of 3 x (1+1) servers is killed (SIGKILL) while a pod stores and loads by the real adapter.

Until when is everything served again, and which hits are lost? Only hits of blocks that the replica had not read yet
may be lost: its blocks are listed right after the kill. Servers have the node time-out of a tier, the killed one is not
restarted, and the operator's rules, which have nothing to do here, observe the servers.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import Busyness
from bench.result import Figure
from bench.tier.part import Part
from bench.tier.traffic import TRIES, connected_to_all
from e2e.cluster.progress import Progress
from e2e.cluster.rootfs import server_command
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.objects.redis.cluster import NODE_TIMEOUT_MS
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.runtime import acquire, release
from kvstrata_sidecar.adapter.tier.interface import Block
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block
from tests.topology.mover_rig import MoverRig

KEPT = [block(KEYSPACE_A, number) for number in range(256)]
"""Stored long before, and only read."""
BEFORE = [block(KEYSPACE_B, number) for number in range(0, 256, 2)]
AFTER = [block(KEYSPACE_B, number) for number in range(1, 256, 2)]
"""Stored again group after group, until the kill, and from then on."""
GROUP = 16
PAUSE_S = 0.01
TIMEOUT_S = 60.0
SETTLED_S = 1.0
"""How long everything has to be served for the kill to be over."""


async def measure(progress: Progress) -> Part:
    """Form the cluster, kill a primary under traffic, and count."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-killed-")))
        rig = MoverRig(folder / "servers", server_command(), timeout_ms=NODE_TIMEOUT_MS)
        stack.callback(rig.close)
        with progress.step("form a cluster of six servers"):
            rig.start()
            await rig.settled()
        stack.push_async_callback(rig.nodes.close)
        pod = _Pod(folder, str(rig.pod(0, 0).ip), rig.port)
        stack.callback(pod.close)
        await asyncio.to_thread(pod.prepare)
        victim, heir = await rig.primary(0), await rig.replica(0)
        with progress.step("kill a primary and wait until everything is served"), Busyness() as busyness:
            pod.start()
            await pod.served_since(time.monotonic())
            pod.written = AFTER
            killed_s = time.monotonic()
            rig.kill(victim)
            with rig.admin(heir) as client:
                replicated = {name.rpartition(b":")[2] for name in client.scan_iter(count=10_000)}
            leads_s = await asyncio.to_thread(_leads, rig, heir)
            served_s = await pod.served_since(killed_s)
            pod.end()
        lost_kept = await asyncio.to_thread(pod.missing, KEPT)
        acknowledged = [one for one in BEFORE if pod.stored_at_s.get(one.key, killed_s) < killed_s]
        lost_written = await asyncio.to_thread(pod.missing, acknowledged)
    had = [one for one in (*lost_kept, *lost_written) if one.chunk_hash.hex().encode() in replicated]
    return Part(
        figures={
            "killed_until_served": Figure(served_s - killed_s, "s", baseline=NODE_TIMEOUT_MS / 1000),
            "killed_until_heir_leads": Figure(leads_s - killed_s, "s", baseline=NODE_TIMEOUT_MS / 1000),
            "killed_longest_request": Figure(pod.longest_s, "s"),
            "killed_hits_lost": Figure(len(lost_kept) + len(lost_written), "1"),
            "killed_hits_lost_though_replicated": Figure(len(had) + len(lost_kept), "1"),
            "killed_wrong_bytes": Figure(pod.wrong, "1"),
        },
        baseline={"killed_node_timeout": Figure(NODE_TIMEOUT_MS / 1000, "s")},
        ratio=(served_s - killed_s) / (NODE_TIMEOUT_MS / 1000),
        conditions={"killed_blocks_kept": len(KEPT), "killed_blocks_written": len(acknowledged)},
        others_percent=busyness.others_percent,
    )


def _leads(rig: MoverRig, heir: ServerPod) -> float:
    """Return when a server reported that it leads. Raises TimeoutError."""
    give_up_at_s = time.monotonic() + TIMEOUT_S
    with rig.admin(heir) as client:
        while client.info("replication")["role"] != "master":
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"{heir.name} does not lead after {TIMEOUT_S:g} s")
            time.sleep(PAUSE_S)
    return time.monotonic()


@dataclass
class _Pod:
    """A pod that stores and loads by the real adapter. `stored_at_s` is when a store was acknowledged, by block."""

    folder: Path
    host: str
    port: int
    stored_at_s: dict[object, float] = field(default_factory=dict)
    longest_s: float = 0.0
    wrong: int = 0
    written: Sequence[Block] = tuple(BEFORE)

    def __post_init__(self) -> None:
        self._gate = GateStandIn(self.folder)
        tier = TierParams("shared", (Endpoint(self.host, self.port),), cluster=True, workers=2)
        params = AdapterParams(DOMAIN, IDENTITY, tier, self._gate.policy_dir, self._gate.link_dir)
        self._driver = Driver(acquire(params), params, tier)
        self._gate.allow(KEYSPACE_A, KEYSPACE_B)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._bad_at_s = self._good_at_s = 0.0

    def prepare(self) -> None:
        """Store the blocks that are kept."""
        connected_to_all(self._driver)
        for start in range(0, len(KEPT), GROUP):
            group = KEPT[start : start + GROUP]
            if not any(self._stored_again(group) for _ in range(TRIES)):
                raise RuntimeError(f"blocks were not stored: {self._driver.tier.state()}")

    def start(self) -> None:
        """Begin to store and load."""
        self._thread.start()

    async def served_since(self, since_s: float) -> float:
        """Return since when everything was served, once it was for `SETTLED_S`. Raises TimeoutError."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                first_good_s = self._good_at_s
                if first_good_s > max(since_s, self._bad_at_s) and time.monotonic() > first_good_s + SETTLED_S:
                    return first_good_s
                await asyncio.sleep(PAUSE_S)

    def end(self) -> None:
        """Stop storing and loading."""
        self._ended.set()
        self._thread.join()

    def missing(self, blocks: list[Block]) -> list[Block]:
        """The blocks that are not found."""
        found = []
        for start in range(0, len(blocks), GROUP):
            group = blocks[start : start + GROUP]
            found += [one for one, hit in zip(group, self._driver.load(group)[0], strict=True) if not hit]
        return found

    def close(self) -> None:
        """Close the tier."""
        self._ended.set()
        self._driver.tier.close()
        release(self._driver.runtime)

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            groups = [blocks[number * GROUP % len(blocks) :][:GROUP] for blocks in (self.written, KEPT)]
            self._round(*map(list, groups))
            number += 1
            self._ended.wait(PAUSE_S)

    def _round(self, written: list[Block], kept: list[Block]) -> None:
        """Store a group again and load it, and load one that was there."""
        began_s = time.monotonic()
        for one in written:
            self.stored_at_s.pop(one.key, None)
        self._driver.tier.delete(written)
        stored = self._store(written)
        stored_s = time.monotonic()
        hits = sum(self._load(written)) + sum(self._load(kept))
        ended_s = time.monotonic()
        self.longest_s = max(self.longest_s, stored_s - began_s, ended_s - stored_s)
        if stored:
            self.stored_at_s |= {one.key: stored_s for one in written}
        if not stored or hits < len(written) + len(kept):
            self._bad_at_s = ended_s
        elif self._good_at_s <= self._bad_at_s:
            self._good_at_s = ended_s

    def _stored_again(self, blocks: list[Block]) -> bool:
        self._driver.tier.delete(blocks)
        return self._store(blocks)

    def _store(self, blocks: list[Block]) -> bool:
        """Whether all of it was acknowledged."""
        task = self._driver.tier.store(blocks, [memoryview(_content(one)) for one in blocks])
        self._driver.wait(task)
        return self._driver.tier.pop_stores()[task].stored_bytes >= len(blocks) * BLOCK_BYTES

    def _load(self, blocks: list[Block]) -> list[int]:
        hits, buffers = self._driver.load(blocks)
        found = zip(blocks, hits, buffers, strict=True)
        self.wrong += sum(1 for one, hit, buffer in found if hit and buffer != _content(one))
        return hits


def _content(one: Block) -> bytes:
    return f"{one.keyspace[:1]}{one.chunk_hash[0]:03d}".encode() * (BLOCK_BYTES // 4)
