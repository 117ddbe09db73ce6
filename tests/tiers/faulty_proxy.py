"""Between a client and a server: breaks or slows what the server says, or holds back what clients say, on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

Fault = Callable[[bytes], bytes | None]
"""Returns what becomes of bytes on their way to the client; None closes the connection in place of them."""
Trigger = Callable[[bytes], bool]
"""Whether these bytes of a client, and all that any client sends after them, stay here until `release`."""


class FaultyProxy:
    """Forwards both ways on loopback; `fault` changes what clients get, `hold_from` what reaches the server when.

    Clients get `bytes_per_s` together, None for as much as there is.
    """

    def __init__(self, target_port: int) -> None:
        self.fault: Fault | None = None
        self.hold_from: Trigger | None = None
        self.bytes_per_s: float | None = None
        self._slow = threading.Lock()
        self.holding = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def release(self) -> None:
        """Let go on what was held back, though its client may be gone."""
        self.hold_from = None
        self._flowing.set()

    def close(self) -> None:
        """Drop everything."""
        self.release()
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
            while data := source.recv(65_536 if self.bytes_per_s is None else 4_096):
                fault = self.fault if to_client else None
                said = data if fault is None else fault(data)
                if said is None:
                    break
                if not to_client:
                    self._hold(data)
                elif (rate := self.bytes_per_s) is not None:
                    with self._slow:
                        time.sleep(len(data) / rate)
                target.sendall(said)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _hold(self, data: bytes) -> None:
        if self.hold_from is not None and self.hold_from(data):
            self._flowing.clear()
            self.holding.set()
        self._flowing.wait()
