"""Ports for servers of tests, benchmarks and the local cluster."""

from __future__ import annotations

import random
import socket
import threading

FIRST, LAST = 15_000, 29_999
"""Below what Linux gives to outgoing connections, which could take a port between its choice and its use."""

_given: set[int] = set()
_giving = threading.Lock()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, and that this process was not given lately.

    Chosen at random, so that processes beside each other hardly choose the same.
    """
    with _giving:
        if len(_given) > (LAST - FIRST) // 2:
            _given.clear()
        while True:
            port = random.SystemRandom().randint(FIRST, LAST)
            if port not in _given and _is_free(port):
                _given.add(port)
                return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # What a server that just ended leaves behind (TIME_WAIT) is no obstacle to one that listens as servers do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
