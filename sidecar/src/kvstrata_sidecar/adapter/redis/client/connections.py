"""One thread's connections to the nodes of a tier, opened when needed; other threads may abort them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import Dialing
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology
from kvstrata_sidecar.adapter.redis.client.resp import DemotedError, NodeAwayError, PeerClosedError, TransportError

T = TypeVar("T")


class Connections:
    """Any thread may call `abort`. `dial(node)` opens a connection and is abandoned after `dial_timeout_s`."""

    def __init__(self, topology: Topology, dial: Callable[[Node], Connection], dial_timeout_s: float) -> None:
        self._topology = topology
        self._dial = dial
        self._dial_timeout_s = dial_timeout_s
        self._open: dict[Node, Connection] = {}
        self._eras: dict[Node, int] = {}
        self._dialing: dict[Node, Dialing] = {}
        self._new: set[Node] = set()
        self._lock = threading.Lock()
        self._in_use: set[Connection | Dialing] = set()
        self._aborted: str | None = None
        self._closed = False

    @property
    def usable(self) -> bool:
        return self._aborted is None and not self._closed

    def renew(self) -> None:
        """Reset an earlier abort, and close connections to nodes without slots."""
        with self._lock:
            self._aborted = None
        self._new.clear()
        if len(self._open) > len(self._topology.primaries):
            for node in self._open.keys() - set(self._topology.primaries):
                self._drop(node)

    def abort(self, why: str) -> None:
        """Fail all exchanges at once, running and later ones, until `renew`; `why` blames the node."""
        with self._lock:
            self._aborted = why
            for one in self._in_use:
                if isinstance(one, Dialing):
                    one.give_up(why or "it was given up")
                else:
                    one.abort()

    def close(self) -> None:
        self._closed = True
        for node in tuple(self._open):
            self._drop(node)

    def use(self, node: Node, use: Callable[[Connection], T], *, probing: bool = False, keep: bool = False) -> T:
        """Use the connection to a node and record the outcome; with `keep` it stays in use until `end`. Raises
        NodeAwayError, unless `probing`, if the node's breaker is open.
        """
        if not probing and not node.breaker.closed:
            raise NodeAwayError(f"{node}: {node.breaker.detail}")
        try:
            connection = self._connected(node)
            self._begin(connection)
            kept = False
            try:
                result = use(connection)
                kept = keep
            finally:
                if not kept:
                    with self._lock:
                        self._in_use.discard(connection)
        except TransportError as error:
            if probing:
                raise
            raise self._blamed(node, error) from error
        return result

    def end(self, node: Node, connection: Connection, use: Callable[[Connection], T]) -> T:
        """Use a connection that was kept in use for the last time."""
        try:
            result = use(connection)
        except TransportError as error:
            raise self._blamed(node, error) from error
        finally:
            with self._lock:
                self._in_use.discard(connection)
        return result

    def _blamed(self, node: Node, error: TransportError) -> TransportError:
        """Return the error to raise; blame the node unless it was aborted, or an idle connection had ended."""
        with self._lock:
            aborted = self._aborted
        if aborted is not None:
            if aborted:
                self._topology.blame(node, aborted)
            return error
        if isinstance(error, DemotedError):
            self._topology.demoted(node, self._eras.get(node, node.era))
        if isinstance(error, PeerClosedError) and node not in self._new:
            error.reused = True
            self._topology.want()
            return error
        self._topology.blame(node, error)
        return error

    def _begin(self, one: Connection | Dialing) -> None:
        with self._lock:
            if self._aborted is None and not self._closed:
                self._in_use.add(one)
                return
        raise PeerClosedError("it was given up")

    def _connected(self, node: Node) -> Connection:
        connection = self._open.get(node)
        if connection is not None and connection.usable and self._eras[node] == node.era:
            return connection
        self._drop(node)
        era = node.era
        dialing = self._dialing.get(node)
        if dialing is not None and not dialing.over:
            raise TransportError(f"{node}: an earlier attempt to connect has not ended yet")
        self._new.add(node)
        dialing = self._dialing[node] = Dialing(lambda: self._dial(node))
        try:
            self._begin(dialing)
            connection = dialing.wait(self._dial_timeout_s)
        except PeerClosedError:
            dialing.give_up("it was given up")
            raise
        finally:
            with self._lock:
                self._in_use.discard(dialing)
        del self._dialing[node]
        self._open[node], self._eras[node] = connection, era
        return connection

    def _drop(self, node: Node) -> None:
        self._eras.pop(node, None)
        connection = self._open.pop(node, None)
        if connection is not None:
            connection.close()
