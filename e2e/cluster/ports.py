"""Ports for servers of tests, benchmarks and the local cluster."""

from __future__ import annotations

import random
import socket
import threading
from collections import deque

FIRST, LAST = 15_000, 29_999
"""Below Linux's usual range for outgoing connections, which could take a port between its choice and its use."""

KEPT = 128
"""How many of a process's newest ports stay its own while nothing listens on them. Each costs two file descriptors."""

_Claim = tuple[socket.socket, socket.socket]

_claims: deque[_Claim] = deque()
_giving = threading.Lock()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, and that stays this process's own.

    No other caller of this function gets it, and no outgoing connection, even while a server that had it is down. It is
    given back when the process ends, or has asked for `KEPT` others.
    """
    with _giving:
        while True:
            port = random.SystemRandom().randint(FIRST, LAST)
            if claim := claimed(port):
                _claims.append(claim)
                if len(_claims) > KEPT:
                    for oldest in _claims.popleft():
                        oldest.close()
                return port


def claimed(port: int) -> _Claim | None:
    """Return a claim on a port that holds until it is closed; None if another process has the port.

    A name that only one process can have, and the port itself, bound but not listened on: a process that listens as
    servers do (SO_REUSEADDR) may still bind the port; connect() does not choose one that is bound.
    """
    name, bound = socket.socket(socket.AF_UNIX), socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        name.bind(f"\0kvstrata-port-{port}")
        bound.bind(("127.0.0.1", port))
    except OSError:
        name.close()
        bound.close()
        return None
    return name, bound
