"""LMCache's side of the adapter: one L2 adapter for each tier.

    ... --l2-adapter '{"type": "plugin", "module_path": "kvstrata_sidecar.adapter.plugin",
        "class_name": "PolicyAdapter", "adapter_params": {...}}'

`adapter_params` are those of AdapterParams. With `"tier": null` the adapter stores and finds nothing, so that a model
without a shared tier enforces and acknowledges its policy too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstrata_sidecar.adapter.tier.base import AnyTier
from kvstrata_sidecar.adapter.tier.interface import Block, block_of
from kvstrata_sidecar.adapter.tier.restoring import Restoring
from kvstrata_sidecar.adapter.tier.tasks import Task, TaskKind, TaskTable
from kvstrata_sidecar.upstream import versions

from .params import AdapterParams
from .policy.refusal import Refusal
from .runtime import acquire, release
from .tiers import start_tier

logger = logging.getLogger(__name__)
lmcache = versions.load(versions.SERVER)
AdapterBase: Any = lmcache.AdapterBase


class PolicyAdapter(AdapterBase):  # type: ignore[misc]
    """One tier (or none) of a cache server, under the pod's policy. LMCache's store loop and prefetch loop call it, and
    its HTTP threads `delete` and `report_status`. Malformed parameters and a missing link directory raise, which stops
    the server; an unreachable tier does not."""

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: object = None) -> None:  # noqa: ARG002
        super().__init__(max_capacity_bytes=0)
        params = AdapterParams.from_json(adapter_params)
        self._event_fds = {kind: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for kind in TaskKind}
        self._runtime = runtime = acquire(params)
        self._own: AnyTier | None = None
        self._restoring = Restoring(runtime.prefill, runtime.chunk_tokens, runtime.held_faster())
        self._asked: dict[int, Sequence[Block]] = {}
        self._tier: AnyTier | NoTier = NoTier(self._answered)
        if params.tier is not None:
            self._tier = self._own = start_tier(runtime, params, params.tier, self._answered)
            self._runtime.add(self._own, self._restoring)

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
            task_id: lmcache.store_result(outcome.successful, outcome.stored_bytes)
            for task_id, outcome in self._tier.pop_stores().items()
        }

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: object) -> int:  # noqa: ARG002
        """Start to look up. Nothing is locked: a block that expires before it is loaded is a miss."""
        blocks = _blocks(keys)
        task_id = self._tier.lookup(blocks)
        self._asked[task_id] = blocks
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return the hits that are worth loading; the prefetch loop alone calls this."""
        found = self._tier.pop_found(task_id)
        if found is None:
            return None
        blocks = self._asked.pop(task_id, ())
        worth = self._restoring.worth(blocks, found)
        if worth is not found and self._own is not None:
            declined = [block for block, hit, kept in zip(blocks, found, worth, strict=True) if hit and not kept]
            self._own.refuse(Refusal.SLOWER_THAN_PREFILL, declined)
        return _bitmap(worth)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """No operation: lookups lock nothing."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        blocks = _blocks(keys)
        return self._tier.load(blocks, _views(objects), self._restoring.begin(blocks))

    def query_load_result(self, task_id: int) -> Any:
        return _bitmap(self._tier.pop_found(task_id))

    def delete(self, keys: Sequence[Any]) -> None:
        """Delete blocks of keyspaces that the policy allows; the eraser deletes others."""
        deleted = self._tier.delete(_blocks(keys))
        if deleted:
            self._notify_keys_deleted(deleted, [0] * len(deleted))

    def get_usage(self) -> Any:
        """Return no usage: blocks expire in the tier, so stored bytes do not determine how many are there."""
        return lmcache.no_usage()

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
            if task.restore is not None:
                self._restoring.over(task.restore, task)
            if task.keys and task.kind is TaskKind.STORE:
                self._notify_keys_stored(task.keys, task.sizes)
            elif task.keys:
                self._notify_keys_accessed(task.keys)
        except Exception:
            logger.exception("A listener of LMCache failed; the %s is answered nevertheless", task.kind)
        finally:
            os.eventfd_write(self._event_fds[task.kind], 1)


class NoTier:
    """Refuses every block: each task is answered at once."""

    healthy = True

    def __init__(self, answered: Callable[[Task], None]) -> None:
        tasks = TaskTable(answered)
        self.pop_stores, self.pop_found = tasks.pop_stores, tasks.pop_found

        def refuse(kind: TaskKind, blocks: Sequence[Block], *_: object) -> int:
            return tasks.open(kind, len(blocks), 0, float("inf")).task_id

        self.store = partial(refuse, TaskKind.STORE)
        self.lookup = partial(refuse, TaskKind.LOOKUP)
        self.load = partial(refuse, TaskKind.LOAD)

    def delete(self, blocks: Sequence[Block]) -> list[Any]:  # noqa: ARG002
        return []

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """No operation."""


def _blocks(keys: Sequence[Any]) -> list[Block]:
    return [block_of(key) for key in keys]


def _views(objects: Sequence[Any]) -> list[memoryview]:
    return [memoryview(item.byte_array).cast("B") for item in objects]


def _bitmap(found: bytes | None) -> Any:
    if found is None:
        return None
    return lmcache.bitmap(len(found), [index for index, hit in enumerate(found) if hit])
