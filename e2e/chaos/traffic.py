"""A pod that reads from the tier and one that writes, by the real adapter; every request is held to its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstrata.objects.redis.users import DATA_USER
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams, TlsParams
from kvstrata_sidecar.adapter.runtime import acquire, release
from kvstrata_sidecar.adapter.tier.interface import Block
from tests.tiers.certificates import Certificates
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

KEPT = [block(keyspace, number) for number in range(0, 256, 8) for keyspace in (KEYSPACE_A, KEYSPACE_B)]
"""Stored where they are missing, and asked for by the reader."""
RENEWED = [block(keyspace, number) for number in range(1, 256, 8) for keyspace in (KEYSPACE_A, KEYSPACE_B)]
"""Deleted and stored again, all the time."""
GROUPS = 8
"""A request has every eighth block: some on each server."""

LOOKUP_MS, LOAD_MS, STORE_MS = 250, 1500, 3000
WINDOW_MS = 2000
"""How long a block of an interrupted store may be missing."""
SLACK_S = 1.0
"""Time that a request may take beyond its deadline, besides the delay that the machine demonstrably caused."""
TICK_S = 0.02
REST_S = 0.02


class Starvation:
    """How long threads of this process were not given their turn: a sleeper's lateness, in seconds, since the start."""

    def __init__(self) -> None:
        self.total_s = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            time.sleep(TICK_S)
            self.total_s += max(0.0, time.monotonic() - began_s - TICK_S - 0.005)


class Traffic:
    """The two pods. `problems` are requests that came too late, bytes that are another block's, and defects."""

    def __init__(self, directory: Path, hosts: Sequence[str], port: int, tls: Certificates | None = None) -> None:
        self.problems: list[str] = []
        self.slowest_s: dict[str, float] = {}
        self.requests = 0
        self.hits = self.misses = 0
        self.whole_since_s = 0.0
        self._ended = threading.Event()
        self._starvation = Starvation()
        self._gate = GateStandIn(directory)
        password = directory / "password"
        password.write_text(DATA_USER)
        tier = TierParams(
            "shared",
            tuple(Endpoint(host, port) for host in hosts),
            cluster=True,
            username=DATA_USER,
            password_file=str(password),
            tls=TlsParams(str(tls.ca)) if tls is not None else None,
            workers=2,
            io_timeout_ms=400,
            lookup_deadline_ms=LOOKUP_MS,
            load_deadline_ms=LOAD_MS,
            store_deadline_ms=STORE_MS,
        )
        params = AdapterParams(DOMAIN, IDENTITY, tier, self._gate.policy_dir, self._gate.link_dir)
        self._reader, self._writer = (Driver(acquire(params), params, tier, window_ms=WINDOW_MS) for _ in range(2))
        self._gate.allow(KEYSPACE_A, KEYSPACE_B)
        self._threads = [
            threading.Thread(target=self._run, args=[work], daemon=True) for work in (self._read, self._write)
        ]

    def start(self) -> None:
        """Begin; continues until `close`."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both pods."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for driver in (self._reader, self._writer):
            driver.tier.close()
            release(driver.runtime)

    def keep_fresh(self) -> None:
        """Renew the freshness limit of the pods' policy."""
        self._gate.write_freshness()

    def states(self) -> str:
        """The tier's state in both pods."""
        return f"reader {self._reader.tier.state()}\nwriter {self._writer.tier.state()}"

    def _run(self, work: Callable[[int], None]) -> None:
        number = 0
        try:
            while not self._ended.is_set():
                work(number)
                number += 1
                time.sleep(REST_S)
        except BaseException as problem:
            self.problems.append(f"{work.__name__}: {problem!r}")

    def _read(self, number: int) -> None:
        """Ask for the kept blocks, group by group; record since when none of them was missed."""
        began_s, missed = time.monotonic(), 0
        for start in range(GROUPS):
            some = KEPT[start::GROUPS]
            with self._timed("lookup", LOOKUP_MS):
                self._reader.lookup(some)
            hits = self._load(self._reader, some)
            missed += len(some) - hits
            self._load(self._reader, RENEWED[number % GROUPS :: GROUPS])
            time.sleep(REST_S)
        self.hits += len(KEPT) - missed
        self.misses += missed
        if missed == 0:
            self.whole_since_s = began_s

    def _write(self, number: int) -> None:
        some = RENEWED[number % GROUPS :: GROUPS]
        with self._timed("delete", LOAD_MS):
            self._writer.tier.delete(some)
        self._store(some)
        kept = KEPT[number % GROUPS :: GROUPS]
        with self._timed("lookup", LOOKUP_MS):
            found = self._writer.lookup(kept)
        self._store([one for one, hit in zip(kept, found, strict=True) if not hit])

    def _store(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        views = [memoryview(_bytes(one)) for one in blocks]
        with self._timed("store", STORE_MS):
            task = self._writer.tier.store(list(blocks), views)
            self._writer.wait(task)
        self._writer.tier.pop_stores()

    def _load(self, driver: Driver, blocks: Sequence[Block]) -> int:
        with self._timed("load", LOAD_MS):
            hits, buffers = driver.load(list(blocks))
        for one, hit, buffer in zip(blocks, hits, buffers, strict=True):
            if hit and buffer != _bytes(one):
                self.problems.append(f"foreign bytes under {one.key}: {bytes(buffer[:8])!r}")
        return sum(hits)

    @contextmanager
    def _timed(self, what: str, deadline_ms: int) -> Iterator[None]:
        began_s, starved_s = time.monotonic(), self._starvation.total_s
        yield
        took_s = time.monotonic() - began_s
        self.requests += 1
        self.slowest_s[what] = max(self.slowest_s.get(what, 0.0), took_s)
        starved_s = self._starvation.total_s - starved_s
        if took_s > deadline_ms / 1000 + SLACK_S + starved_s:
            self.problems.append(f"a {what} took {took_s:.2f} s of {deadline_ms} ms, starved for {starved_s:.2f} s")


def _bytes(one: Block) -> bytes:
    """Contents of a block, different for each block."""
    return f"{one.keyspace[:1]}{one.chunk_hash[0]:03d}".encode() * (BLOCK_BYTES // 4)
