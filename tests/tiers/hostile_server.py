"""A server that greets like Redis and then answers as a test tells it to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Answer = Callable[[socket.socket, list[bytes]], None]


class HostileServer:
    """Answers AUTH, PING and INFO properly and hands every other command to `answer(connection, arguments)`."""

    def __init__(self, answer: Answer, info: bytes = b"role:master\r\n") -> None:
        self._answer, self._info = answer, info
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.commands: list[bytes] = []
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Drop everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as Redis does
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
            while line := stream.readline():
                arguments = [_bulk(stream) for _ in range(int(line[1:]))]
                self.commands.append(arguments[0])
                if arguments[0] == b"PING":
                    connection.sendall(b"+PONG\r\n")
                elif arguments[0] == b"AUTH":
                    connection.sendall(b"+OK\r\n")
                elif arguments[0] == b"INFO":
                    connection.sendall(b"$%d\r\n%s\r\n" % (len(self._info), self._info))
                else:
                    self._answer(connection, arguments)


def says(data: bytes, *, then_close: bool = False) -> Answer:
    """Return an answer that sends `data` and keeps quiet, or closes the connection."""

    def answer(connection: socket.socket, _: list[bytes]) -> None:
        connection.sendall(data)
        if then_close:
            connection.shutdown(socket.SHUT_RDWR)

    return answer


def committed_for_ever(arguments: list[bytes]) -> bytes:
    """Return what a server answers to what is asked about a block before it is read, were it committed."""
    replies = {
        b"TIME": b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n",
        b"HMGET": b"*2\r\n$-1\r\n$-1\r\n",
        b"ZMSCORE": b"*1\r\n$-1\r\n",
        b"ZSCORE": b"$13\r\n9000000000000\r\n",
        b"HGET": b"$15\r\n1:1700000000000\r\n",
    }
    return replies.get(arguments[0], b"-ERR\r\n")


def _bulk(stream: object) -> bytes:
    header = stream.readline()  # type: ignore[attr-defined]
    data: bytes = stream.read(int(header[1:]))  # type: ignore[attr-defined]
    stream.read(2)  # type: ignore[attr-defined]
    return data
