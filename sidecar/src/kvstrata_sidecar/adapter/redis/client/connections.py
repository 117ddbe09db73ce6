"""One thread's connections to the nodes of a tier, opened when needed; other threads may abort them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import Dialing, dial
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology

T = TypeVar("T")
Use = Callable[[Connection], T]


class Connections:
    """Any thread may call `abort`."""

    def __init__(self, tier: TierParams, topology: Topology) -> None:
        self._tier = tier
        self._topology = topology
        timeout_s = 2 * (tier.connect_timeout_ms + tier.io_timeout_ms) / 1000
        self._dial_timeout_s = timeout_s * max(1, len(tier.endpoints))
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

    def abort(self, why: str = "") -> None:
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

    def use(self, node: Node, use: Use[T], *, probing: bool = False, keep: bool = False) -> T:
        """Use the connection to a node and record the outcome; with `keep` it stays in use until `end`. Raises
        NodeAwayError, unless `probing`, if the node's breaker is open."""
        if not probing and not node.breaker.closed:
            raise resp.NodeAwayError(f"{node}: {node.breaker.detail}")
        try:
            connection = self._connected(node)
            self._begin(connection)
        except resp.TransportError as error:
            raise self._blamed(node, error, probing=probing) from error
        return self.end(node, connection, use, probing=probing, keep=keep)

    def end(self, node: Node, connection: Connection, use: Use[T], *, probing: bool = False, keep: bool = False) -> T:
        """Use a connection that is in use, for the last time unless it is to `keep`."""
        over = True
        try:
            result = use(connection)
            over = not keep
        except resp.TransportError as error:
            raise self._blamed(node, error, probing=probing) from error
        finally:
            if over:
                with self._lock:
                    self._in_use.discard(connection)
        return result

    def _blamed(self, node: Node, error: resp.TransportError, *, probing: bool) -> resp.TransportError:
        """Return the error to raise; blame the node unless it was aborted, probed, or an idle connection had ended."""
        if probing:
            return error
        with self._lock:
            aborted = self._aborted
        if aborted is not None:
            if aborted:
                self._topology.blame(node, aborted)
            return error
        if isinstance(error, resp.DemotedError):
            self._topology.demoted(node, self._eras.get(node, node.era))
        if isinstance(error, resp.PeerClosedError) and node not in self._new:
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
        raise resp.PeerClosedError("it was given up")

    def _connected(self, node: Node) -> Connection:
        connection = self._open.get(node)
        if connection is not None and connection.usable and self._eras[node] == node.era:
            return connection
        self._drop(node)
        era = node.era
        dialing = self._dialing.get(node)
        if dialing is not None and not dialing.over:
            raise resp.TransportError(f"{node}: an earlier attempt to connect has not ended yet")
        self._new.add(node)
        dialing = self._dialing[node] = Dialing(lambda: self._dial(node))
        try:
            self._begin(dialing)
            connection = dialing.wait(self._dial_timeout_s)
        except resp.PeerClosedError:
            dialing.give_up("it was given up")
            raise
        finally:
            with self._lock:
                self._in_use.discard(dialing)
        del self._dialing[node]
        self._open[node], self._eras[node] = connection, era
        return connection

    def _dial(self, node: Node) -> Connection:
        problems: list[resp.TransportError | resp.ReplyError] = []
        for address in node.addresses:
            try:
                connection = dial(address, self._tier)
                if not self._tier.cluster:  # in a cluster the map has the roles
                    connection.expect_primary(self._tier.io_timeout_ms / 1000)
                return connection
            except (resp.TransportError, resp.ReplyError) as error:
                problems.append(error)
        raise next((problem for problem in problems if isinstance(problem, resp.AccessError)), problems[0])

    def _drop(self, node: Node) -> None:
        self._eras.pop(node, None)
        connection = self._open.pop(node, None)
        if connection is not None:
            connection.close()
