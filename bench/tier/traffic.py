"""A process that stores and loads blocks of a cluster by the real adapter, as one pod's cache server does.

python -m bench.tier.traffic DIRECTORY
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.adapter.answers import serve
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.runtime import acquire
from kvstrata_sidecar.adapter.tier.interface import Block
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY, KEYSPACE_A, GateStandIn
from tests.tiers.tier_driver import Driver

BYTES_AT_ONCE = 16 << 20
"""How much one request stores or loads."""
STORE_EVERY = 4
"""Of so many requests one deletes blocks and stores them again, the others look up and load."""
TRIES = 20
"""On a machine that is very busy an answer of a server may come too late now and then."""
PRIMARIES = 3
CONNECT_TIMEOUT_S = 30.0
SLACK_S = 1.0
"""Time that an answer may take beyond its deadline, on a busy machine."""


class Traffic:
    """Answers questions until standard input ends."""

    def __init__(self, directory: Path) -> None:
        self._gate = GateStandIn(directory)
        self._blocks: list[Block] = []
        self._size = self._at_once = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._counts: dict[str, Any] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one question."""
        operation = {"open": self._open, "fill": self._fill, "capacity": self._capacity}
        return (operation | {"begin": self._begin, "end": self._end})[question.pop("op")](**question)

    def _open(self, host: str, port: int) -> dict[str, Any]:
        """Use the cluster that a server belongs to."""
        tier = TierParams("shared", (Endpoint(host, port),), cluster=True, workers=2)
        self._limits = {
            "lookup": tier.lookup_deadline_ms,
            "load": tier.load_deadline_ms,
            "store": tier.store_deadline_ms,
        }
        params = AdapterParams(DOMAIN, IDENTITY, tier, self._gate.policy_dir, self._gate.link_dir)
        self._driver = Driver(acquire(params), params, tier)
        self._gate.allow(KEYSPACE_A)
        connected_to_all(self._driver)
        return {}

    def _fill(self, total: int, size: int) -> dict[str, Any]:
        """Store `total` bytes in blocks of `size`."""
        self._blocks = [_block(number) for number in range(total // size)]
        self._size, self._at_once = size, max(1, BYTES_AT_ONCE // size)
        self._buffers = [bytearray(size) for _ in range(self._at_once)]
        for number in range(len(self._blocks) // self._at_once):
            if not any(self._stored_again(self._some(number)) for _ in range(TRIES)):
                raise RuntimeError(f"not all was stored: {self._driver.tier.state()}")
        return {"blocks": len(self._blocks)}

    def _capacity(self, for_s: float) -> dict[str, Any]:
        """Return how many requests a second there are at the most."""
        began_s, number = time.monotonic(), 0
        while time.monotonic() - began_s < for_s:
            self._request(number)
            number += 1
        return {"per_second": number / (time.monotonic() - began_s)}

    def _begin(self, per_second: float) -> dict[str, Any]:
        """Make so many requests a second until the command `end`."""
        self._ended.clear()
        self._counts = {"requests": 0, "asked": 0, "missed": 0, "late": 0, "wrong": 0, "problem": "", "longest_s": 0.0}
        self._thread = threading.Thread(target=self._run, args=[1 / per_second], daemon=True)
        self._thread.start()
        return {}

    def _end(self) -> dict[str, Any]:
        """Return the outcome of the requests; `errors` are the adapter's own, which no caller sees."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        return {**self._counts, "errors": self._driver.tier.state().errors}

    def _run(self, every_s: float) -> None:
        number, due_s = 0, time.monotonic()
        try:
            while not self._ended.wait(max(0.0, due_s - time.monotonic())):
                self._request(number)
                number += 1
                due_s = max(due_s + every_s, time.monotonic() - every_s)
        except Exception as problem:
            self._counts["problem"] = f"{type(problem).__name__}: {problem}"

    def _request(self, number: int) -> None:
        some = self._some(number * 7)
        if number % STORE_EVERY == 0:
            self._driver.tier.delete(some)
            self._timed("store", lambda: self._store(some))
            return
        self._timed("lookup", lambda: self._driver.lookup(some))
        hits = self._timed("load", lambda: self._load(some))
        if self._counts:
            self._counts["asked"] += len(some)
            self._counts["missed"] += len(some) - sum(hits)

    def _timed(self, what: str, do: Any) -> Any:
        began_s = time.monotonic()
        result = do()
        took_s = time.monotonic() - began_s
        if self._counts:
            self._counts["requests"] += 1
            self._counts["longest_s"] = max(self._counts["longest_s"], took_s)
            self._counts["late"] += took_s > self._limits[what] / 1000 + SLACK_S
        return result

    def _some(self, number: int) -> list[Block]:
        start = number * self._at_once % len(self._blocks)
        return self._blocks[start : start + self._at_once]

    def _stored_again(self, blocks: list[Block]) -> bool:
        self._driver.tier.delete(blocks)
        return self._store(blocks)

    def _store(self, blocks: list[Block]) -> bool:
        for one, buffer in zip(blocks, self._buffers, strict=False):
            buffer[:32] = buffer[-32:] = one.chunk_hash
        tier = self._driver.tier
        task = tier.store(blocks, [memoryview(buffer) for buffer in self._buffers[: len(blocks)]])
        self._driver.wait(task)
        return tier.pop_stores()[task].stored_bytes >= len(blocks) * self._size

    def _load(self, blocks: list[Block]) -> list[int]:
        tier = self._driver.tier
        task = tier.load(blocks, [memoryview(buffer) for buffer in self._buffers[: len(blocks)]])
        self._driver.wait(task)
        hits = list(tier.pop_found(task) or [0] * len(blocks))
        for one, hit, buffer in zip(blocks, hits, self._buffers, strict=False):
            if hit and not buffer[:32] == buffer[-32:] == one.chunk_hash and self._counts:
                self._counts["wrong"] += 1
        return hits


def connected_to_all(driver: Driver) -> None:
    """Wait until the adapter has a connection to every primary. Raises TimeoutError."""
    driver.until("closed")
    give_up_at_s = time.monotonic() + CONNECT_TIMEOUT_S
    while (state := driver.tier.state()).nodes < PRIMARIES or state.nodes_away:
        if time.monotonic() > give_up_at_s:
            raise TimeoutError(f"not all servers are reached: {state}")
        time.sleep(0.01)


def _block(number: int) -> Block:
    digest = hashlib.sha256(str(number).encode()).digest()
    return Block(("key", KEYSPACE_A, number), KEYSPACE_A, 0x01000100, 0, digest, FINGERPRINT)


if __name__ == "__main__":
    serve(Traffic(Path(sys.argv[1])).answer)
