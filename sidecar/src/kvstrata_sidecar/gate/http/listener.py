"""A listening socket whose connections are counted from accept, before TLS.

asyncio's servers report a connection only after its TLS handshake, so half-open ones would be in no bound.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.http.messages import Limits
from kvstrata_sidecar.gate.http.tls import ServerTls

_BACKLOG = 1024
_ACCEPTS_PER_TURN = 32
"""Connections accepted before the loop serves others, so that handshakes advance during a flood."""
_PAUSE_S = 1.0
"""Pause after the system is out of file descriptors or memory."""


class Accepted(asyncio.Protocol):
    """The protocol of one accepted connection. `connection_made` comes after its handshake."""

    __slots__ = ("opening",)

    def __init__(self) -> None:
        self.opening: asyncio.Future[Any] | None = None  # its handshake under way, which may be cancelled

    def opening_failed(self) -> None:
        """The handshake failed or was cancelled, and the connection is closed."""


def peer_of(address: str) -> str:
    """Return the address for a peer's bounds: of IPv6 its /64, in which one host has as many as it likes."""
    if ":" not in address or address.startswith("::ffff:"):  # IPv4, on a socket of both
        return address
    network = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]
    return socket.inet_ntop(socket.AF_INET6, network + bytes(8))


class Listener:
    """Passes the peer of each accepted connection to `accept`, which returns the connection's protocol. The address
    `::` is all of IPv6 and IPv4, or of IPv4 on a host without IPv6."""

    def __init__(
        self,
        accept: Callable[[str], Accepted],
        address: tuple[str, int],
        tls: ServerTls | None,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._accept, self._tls = accept, tls
        self._timeouts = {"ssl_handshake_timeout": limits.head_s, "ssl_shutdown_timeout": limits.tls_shutdown_s}
        self._loop = loop
        self._paused: asyncio.TimerHandle | None = None
        host, port = address
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::"
        )  # fmt: skip
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._listen()

    def close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._paused = None
        self._loop.add_reader(self._socket, self._accept_waiting)

    def _accept_waiting(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be accepted", problem=str(error))
                self._loop.remove_reader(self._socket)
                self._paused = self._loop.call_later(_PAUSE_S, self._listen)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open(accepted, self._accept(peer_of(address[0])))

    def _open(self, accepted: socket.socket, connection: Accepted) -> None:
        def opened(task: asyncio.Future[Any]) -> None:
            connection.opening = None
            if task.cancelled() or task.exception() is not None:
                accepted.close()
                connection.opening_failed()

        tls: dict[str, Any] = {"ssl": self._tls.context, **self._timeouts} if self._tls is not None else {}
        opening = self._loop.connect_accepted_socket(lambda: connection, accepted, **tls)
        connection.opening = self._loop.create_task(opening)
        connection.opening.add_done_callback(opened)
