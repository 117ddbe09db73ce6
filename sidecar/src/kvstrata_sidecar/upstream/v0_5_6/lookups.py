"""Ends lookups whose requests do not use the answer.

A lookup locks blocks in the cache server until the request retrieves or releases them, and leaves a record there until
its answer is taken. LMCache (0.5.6) forgets a lookup whose request is aborted or bypassed: lock and record stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvstrata_sidecar.connector.failures import logger

GIVE_UP_S = 300.0
"""After this long the server's locks have expired."""

POLL_S = 0.02


class Lookups:
    """The lookups of one scheduler, each until its request uses the answer or it has ended on the servers.

    `adapter` is LMCache's scheduler adapter. A thread ends abandoned lookups; it exists while there are any.
    """

    def __init__(self, adapter: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter = adapter
        self._clock = clock
        self._lock = threading.Lock()
        self._receipts: dict[str, dict[str, Any]] = {}
        self._ending: dict[str, Iterator[None]] = {}
        self._finished: set[str] = set()
        self._submit = adapter.maybe_submit_lookup_request
        adapter.maybe_submit_lookup_request, adapter.end_session = self.submit, self.end_session

    def is_ending(self, request_id: str) -> bool:
        """Whether an abandoned lookup has not ended: another one of that request would take its place on the server."""
        return request_id in self._ending

    def submit(self, request_id: str, *args: Any, **options: Any) -> None:
        """Replaces LMCache's function, which does nothing if a lookup is open. LMCache drops a late receipt."""
        self._submit(request_id, *args, **options)
        sent = self._adapter._unacked_lookups.get(request_id)
        if sent is not None:
            self._receipts.setdefault(request_id, dict(sent.futures))

    def used(self, request_id: str) -> None:
        """The request was admitted: LMCache retrieves or releases an answer's blocks; without one, it is abandoned."""
        if request_id in self._adapter._finished_lookup_results:
            self._receipts.pop(request_id, None)
        else:
            self.abandon(request_id)

    def abandon(self, request_id: str) -> None:
        """Remove an open lookup from LMCache's adapter, and end it on the servers."""
        adapter, receipts = self._adapter, self._receipts.pop(request_id, None)
        answers = {url: future for url, (future, _) in adapter._lookup_status.get(request_id, {}).items()}
        hits, asked = adapter._per_server_hits.get(request_id, {}), adapter._lookup_params.get(request_id)
        adapter.cleanup_lookup_result(request_id)
        if receipts is None or asked is None:
            return
        with self._lock:
            starts = not self._ending
            self._ending[request_id] = self._steps(request_id, asked, receipts, answers, hits)
        if starts:
            threading.Thread(target=self._run, name="kvs-lookups", daemon=True).start()

    def end_session(self, request_id: str) -> None:
        """Replaces LMCache's function: a session has the locks of its lookup, so it ends after that."""
        with self._lock:
            if request_id in self._ending:
                self._finished.add(request_id)
                return
        self._send_end(request_id)

    def _send_end(self, request_id: str) -> None:
        for client in self._adapter.req_clients.values():
            client.end_session(request_id)

    def _run(self) -> None:
        while True:
            for request_id, steps in list(self._ending.items()):
                try:
                    next(steps)
                    continue
                except StopIteration:
                    pass
                except Exception as error:
                    # A server that is gone has neither locks nor records.
                    logger.warning("A lookup of an ended request was not ended: %r", error)
                with self._lock:
                    del self._ending[request_id]
                    finished = request_id in self._finished
                    self._finished.discard(request_id)
                if finished:
                    self._send_end(request_id)
            with self._lock:
                if not self._ending:
                    return
            time.sleep(POLL_S)

    def _steps(
        self,
        request_id: str,
        asked: tuple[list[int], str, dict[str, Any] | None],
        receipts: dict[str, Any],
        answers: dict[str, Any],
        hits: dict[str, int],
    ) -> Iterator[None]:
        """End one lookup on every server: take its answer, and release its blocks. Yields while a server has not
        answered. Raises TimeoutError after `GIVE_UP_S`."""
        adapter = self._adapter
        tokens, salt, configs = asked
        give_up_at_s = self._clock() + GIVE_UP_S

        def wait_for(future: Any) -> Iterator[None]:
            while not future.query():
                if self._clock() >= give_up_at_s:
                    raise TimeoutError(f"no answer within {GIVE_UP_S:g} s")
                yield

        for url, client in adapter.req_clients.items():
            found = hits.get(url)
            if found is None and url in receipts:
                # Before its receipt, the server would answer that there is no such lookup.
                yield from wait_for(receipts[url])
                receipts[url].result(0)
            while found is None:
                answer = answers.pop(url, None) or client.query_prefetch_status(request_id)
                yield from wait_for(answer)
                found = answer.result(0)
                if found is None:
                    yield
            if found:
                key = adapter._create_key(
                    tokens,
                    start=0,
                    end=found * adapter.lmcache_tokens_per_chunk,
                    request_id=request_id,
                    cache_salt=salt or "",
                    request_configs=configs,
                ).no_worker_id_version()
                released = client.free_lookup_locks(key, adapter.tp_size)
                yield from wait_for(released)
                released.result(0)
