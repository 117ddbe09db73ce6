"""LMCache's side of the adapter: the only module that imports LMCache (0.5.6).

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvstrata_sidecar.adapter.plugin",
        "class_name": "PolicyAdapter", "adapter_params": {...}}'

`adapter_params` are those of AdapterParams. With `"tier": null` the adapter stores and finds nothing, so that a model
without a shared tier enforces and acknowledges its policy too.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.tier.interface import Block, SlowerTier
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome, Task, TaskKind

from .files.tier import FileTier
from .params import AdapterParams, FileTierParams, TierParams
from .runtime import acquire, release

logger = logging.getLogger(__name__)

# Both run in C: they are called for every key of every request.
_names = attrgetter("cache_salt", "kv_rank", "object_group_id", "chunk_hash")
_block: Callable[[tuple[Any, ...]], Block] = partial(tuple.__new__, Block)


class PolicyAdapter(L2AdapterInterface):  # type: ignore[misc]
    """One tier (or none) of a cache server, under the pod's policy.

    LMCache's store loop and prefetch loop call it, and its HTTP threads `delete` and `report_status`. Malformed
    parameters and a missing link directory raise, which stops the server; an unreachable tier does not.
    """

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: object = None) -> None:  # noqa: ARG002
        super().__init__(max_capacity_bytes=0)
        params = AdapterParams.from_json(adapter_params)
        self._event_fds = {kind: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for kind in TaskKind}
        self._runtime = runtime = acquire(params)
        runtime.enforcement.ages.memory = lambda: runtime.memory
        self._own: SlowerTier | None = None
        self._tier: SlowerTier | NoTier = NoTier(self._signal)
        if params.tier is not None:
            self._tier = self._own = self._start(params, params.tier)
            self._runtime.add(self._own)

    def _start(self, params: AdapterParams, tier: TierParams | FileTierParams) -> SlowerTier:
        runtime = self._runtime
        if isinstance(tier, TierParams):
            return Tier(params, tier, runtime.enforcement, self._answered, held_faster=runtime.held_faster())
        return FileTier(
            params,
            tier,
            runtime.enforcement,
            self._answered,
            spans=runtime.spans,
            # The memory's evictor keeps back buffers that a disk may still touch.
            guarded=lambda: runtime.memory is not None,
        )

    def get_store_event_fd(self) -> int:
        return self._event_fds[TaskKind.STORE]

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._event_fds[TaskKind.LOOKUP]

    def get_load_event_fd(self) -> int:
        return self._event_fds[TaskKind.LOAD]

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start to store; refused blocks are left out and counted."""
        return self._tier.store(_blocks(keys), _views(objects))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return {
            task_id: L2StoreResult(outcome.successful, outcome.stored_bytes)
            for task_id, outcome in self._tier.pop_stores().items()
        }

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: object) -> int:  # noqa: ARG002
        """Start to look up. Nothing is locked: a block that expires before it is loaded is a miss."""
        return self._tier.lookup(_blocks(keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return _bitmap(self._tier.pop_found(task_id))

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """No operation: lookups lock nothing."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        return self._tier.load(_blocks(keys), _views(objects))

    def query_load_result(self, task_id: int) -> Any:
        return _bitmap(self._tier.pop_found(task_id))

    def delete(self, keys: Sequence[Any]) -> None:
        """Delete blocks of keyspaces that the policy allows; the eraser deletes others."""
        deleted = self._tier.delete(_blocks(keys))
        if deleted:
            self._notify_keys_deleted(deleted, [0] * len(deleted))

    def get_usage(self) -> Any:
        """Return no usage: blocks expire in the tier, so stored bytes do not determine how many are there."""
        return AdapterUsage(total_bytes_used=0, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        """An unreachable tier is reported, but does not make this process unhealthy."""
        state = self._runtime.state()
        own = self._own.state() if self._own is not None else None
        return {
            "is_healthy": self._runtime.link.healthy and self._tier.healthy,
            "type": "kvstrata-policy",
            "policy_revision": state.revision,
            "policy_fresh": state.fresh,
            "keyspaces": state.keyspaces,
            "tier": own.name if own else None,
            "breaker": own.breaker if own else None,
            "detail": own.detail if own else "",
            "nodes": self._own.nodes() if self._own is not None else {},
            "counters": self._tier.counters(),
        }

    def close(self) -> None:
        if self._own is not None:
            self._runtime.remove(self._own)
        self._tier.close()
        release(self._runtime)
        for descriptor in self._event_fds.values():
            os.close(descriptor)

    def _answered(self, task: Task) -> None:
        try:
            memory = self._runtime.memory
            if memory is not None and self._own is not None:
                memory.confirm(self._own, task.keys)
            if task.keys and task.kind is TaskKind.STORE:
                self._notify_keys_stored(task.keys, task.sizes)
            elif task.keys:
                self._notify_keys_accessed(task.keys)
        except Exception:
            logger.exception("A listener of LMCache failed; the %s is answered nevertheless", task.kind)
        finally:
            self._signal(task.kind)

    def _signal(self, kind: TaskKind) -> None:
        os.eventfd_write(self._event_fds[kind], 1)


class NoTier:
    """Answers like a tier that refuses everything; `signal` is called as soon as an answer can be fetched."""

    healthy = True

    def __init__(self, signal: Any) -> None:
        self._signal = signal
        self._ids = itertools.count(1)
        self._stores: deque[int] = deque()
        self._found: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:  # noqa: ARG002
        task_id = next(self._ids)
        self._stores.append(task_id)
        self._signal(TaskKind.STORE)
        return task_id

    def lookup(self, blocks: Sequence[Block]) -> int:
        return self._miss(TaskKind.LOOKUP, len(blocks))

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:  # noqa: ARG002
        return self._miss(TaskKind.LOAD, len(blocks))

    def pop_stores(self) -> dict[int, StoreOutcome]:
        with self._lock:
            answered = [self._stores.popleft() for _ in range(len(self._stores))]
        return dict.fromkeys(answered, StoreOutcome(True, 0))

    def pop_found(self, task_id: int) -> bytes | None:
        return self._found.pop(task_id, None)

    def delete(self, blocks: Sequence[Block]) -> list[Any]:  # noqa: ARG002
        return []

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """No operation."""

    def _miss(self, kind: TaskKind, count: int) -> int:
        task_id = next(self._ids)
        self._found[task_id] = bytes(count)
        self._signal(kind)
        return task_id


def _blocks(keys: Sequence[Any]) -> list[Block]:
    return [_block((key, *_names(key))) for key in keys]


def _views(objects: Sequence[Any]) -> list[memoryview]:
    return [memoryview(item.byte_array).cast("B") for item in objects]


def _bitmap(found: bytes | None) -> Any:
    if found is None:
        return None
    bitmap = Bitmap(len(found))
    bitmap.batched_set([index for index, hit in enumerate(found) if hit])
    return bitmap
