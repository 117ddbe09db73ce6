"""What the guard imports of LMCache (0.5.6) and vLLM, played: a worker's connector, the ask for a chunk size."""

from __future__ import annotations

import enum
import importlib
import sys
import threading
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


class Connector:
    """LMCache's connector: to a server that is away its stores are forgotten, and called finished."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any = None) -> None:
        self.happened: list[str] = []
        self.worker_adapter = WorkerAdapter(self.happened)

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
        "lmcache.integration.vllm.lmcache_mp_metadata": {"LMCacheMPRequestState": object},
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


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a module of the guard as if for the first time, for this test only."""
    for one in ("absent", "guard"):
        monkeypatch.delitem(sys.modules, f"kvstrata_sidecar.connector.{one}", raising=False)
    module = importlib.import_module(f"kvstrata_sidecar.connector.{name}")
    for one in ("absent", "guard"):
        # Taken note of, so that it is gone when the test has ended.
        if (loaded := sys.modules.pop(f"kvstrata_sidecar.connector.{one}", None)) is not None:
            monkeypatch.setitem(sys.modules, f"kvstrata_sidecar.connector.{one}", loaded)
    return module
