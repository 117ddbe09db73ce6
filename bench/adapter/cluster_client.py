"""The process that is measured on a cluster with TLS: it holds our tier and clients of Valkey GLIDE.

    python -m bench.adapter.cluster_client DIRECTORY

Runs with the interpreter that has GLIDE. Both store from and load into the same buffers, with as many threads; each
thread has a connection to every server. GLIDE is used as LMCache's `valkey` adapter uses it, a client for each thread,
but loads straight into the buffer, where that adapter makes one more copy.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import glide_sync

from bench.adapter.answers import serve, timed
from bench.adapter.policy import DOMAIN, IDENTITY, MAIN, Policy
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.runtime import acquire
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.tiers.gate_stand_in import FINGERPRINT

TIMEOUT_S = 60.0
RANK = 0x01000100


class Store(Protocol):
    """Something that keeps values by 32 bytes."""

    def store(self, names: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store all, at the same time. Raises RuntimeError if one was not."""

    def load(self, names: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """Load all, at the same time. Raises RuntimeError if one was not."""

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete all."""


class OurTier:
    """The policy adapter below LMCache's interface, as its plugin uses it."""

    def __init__(self, policy: Policy, ports: Sequence[int], workers: int, ca_file: str) -> None:
        endpoints = [{"host": "127.0.0.1", "port": port} for port in ports]
        tier = {"name": "cluster", "cluster": True, "endpoints": endpoints, "workers": workers}
        tier |= {"tls": {"ca_file": ca_file}}
        params = AdapterParams.from_json({"domain": DOMAIN, "identity": IDENTITY, "tier": tier, **policy.directories})
        if params.tier is None:
            raise AssertionError("the parameters name a tier")
        runtime = acquire(params)
        self._answered: queue.Queue[Task] = queue.Queue()
        self._tier = Tier(params, params.tier, runtime.enforcement, self._answered.put)
        runtime.add(self._tier)
        policy.enforce(1)
        give_up_at_s = time.monotonic() + TIMEOUT_S
        while (state := self._tier.state()).breaker != "closed" or state.nodes_away or state.nodes != len(ports):
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(str(state))
            time.sleep(0.01)

    def store(self, names: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store all."""
        task_id = self._tier.store(_blocks(names), values)
        self._wait(task_id)
        outcome = self._tier.pop_stores()[task_id]
        if outcome.stored_bytes != sum(map(len, values)):
            raise RuntimeError(f"the tier stored {outcome}: {self._tier.counters()}")

    def load(self, names: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """Load all."""
        task_id = self._tier.load(_blocks(names), targets)
        self._wait(task_id)
        found = self._tier.pop_found(task_id) or b""
        if sum(found) != len(names):
            raise RuntimeError(f"the tier loaded {sum(found)} of {len(names)}: {self._tier.counters()}")

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete all."""
        self._tier.delete(_blocks(names))

    def _wait(self, task_id: int) -> None:
        while self._answered.get(timeout=TIMEOUT_S).task_id != task_id:
            pass


class Glide:
    """Threads, each with a client of its own."""

    def __init__(self, ports: Sequence[int], workers: int, ca_file: str) -> None:
        tls = glide_sync.TlsAdvancedConfiguration(root_pem_cacerts=Path(ca_file).read_bytes())
        self._configuration = glide_sync.GlideClusterClientConfiguration(
            [glide_sync.NodeAddress("127.0.0.1", port) for port in ports],
            use_tls=True,
            request_timeout=int(TIMEOUT_S * 1000),
            advanced_config=glide_sync.AdvancedGlideClusterClientConfiguration(
                connection_timeout=int(TIMEOUT_S * 1000), tls_config=tls
            ),
        )
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(workers, initializer=self._connect)
        ready = threading.Barrier(workers + 1)
        connected = [self._threads.submit(ready.wait, TIMEOUT_S) for _ in range(workers)]
        ready.wait(TIMEOUT_S)
        for one in connected:
            one.result()

    def store(self, names: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store all."""
        if set(self._threads.map(self._set, names, values)) != {"OK"}:
            raise RuntimeError("GLIDE did not store")

    def load(self, names: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """Load all."""
        if list(self._threads.map(self._get, names, targets)) != [str(len(one)).encode() for one in targets]:
            raise RuntimeError("GLIDE did not load")

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete all."""
        list(self._threads.map(lambda name: self._own.client.delete([name]), names))

    def _connect(self) -> None:
        self._own.client = glide_sync.GlideClusterClient.create(self._configuration)

    def _set(self, name: bytes, value: memoryview) -> Any:
        return self._own.client.set(name, value)

    def _get(self, name: bytes, target: memoryview) -> Any:
        return self._own.client.get(name, buffer=target)


class ClusterClient:
    """Answers questions."""

    def __init__(self, directory: Path) -> None:
        self._policy = Policy(directory)
        self._stores: dict[str, Store] = {}
        self._buffers: tuple[int, list[memoryview], list[memoryview]] = (0, [], [])

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one question."""
        operation: Callable[..., dict[str, Any]] = getattr(self, f"_{question.pop('op')}")
        return operation(**question)

    def _open(self, ports: Sequence[int], workers: int, ca_file: str) -> dict[str, Any]:
        """Connect both."""
        self._stores = {
            "cluster_tls": OurTier(self._policy, ports, workers, ca_file),
            "glide": Glide(ports, workers, ca_file),
        }
        return {}

    def _transfer(self, name: str, size: int, count: int, check: bool = False) -> dict[str, Any]:
        """Store and load `count` values of `size` bytes; return bytes, seconds and processor seconds of either."""
        store = self._stores[name]
        if self._buffers[0] != size or len(self._buffers[1]) != count:
            self._buffers = (0, [], [])
            sources = [memoryview(bytearray(os.urandom(size))) for _ in range(count)]
            self._buffers = size, sources, [memoryview(bytearray(size)) for _ in range(count)]
        _, sources, targets = self._buffers
        if check:
            for target in targets:
                target[:] = bytes(size)
        names = [os.urandom(32) for _ in range(count)]
        store_s, store_cpu_s = timed(lambda: store.store(names, sources))
        load_s, load_cpu_s = timed(lambda: store.load(names, targets))
        if check and sources != targets:
            raise RuntimeError(f"{name} loaded something else than was stored")
        store.delete(names)
        return {
            "bytes": size * count,
            "store_s": store_s, "store_cpu_s": store_cpu_s, "load_s": load_s, "load_cpu_s": load_cpu_s,
        }  # fmt: skip


def _blocks(names: Sequence[bytes]) -> list[Block]:
    return [Block(name, MAIN, RANK, 0, name, FINGERPRINT) for name in names]


if __name__ == "__main__":
    serve(ClusterClient(Path(sys.argv[1])).answer)
