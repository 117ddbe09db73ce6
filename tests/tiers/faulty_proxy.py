"""Stands between a client and a server and, when told to, breaks what the server says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Fault = Callable[[bytes], bytes | None]
"""Returns what becomes of bytes on their way to the client; None closes the connection in place of them."""


class FaultyProxy:
    """Forwards both ways on loopback; `fault` changes what clients get."""

    def __init__(self, target_port: int) -> None:
        self.fault: Fault | None = None
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Drop everything."""
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, target, target is client), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, to_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                fault = self.fault if to_client else None
                said = data if fault is None else fault(data)
                if said is None:
                    break
                target.sendall(said)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
