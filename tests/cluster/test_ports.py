"""A port that was given stays its owner's, also while the server on it is down."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys

import pytest

from e2e.cluster.ports import claimed, free_port

pytestmark = pytest.mark.claim("a port that was given is nobody else's")

IP_LOCAL_PORT_RANGE = 51
"""Of linux/in.h; Linux >= 6.3."""

CLAIM = "import socket; socket.socket(socket.AF_UNIX).bind('\\0kvstrata-port-{port}')"


def listen(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))  # as a server of a pod listens
    server.listen()
    return server


def test_a_server_may_listen_on_it_again_and_again() -> None:
    port = free_port()
    for _ in range(2):
        with listen(port), socket.create_connection(("127.0.0.1", port)):
            pass


def test_nobody_listens_on_it_by_itself() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_port()))


def test_another_process_is_not_given_it() -> None:
    claim = subprocess.run(
        [sys.executable, "-c", CLAIM.format(port=free_port())], capture_output=True, text=True, check=False
    )
    assert "Address already in use" in claim.stderr


def test_no_outgoing_connection_takes_it() -> None:
    """What connect() chooses a port from, cut down to one that is claimed: there is none left."""
    port, claim = free_and_then_claimed()
    with claim, socket.socket() as outgoing, pytest.raises(OSError, match="Cannot assign requested address"):
        connect(outgoing, port)


def free_and_then_claimed() -> tuple[int, contextlib.ExitStack]:
    """Return a port from which connect() could connect, and a claim on it. Other processes may take it meanwhile."""
    for _ in range(20):
        with socket.socket() as some:
            some.bind(("127.0.0.1", 0))
            port: int = some.getsockname()[1]
        with contextlib.suppress(OSError), socket.socket() as control:
            connect(control, port)
            assert control.getsockname()[1] == port
            control.close()
            if claim := claimed(port):
                sockets = contextlib.ExitStack()
                for one in claim:
                    sockets.enter_context(one)
                return port, sockets
    raise AssertionError("no connection could be made from a port that was free")


def connect(outgoing: socket.socket, own_port: int) -> None:
    """Connect to a server that listens, from this port and no other, which the kernel chooses."""
    with listen(free_port()) as server:
        outgoing.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=HH", own_port, own_port))
        outgoing.connect(server.getsockname())
