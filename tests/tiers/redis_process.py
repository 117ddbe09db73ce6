"""A real Redis for tests: started, killed, frozen and brought back on one port."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from e2e.cluster.ports import free_port
from e2e.cluster.rootfs import server_command


class RedisProcess:
    """A redis-server on loopback without persistence. `options` are command line options of its own."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        port: int | None = None,
        tls: Sequence[str] = (),
        command: Sequence[str] | None = None,
    ) -> None:
        self._command = command
        self.port = port or free_port()
        self._directory = directory
        self._tls = tuple(tls)
        self._process: subprocess.Popen[bytes] | None = None
        # The port of a cluster's bus is 10,000 above the server's own by default, which somebody else may have.
        bus = "--cluster-enabled" in options and "--cluster-port" not in options
        self.options = (*options, "--cluster-port", str(free_port())) if bus else options

    def start(self, *options: str) -> None:
        """Start it, with further options, and wait until it listens."""
        listen = ["--port", "0", "--tls-port", str(self.port), *self._tls] if self._tls else ["--port", str(self.port)]
        common = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        common += ["--unixsocket", str(self.admin_socket)]
        self._process = subprocess.Popen(
            [*(self._command or server_command()), *listen, *common, *self.options, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not self._listens():
            if time.monotonic() > deadline:
                raise TimeoutError("redis-server did not start")
            time.sleep(0.02)

    def _listens(self) -> bool:
        """Whether it listens on its port and, which comes later, for the tests' own questions."""
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=1),
                socket.socket(socket.AF_UNIX) as admin,
            ):
                admin.connect(str(self.admin_socket))
        except OSError:
            return False
        return True

    @property
    def admin_socket(self) -> Path:
        """A unix socket for the tests' own questions, whatever TLS does on the port."""
        return self._directory / f"redis-{self.port}.sock"

    def admin(self, password: str | None = None) -> Any:
        """Return a redis.Redis that looks from the outside.

        Its own types tell of all that any settings could make it answer.
        """
        return redis.Redis(unix_socket_path=str(self.admin_socket), password=password)

    def outlast_clients(self) -> None:
        """Wait until it has read all that clients sent which have gone: a busy server reads it late."""
        give_up_at_s = time.monotonic() + 60
        while gone := self._clients() - self._peers():
            assert time.monotonic() < give_up_at_s, gone
            time.sleep(0.02)

    def _clients(self) -> set[int]:
        """Ports of clients that it still has."""
        addresses = (one["addr"] for one in self.admin().client_list())
        return {int(one.rsplit(":", 1)[1]) for one in addresses if one.startswith("127.")}

    def _peers(self) -> set[int]:
        """Ports of clients whose end of the connection is open."""
        rows = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        here = f":{self.port:04X}"
        return {int(peer.rsplit(":", 1)[1], 16) for own, peer, state in rows if own.endswith(here) and state == "01"}

    @property
    def pid(self) -> int:
        """Its process' id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    def kill(self) -> None:
        """Kill it, as a lost node would go."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it without closing its connections; returns when it has stopped and answers no client."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        about = Path(f"/proc/{self.pid}/stat")
        give_up_at_s = time.monotonic() + 60
        while about.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < give_up_at_s, "it does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
