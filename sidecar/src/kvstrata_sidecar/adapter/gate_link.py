"""The gate's connection to the cache server: a unix socket; `contract.messages.adapter` has the messages.

An `apply` reads policy.json, enforces it, and is acknowledged only when I/O on the keyspaces that it dropped has ended,
and the server's Redis tiers are those of the policy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.contract import ContractError
from kvstrata.contract.messages import adapter as messages
from kvstrata.contract.messages.erase import EraseRequest, VerifyRequest
from kvstrata.contract.messages.pools import PoolQuestion
from kvstrata.contract.messages.probe import ForgetRequest
from kvstrata.contract.policy.cache_view import MANIFESTS_DIRECTORY, POLICY_FILE, CacheView
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY
from kvstrata_sidecar.adapter.policy.pools import Manifests

if TYPE_CHECKING:
    from kvstrata_sidecar.adapter.runtime import Runtime

logger = logging.getLogger(__name__)

DRAIN_GRACE_S = 0.5
"""Time until I/O on a dropped keyspace is aborted."""

DRAIN_TIMEOUT_S = 10.0
"""Time until an apply whose aborted I/O has not ended is answered with an error; the gate asks again."""


class PolicyLink:
    """Serves the socket in the runtime's `link_dir` until `close`. Raises OSError without the socket."""

    def __init__(self, runtime: Runtime) -> None:
        policy_dir = Path(runtime.pod.policy_dir)
        self._path = Path(runtime.pod.link_dir, messages.SOCKET_NAME)
        self._policy_file = policy_dir / POLICY_FILE
        self._keys_dir = policy_dir / KEYS_DIRECTORY
        self._manifests = Manifests(policy_dir / MANIFESTS_DIRECTORY)
        self._runtime = runtime
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._accept, name="kvs-link", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._path.unlink(missing_ok=True)

    def answer(self, line: bytes) -> bytes:
        try:
            return messages.encode_answer(self._answer(messages.decode_request(line)))
        except ContractError as error:
            logger.warning("The gate's request was refused: %s", error)
            return messages.error_answer(str(error))

    def _answer(self, request: messages.Request) -> messages.Answer:
        runtime = self._runtime
        match request:
            case messages.ApplyRequest():
                return self._apply(request.revision, request.term)
            case messages.StateRequest():
                runtime.prefill.costs = request.prefill or runtime.prefill.costs
                return runtime.state()
            case messages.MetricsRequest():
                page = messages.MetricsPage(runtime.metrics())
                too_long = len(messages.encode_answer(page)) > messages.MAX_LINE_BYTES
                return messages.MetricsPage("") if too_long else page
            case messages.HashRequest():
                return runtime.hash(request.tokens)
            case PoolQuestion():
                return runtime.pool(request)
            case EraseRequest():
                return runtime.erasing.erase(request)
            case VerifyRequest():
                return runtime.erasing.verify(request)
            case ForgetRequest():
                return runtime.erasing.forget(request)

    def _apply(self, revision: int, term: int) -> messages.AdapterAck:
        """Enforce policy.json, which may be newer than `revision`; the gate's next request then names that one."""
        try:
            view = CacheView.decode(self._policy_file.read_bytes())
        except OSError as error:
            raise ContractError(f"policy.json cannot be read: {error.strerror}") from error
        if view.revision < revision or view.term < term:
            raise ContractError(f"policy.json holds revision {view.revision} of term {view.term}, which is older")
        enforcement = self._runtime.enforcement
        enforcement.apply(view, self._manifests.of(view))
        enforcement.take_keys(self._keys_dir)
        for tier in self._runtime.all_tiers():
            tier.policy_changed()
        if not enforcement.settle(grace_s=DRAIN_GRACE_S, timeout_s=DRAIN_TIMEOUT_S):
            raise ContractError("I/O on removed keyspaces has not ended yet")
        self._runtime.follow(view)
        enforcement.drop_keys()
        return messages.AdapterAck(revision, term, self._runtime.boot)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="kvs-link-gate", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(messages.MAX_LINE_BYTES):
                    if not line.endswith(b"\n"):
                        return
                    connection.sendall(self.answer(line))
        except OSError:
            return
        finally:
            with self._lock:
                self._connections.discard(connection)
