"""LMCacheMPConnector (0.5.6) with every failure of the cache server turned into a miss; `connector.guard` is its entry.

LMCache's connector drops requests to a server marked as away, and registers again when it is back. Between heartbeats,
however, a dead server makes requests wait for seconds, and a store raises, which ends the engine. The guard detects a
closed connection at once and fails pending exchanges (see Line). It catches errors, marks the server as away in
LMCache's own state, so that the heartbeat recovers it, and completes LMCache's pending transfers, so that no request
waits for a dead transfer. It gives up on slow lookups.

With `kvstrata.chunk_tokens`, the server's chunk size, an engine starts without a server and registers when it appears.
The engine's fingerprint is a part of the model's name in LMCache's keys; without one, every request bypasses the cache.

Keep LMCache's `lmcache.mp.mq_timeout` and `lmcache.mp.heartbeat_interval` in `kv_connector_extra_config` short (3 and 1
seconds): they bound the cost of a server that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lmcache.integration.vllm import lmcache_mp_connector
from lmcache.integration.vllm import vllm_multi_process_adapter as lmcache_adapter
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState
from lmcache.integration.vllm.vllm_multi_process_adapter import HeartbeatThread
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.rpc import get_rpc_spec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstrata.contract.messages.engine_identity import marked
from kvstrata_sidecar.connector.failures import Patience, absorb, chunk_tokens, logger, wait_for_server
from kvstrata_sidecar.upstream.resolved_identity import report, resolve
from kvstrata_sidecar.upstream.v0_5_6.connection import Line
from kvstrata_sidecar.upstream.v0_5_6.lookups import Lookups

LONG_STEP_S = 0.05
"""After a longer step of the engine, lookups are asked for until they are answered, or for a part of it."""

ANSWERED_WITHIN_PART = 1 / 20
"""Of all lookups together: so much longer a step may take. The cache server may wait for a processor."""

AGAIN_S = 0.0005


Finished = tuple[set[str] | None, set[str] | None]
"""Requests whose stores have ended, and whose loads have."""


class GuardedConnector(LMCacheMPConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._patience, promised = Patience.from_extra_config(extra), chunk_tokens(extra)
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError('GuardedConnector needs "kv_load_failure_policy": "recompute": a lost block is a miss')
        initialize, identity = super().__init__, resolve(vllm_config, kv_cache_config)
        self._fingerprint = identity.fingerprint
        self._step_began_s = time.monotonic()
        self._asked_until_s: float | None = None
        with chunk_size_promised(promised) as absent, model_name_marked(self._fingerprint):
            wait_for_server(lambda: initialize(vllm_config, role, kv_cache_config), self._patience.start_s)
        if role == KVConnectorRole.SCHEDULER:
            report(identity, extra)
            self._watch_as_scheduler(absent)
        else:
            self._watch_as_worker(absent)

    def _watch_as_scheduler(self, absent: list[Any]) -> None:
        adapter = self.scheduler_adapter
        self._lookups = Lookups(adapter)
        self._loading: set[str] = set()
        self._freed_when_stored: set[str] = set()
        tokens = adapter.lmcache_tokens_per_chunk
        beats = {}
        for url, client in adapter.req_clients.items():
            available = adapter._health_events[url]
            line = _watch(client, available, absent)
            beat = beats[url] = HeartbeatThread(client, available, adapter._heartbeat_interval)
            beat.register_recover_callback(partial(line.recover, partial(keeps_promise, client, tokens)))
            # LMCache starts its heartbeat with the first request, which would then find the server away.
            beat.start()
        adapter._heartbeats = beats

    def _watch_as_worker(self, absent: list[Any]) -> None:
        adapter = self.worker_adapter
        client, tokens = adapter.req_client, adapter.lmcache_tokens_per_chunk
        self._line = _watch(client, adapter._health_event, absent)
        register = adapter._reregister_kv_caches_callback

        def recovery() -> bool:
            if not keeps_promise(client, tokens):
                return False
            # Registering replaces the record of stores under way.
            self._settle_stores()
            return bool(register())

        adapter._reregister_kv_caches_callback = partial(self._line.recover, recovery)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register, or leave it to the heartbeat if the server is away."""
        absorb("register_kv_caches", partial(super().register_kv_caches, kv_caches), self._away)
        self.worker_adapter._ensure_heartbeat_started()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loading; blocks whose load cannot start are reported as failed, so that they are computed."""
        absorb("start_load_kv", partial(super().start_load_kv, forward_context, **kwargs), self._fail_loads_not_begun)

    def wait_for_save(self) -> None:
        absorb("wait_for_save", super().wait_for_save, self._away)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait for stores that read blocks about to be overwritten."""
        absorb("handle_preemptions", partial(super().handle_preemptions, kv_connector_metadata), self._away)
        if getattr(kv_connector_metadata, "need_flush_before_forward", False) and not self.worker_adapter.is_healthy:
            # LMCache waits for stores to a healthy server only.
            self._settle_stores()

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        """Return finished transfers: all, if the server is away."""
        ended: Callable[[], Finished] = partial(super().get_finished, finished_req_ids)

        def drain() -> Finished:
            self._away()
            return ended()

        finished = absorb("get_finished", ended, drain)
        if not self.worker_adapter.is_healthy:
            # LMCache has reported its stores as finished; vLLM reuses their blocks next.
            self._settle_stores()
        if self.worker_adapter.error_block_ids:
            # A server restarted between two heartbeats answers pings and has no registration: only a server marked as
            # away is registered with again.
            self._away()
        return finished

    def shutdown(self) -> None:
        absorb("shutdown", super().shutdown, lambda: None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens in the cache. A lookup that fails or takes too long is a final miss.

        vLLM computes some prompts in full, such as those with prompt log probabilities, but calls this and drops the
        answer: blocks would stay locked. A preempted request waits until an abandoned lookup of it has ended.
        """
        if request.skip_reading_prefix_cache or not self._fingerprint or self._lookups.is_ending(request.request_id):
            return self._bypass(request)
        look_up = partial(super().get_num_new_matched_tokens, request, num_computed_tokens)
        ask: Callable[[], tuple[int | None, bool]] = partial(absorb, "a lookup", look_up, lambda: self._bypass(request))
        started_s = self._get_or_create_request_tracker(request).lookup_started_at
        matched = ask()
        if started_s is None:
            return matched
        # LMCache takes a receipt, asks for the answer and takes the answer in three calls, and vLLM calls once a step.
        # While steps take seconds, the answer would be there for several of them, and the lookup be given up.
        while matched[0] is None and self._ask_until_s() > time.monotonic():
            time.sleep(AGAIN_S)
            matched = ask()
        waited_s = time.monotonic() - started_s
        if matched[0] is None and waited_s > self._patience.lookup_s:
            logger.warning("A lookup was given up after %d ms: no answer", 1000 * waited_s)
            return self._bypass(request)
        if matched[0] is not None and not self.scheduler_adapter.is_healthy:
            logger.warning("A lookup was given up after %d ms: the cache server is away", 1000 * waited_s)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Admit the request. LMCache counts a lookup as a miss if its server did not answer in time."""
        self._lookups.used(request.request_id)
        if num_external_tokens:
            self._loading.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """End a scheduling: a step of the engine begins."""
        self._step_began_s, self._asked_until_s = time.monotonic(), None
        return super().build_connector_meta(scheduler_output)

    def _ask_until_s(self) -> float:
        """Return until when this scheduling may ask for lookups again: no time, unless the step before it was long."""
        if self._asked_until_s is None:
            now_s = time.monotonic()
            step_s = now_s - self._step_began_s
            self._asked_until_s = now_s + (ANSWERED_WITHIN_PART * step_s if step_s > LONG_STEP_S else 0.0)
        return self._asked_until_s

    def on_new_request(self, request: Any) -> None:
        """Look the request up early, if LMCache is configured so; never one whose answer is dropped."""
        if self._fingerprint and not request.skip_reading_prefix_cache:
            absorb("a lookup", partial(super().on_new_request, request), lambda: None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End the request, and its lookup if the answer was not used. The worker's report frees its blocks."""
        self._lookups.abandon(request.request_id)
        end = partial(super().request_finished, request, block_ids)
        finished: tuple[bool, dict[str, Any] | None] = absorb("request_finished", end, lambda: (self._can_store, None))
        if request.request_id in self._loading:
            self._loading.remove(request.request_id)
        elif finished[0]:
            self._freed_when_stored.add(request.request_id)
        return finished

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass on the workers' reports of ended transfers, except stores of requests that ended while they loaded.

        vLLM frees a request's blocks at the first report, and ends at a second one. If a request ends while it loads,
        that is the load's, which still writes its blocks; but LMCache reports every ended request as stored.
        """
        self._loading.difference_update(connector_output.finished_recving or ())
        if connector_output.finished_sending:
            connector_output.finished_sending = connector_output.finished_sending & self._freed_when_stored
            self._freed_when_stored -= connector_output.finished_sending
        super().update_connector_output(connector_output)

    def _report_block_allocation_deltas(self, scheduler_output: Any) -> None:
        report_deltas = partial(super()._report_block_allocation_deltas, scheduler_output)
        absorb("a report of allocations", report_deltas, lambda: None)

    def _bypass(self, request: Any) -> tuple[int, bool]:
        """Let the engine compute this request's prompt, and keep LMCache from looking it up again."""
        self._lookups.abandon(request.request_id)
        tracker = self._get_or_create_request_tracker(request)
        tracker.lookup_started_at = None
        tracker.num_lmcache_hit_tokens = 0
        tracker.state = LMCacheMPRequestState.BYPASS_LMCACHE
        return 0, False

    def _away(self) -> None:
        """Mark the server as away in LMCache's own state; its heartbeat registers again before it clears the mark."""
        self._line.lose()

    def _settle_stores(self) -> None:
        """Wait until no abandoned store reads the engine's blocks any more.

        On a device LMCache copies them in threads of the engine. Their exchanges with the server end within its time
        limit, and Line refuses new ones, so this takes that time and the copying.
        """
        context = self.worker_adapter.transfer_ctx
        if context is not None:
            absorb("a wait for stores that were given up", context.flush_inflight_stores, lambda: None)

    def _fail_loads_not_begun(self) -> None:
        self._away()
        adapter = self.worker_adapter
        for meta in self._get_connector_metadata().requests:
            if meta.direction == "RETRIEVE" and meta.request_id not in adapter.retrieve_futures:
                adapter.error_block_ids.update(meta.op.flat_block_ids)
                adapter._failed_request_ids.add(meta.request_id)
                adapter._dropped_retrieves.add(meta.request_id)


def _watch(client: Any, health: Any, absent: list[Any]) -> Line:
    if client in absent:
        health.clear()
    return Line(
        client,
        health,
        MessagingFuture,
        is_stream=lambda operation: bool(get_rpc_spec(operation).streaming),
        connected=client not in absent,
    )


@contextmanager
def model_name_marked(fingerprint: str) -> Iterator[None]:
    """Within the context, connectors append the fingerprint to the model's name in LMCache's keys, if there is one."""
    name_of = lmcache_mp_connector.get_dcp_decorated_model_name

    def name(vllm_config: Any, kv_cache_config: Any = None) -> str:
        plain = str(name_of(vllm_config, kv_cache_config))
        return marked(plain, fingerprint) if fingerprint else plain

    lmcache_mp_connector.get_dcp_decorated_model_name = name
    try:
        yield
    finally:
        lmcache_mp_connector.get_dcp_decorated_model_name = name_of


CHECK_TIMEOUT_S = 3.0


@contextmanager
def chunk_size_promised(tokens: int | None) -> Iterator[list[Any]]:
    """Within the context, connectors without an answer assume this chunk size, if any. Yields their clients."""
    absent: list[Any] = []
    ask = lmcache_adapter.get_lmcache_chunk_size
    if tokens is None:
        yield absent
        return

    def promised(client: Any, timeout: float = CHECK_TIMEOUT_S) -> int:
        try:
            return int(ask(client, timeout=timeout))
        except (TimeoutError, ConnectionError):
            logger.warning("The cache server does not answer; the engine starts without it")
            absent.append(client)
            return tokens

    lmcache_adapter.get_lmcache_chunk_size = promised
    try:
        yield absent
    finally:
        lmcache_adapter.get_lmcache_chunk_size = ask


def keeps_promise(client: Any, tokens: int) -> bool:
    """Return whether the server has this chunk size. With another its blocks would be misread."""
    try:
        found = int(lmcache_adapter.get_lmcache_chunk_size(client, timeout=CHECK_TIMEOUT_S))
    except Exception as error:
        # LMCache's heartbeat calls this at every beat until it is True; it must not raise.
        logger.warning("The cache server has appeared and has not reported its chunk size yet: %r", error)
        return False
    if found != tokens:
        logger.error(
            "The cache server's chunks are of %d tokens, and the engine was started for %d: it is not used",
            found,
            tokens,
        )
    return found == tokens
