"""The measured process: it holds the adapters and LMCache's memory, and carries out commands.

    python -m bench.adapter.client DIRECTORY

Runs with the interpreter that has LMCache. All adapters live in this one process and use the same buffers, so that they
differ in nothing else.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from lmcache.lmcache_redis import LMCacheRedisClient
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from bench.adapter.answers import serve, timed
from bench.adapter.policy import DOMAIN, IDENTITY, MAIN, Policy
from kvstrata_sidecar.adapter.plugin import PolicyAdapter

ANSWER_TIMEOUT_S = 120.0


class Client:
    """Answers questions until standard input ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._policy = Policy(directory)
        self._adapters: dict[str, Any] = {}
        self._buffers: tuple[int, list[Any], list[Any]] = (0, [], [])
        self._lookups: dict[str, list[list[Any]]] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one question."""
        operation: Callable[..., dict[str, Any]] = getattr(self, f"_{question.pop('op')}")
        return operation(**question)

    def new_buffer(self, size: int) -> Any:
        """Return memory of LMCache's with random bytes."""
        return block_of(torch.empty(size, dtype=torch.uint8))

    def _native(self, name: str, port: int, workers: int) -> dict[str, Any]:
        """Open LMCache's own client, as its `resp` adapter does."""
        self._adapters[name] = NativeConnectorL2Adapter(LMCacheRedisClient("127.0.0.1", port, workers, "", ""))
        return {}

    def _policy_adapter(self, name: str, ports: Sequence[int], workers: int, **options: Any) -> dict[str, Any]:
        """Open the policy adapter on a tier of Redis, and wait until it is in use."""
        endpoints = [{"host": "127.0.0.1", "port": port} for port in ports]
        self.open_tier({"name": name, "endpoints": endpoints, "workers": workers, **options})
        return {}

    def open_tier(self, tier: dict[str, Any]) -> None:
        """Open the policy adapter on a tier, and wait until it is in use. Raises TimeoutError."""
        name = tier["name"]
        parameters = {"domain": DOMAIN, "identity": IDENTITY, "tier": tier, **self._policy.directories}
        adapter = self._adapters[name] = PolicyAdapter(parameters)
        give_up_at_s = time.monotonic() + 20
        while adapter.report_status()["breaker"] != "closed":
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(str(adapter.report_status()))
            time.sleep(0.01)

    def _allow(self, scopes: int) -> dict[str, Any]:
        """Put a policy in force with this many scopes besides the main one, all with keys."""
        self._policy.enforce(scopes)
        return {}

    def _status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self._adapters[name].report_status()
        return {"breaker": status["breaker"], "counters": status["counters"]}

    def _limits(self, size: int) -> dict[str, Any]:
        """Return how fast this machine copies and encrypts, in GB/s on one processor."""
        source, target = self.new_buffer(size), bytearray(size + 16)
        view = memoryview(source.byte_array).cast("B")
        address = (ctypes.c_char * len(target)).from_buffer(target)
        cipher, nonce = AESGCM(bytes(32)), bytes(12)
        figures = {}
        ways: dict[str, Callable[[], Any]] = {
            "memcpy": lambda: ctypes.memmove(address, source.raw_data.data_ptr(), size),
            "aes_gcm": lambda: cipher.encrypt_into(nonce, view, b"", target),
        }
        for name, do in ways.items():
            times = []
            for _ in range(9):
                begun_s = time.perf_counter()
                do()
                times.append(time.perf_counter() - begun_s)
            figures[name] = size / sorted(times)[len(times) // 2] / 1e9
        return figures

    def _transfer(self, name: str, size: int, count: int, check: bool = False, keep: bool = False) -> dict[str, Any]:
        """Store and load `count` blocks of `size` bytes; return bytes, seconds and processor seconds of either.

        They are deleted afterwards unless they are to be kept.
        """
        adapter = self._adapters[name]
        if self._buffers[0] != size or len(self._buffers[1]) != count:
            self._buffers = (0, [], [])
            sources, targets = ([self.new_buffer(size) for _ in range(count)] for _ in range(2))
            self._buffers = size, sources, targets
        _, sources, targets = self._buffers
        if check:
            for target in targets:
                target.raw_data.zero_()
        keys = [_key(MAIN) for _ in range(count)]

        def store() -> None:
            task = adapter.submit_store_task(keys, sources)
            done = _wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]
            if not done.is_successful():
                raise RuntimeError(f"{name} did not store")

        def load() -> None:
            task = adapter.submit_load_task(keys, targets)
            found = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
            if found.popcount() != count:
                raise RuntimeError(f"{name} loaded {found.popcount()} of {count}")

        store_s, store_cpu_s = timed(store)
        load_s, load_cpu_s = timed(load)
        if check and not all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(sources, targets, strict=True)):
            raise RuntimeError(f"{name} loaded something else than was stored")
        if not keep:
            adapter.delete(keys)
        return {
            "bytes": size * count,
            "store_s": store_s, "store_cpu_s": store_cpu_s, "load_s": load_s, "load_cpu_s": load_cpu_s,
        }  # fmt: skip

    def _fill(self, name: str, label: str, size: int, keys: int, scopes: int) -> dict[str, Any]:
        """Store `keys` blocks in each of `scopes` scopes, to be looked up under `label`."""
        adapter = self._adapters[name]
        batches = []
        for salt in self._policy.salts(scopes):
            batch = [_key(salt) for _ in range(keys)]
            blocks = [self.new_buffer(size) for _ in batch]  # lent until the answer
            task = adapter.submit_store_task(batch, blocks)
            done = _wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]
            if not done.is_successful():
                raise RuntimeError(f"{name} did not store")
            batches.append(batch)
        self._lookups[label] = batches
        return {}

    def _lookup(self, name: str, label: str, times: int) -> dict[str, Any]:
        """Look up all keys of one scope after the other; return seconds of each, processor seconds of all, hits."""
        adapter = self._adapters[name]
        batches = self._lookups[label]
        order = [batches[secrets.randbelow(len(batches))] for _ in range(times)]
        seconds, hits = [], 0
        begun_cpu_s = time.process_time()
        for batch in order:
            begun_s = time.perf_counter()
            task = adapter.submit_lookup_and_lock_task(batch, {})
            found = _wait(adapter.get_lookup_and_lock_event_fd(), partial(adapter.query_lookup_and_lock_result, task))
            seconds.append(time.perf_counter() - begun_s)
            hits += found.popcount()
            adapter.submit_unlock(batch)
        return {"seconds": seconds, "cpu_s": time.process_time() - begun_cpu_s, "hits": hits}

    def _delete(self, name: str, label: str) -> dict[str, Any]:
        for batch in self._lookups.pop(label):
            self._adapters[name].delete(batch)
        return {}


def _key(salt: str) -> Any:
    return ObjectKey(
        chunk_hash=os.urandom(32), model_name=f"bench/model#{'f1' * 8}", kv_rank=0x01000100, cache_salt=salt
    )


def block_of(raw: torch.Tensor) -> Any:
    """Return a block of LMCache's in this memory, filled with random bytes."""
    raw.random_(0, 255)
    metadata = MemoryObjMetadata(
        shape=raw.shape, dtype=torch.uint8, address=raw.data_ptr(), phy_size=len(raw),
        fmt=MemoryFormat.KV_2LTD, ref_count=1,
    )  # fmt: skip
    return TensorMemoryObj(raw, metadata, parent_allocator=None)


def _wait(descriptor: int, fetch: Callable[[], Any]) -> Any:
    """Wait until `descriptor` is signalled, as LMCache's loops do, and return the result of `fetch`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    give_up_at_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < give_up_at_s:
        if poll.poll(500):
            try:
                os.eventfd_read(descriptor)
            except BlockingIOError:
                pass
            if result := fetch():
                return result
    raise TimeoutError("no answer")


def main() -> None:
    """Answer questions until there are no more."""
    serve(Client(Path(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
