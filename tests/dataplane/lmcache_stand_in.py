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

from kvstrata.contract.messages.engine_identity import EngineIdentity
from tests.tiers.gate_stand_in import FINGERPRINT

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"


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


@dataclass
class WorkerAdapter:
    happened: list[str]
    req_client: Any = field(default_factory=SimpleNamespace)
    lmcache_tokens_per_chunk: int = 64
    transfer_ctx: Context | None = None
    error_block_ids: set[int] = field(default_factory=set)
    failure: Exception | None = None
    _health_event: threading.Event = field(default_factory=threading.Event)

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


class Answer:
    """A future that a test answers."""

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None

    def query(self) -> bool:
        return self._done

    def result(self, timeout: float) -> Any:
        assert self._done
        return self._value

    def set(self, value: Any = None) -> None:
        self._value, self._done = value, True


@dataclass
class Client:
    """Requests to one cache server, which a test answers."""

    asked: list[tuple[str, Answer]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def query_prefetch_status(self, request_id: str) -> Answer:
        return self._ask(f"status of {request_id}")

    def free_lookup_locks(self, key: str, tp_size: int) -> Answer:
        assert tp_size == 1
        return self._ask(f"free {key}")

    def end_session(self, request_id: str) -> None:
        self.ended.append(request_id)

    def _ask(self, what: str) -> Answer:
        answer = Answer()
        self.asked.append((what, answer))
        return answer


@dataclass
class SchedulerAdapter:
    lmcache_tokens_per_chunk: int = 64
    is_healthy: bool = True
    tp_size: int = 1
    req_clients: dict[str, Client] = field(default_factory=dict)
    _unacked_lookups: dict[str, Any] = field(default_factory=dict)
    _lookup_status: dict[str, dict[str, tuple[Answer, float]]] = field(default_factory=dict)
    _per_server_hits: dict[str, dict[str, int]] = field(default_factory=dict)
    _lookup_params: dict[str, tuple[list[int], str, None]] = field(default_factory=dict)
    _finished_lookup_results: dict[str, int] = field(default_factory=dict)

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], cache_salt: str = "") -> None:
        if request_id not in self._lookup_params:
            self._unacked_lookups[request_id] = SimpleNamespace(futures={"server": Answer()})
            self._lookup_params[request_id] = (token_ids, cache_salt, None)

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a lookup; the server is not told."""
        for one in (
            self._unacked_lookups, self._lookup_status, self._per_server_hits, self._lookup_params,
            self._finished_lookup_results,
        ):  # fmt: skip
            one.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        """Do nothing, as LMCache's for a server that hangs."""

    def _create_key(self, token_ids: list[int], start: int, end: int, request_id: str, **fields: Any) -> Any:
        assert 0 <= start < end <= len(token_ids)
        return SimpleNamespace(no_worker_id_version=lambda: f"{request_id} {start}-{end} {fields['cache_salt']}")


class Connector:
    """LMCache's connector: to a server that is away its stores are forgotten, and called finished.

    A lookup takes effect on the server at once, and its answer takes longer than the call.
    """

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any = None) -> None:
        self.happened: list[str] = []
        self.worker_adapter = WorkerAdapter(self.happened)
        self.scheduler_adapter = SchedulerAdapter()
        self.request_trackers: dict[str, Tracker] = {}
        self._can_store = True
        named = sys.modules["lmcache.integration.vllm.lmcache_mp_connector"]
        self.model_name = named.get_dcp_decorated_model_name(vllm_config, kv_cache_config)

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

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._get_or_create_request_tracker(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self._can_store, None

    def update_connector_output(self, connector_output: Any) -> None:
        assert connector_output is not None

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
        "lmcache.integration.vllm.lmcache_mp_connector": {
            "LMCacheMPConnector": Connector,
            "get_dcp_decorated_model_name": lambda *_: "model",
        },
        "lmcache.integration.vllm.lmcache_mp_metadata": {"LMCacheMPRequestState": RequestState},
        ADAPTER: {"HeartbeatThread": object, "get_lmcache_chunk_size": ask},
        "lmcache.v1.multiprocess.futures": {"MessagingFuture": object},
        "lmcache.v1.multiprocess.rpc": {"get_rpc_spec": lambda operation: SimpleNamespace(streaming=False)},
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


def load(monkeypatch: pytest.MonkeyPatch, fingerprint: str = FINGERPRINT) -> Any:
    """Import the guard as if for the first time, for this test only; its engine has this fingerprint."""
    name = "kvstrata_sidecar.upstream.v0_5_6.connector"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    # Taken note of, so that it is gone when the test has ended.
    monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    monkeypatch.setattr(module, "resolve", lambda *_: EngineIdentity(fingerprint))
    return module
