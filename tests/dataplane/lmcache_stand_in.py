"""What the guard imports of LMCache (0.5.6) and vLLM, played: connectors of both roles, the ask for a chunk size."""

from __future__ import annotations

import enum
import importlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"
MQ_TIMEOUT_S = 0.05


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Context:
    """A transfer context whose stores read the engine's blocks until `flush_inflight_stores` has returned."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self.flush: Callable[[], None] = lambda: None

    def flush_inflight_stores(self) -> None:
        self.flush()
        self._happened.append("flushed")


class ServerDrivenContext(Context):
    """One whose blocks are read by the server itself."""


@dataclass
class WorkerAdapter:
    happened: list[str]
    req_client: Any = field(default_factory=SimpleNamespace)
    lmcache_tokens_per_chunk: int = 64
    transfer_ctx: Context | None = None
    error_block_ids: set[int] = field(default_factory=set)
    failure: Exception | None = None
    _health_event: threading.Event = field(default_factory=threading.Event)
    _mq_timeout: float = MQ_TIMEOUT_S

    def __post_init__(self) -> None:
        self._health_event.set()
        self.transfer_ctx = Context(self.happened)

    @property
    def is_healthy(self) -> bool:
        return self._health_event.is_set()

    def _reregister_kv_caches_callback(self) -> bool:
        self.happened.append("registered")
        return True


class RequestState(enum.Enum):
    PREFETCHING = 0
    BYPASS_LMCACHE = 1


@dataclass
class Tracker:
    """What LMCache knows of a request."""

    lookup_started_at: float | None = None
    num_lmcache_hit_tokens: int = 0
    state: RequestState = RequestState.PREFETCHING


@dataclass
class SchedulerAdapter:
    lmcache_tokens_per_chunk: int = 64
    is_healthy: bool = True
    req_clients: dict[str, Any] = field(default_factory=dict)

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a lookup; the server is not told."""


class Connector:
    """LMCache's connector: to a server that is away its stores are forgotten, and called finished.

    A lookup takes effect on the server at once, and its answer takes longer than the call.
    """

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any = None) -> None:
        self.happened: list[str] = []
        self.worker_adapter = WorkerAdapter(self.happened)
        self.scheduler_adapter = SchedulerAdapter()
        self.request_trackers: dict[str, Tracker] = {}

    def _get_or_create_request_tracker(self, request: Any) -> Tracker:
        return self.request_trackers.setdefault(request.request_id, Tracker())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tracker = self._get_or_create_request_tracker(request)
        if tracker.state == RequestState.BYPASS_LMCACHE:
            return 0, False
        if tracker.lookup_started_at is None:
            tracker.lookup_started_at = time.monotonic()
            self.happened.append("looked up")
        return None, True

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        adapter = self.worker_adapter
        if not adapter.is_healthy:
            self.happened.append("forgotten")
            return finished_req_ids, set()
        if adapter.failure is not None:
            raise adapter.failure
        return set(), set()

    def handle_preemptions(self, metadata: Any) -> None:
        if metadata.need_flush_before_forward and self.worker_adapter.is_healthy:
            assert self.worker_adapter.transfer_ctx is not None
            self.worker_adapter.transfer_ctx.flush_inflight_stores()


def play(monkeypatch: pytest.MonkeyPatch, ask: Callable[..., int]) -> None:
    """Let the modules be found while a test runs; `ask` is LMCache's question for a server's chunk size."""
    contents: dict[str, dict[str, Any]] = {
        "lmcache.integration.vllm.lmcache_mp_connector": {"LMCacheMPConnector": Connector},
        "lmcache.integration.vllm.lmcache_mp_metadata": {"LMCacheMPRequestState": RequestState},
        ADAPTER: {"HeartbeatThread": object, "get_lmcache_chunk_size": ask},
        "lmcache.v1.multiprocess.futures": {"MessagingFuture": object},
        "lmcache.v1.multiprocess.rpc": {"get_rpc_spec": lambda operation: SimpleNamespace(streaming=False)},
        "lmcache.v1.multiprocess.transfer_context.worker_transfer": {
            "LMCacheDrivenTransferContext": ServerDrivenContext
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {"KVConnectorRole": Role},
    }
    for name, attributes in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules or length == len(parts):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if length > 1:
                monkeypatch.setattr(
                    sys.modules[".".join(parts[: length - 1])], parts[length - 1], sys.modules[path], raising=False
                )
        for attribute, value in attributes.items():
            monkeypatch.setattr(sys.modules[name], attribute, value, raising=False)


def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the guard as if for the first time, for this test only."""
    name = "kvstrata_sidecar.connector.guard"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    # Taken note of, so that it is gone when the test has ended.
    monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    return module
