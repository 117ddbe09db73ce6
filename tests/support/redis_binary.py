"""Where a real redis-server is: in the local cluster's root file system, or else installed."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from e2e.cluster.rootfs import redis_cli_command, redis_server_command
from e2e.cluster.settings import Paths


def redis_server() -> list[str]:
    """Return the argv prefix that runs redis-server on this machine, without installing it."""
    return redis_server_command() if Paths().rootfs.is_dir() else ["redis-server"]


def put_redis_cli_into(directory: Path) -> None:
    """Make `directory` hold a `redis-cli`, for commands that look for it in PATH."""
    command = redis_cli_command() if Paths().rootfs.is_dir() else [shutil.which("redis-cli") or "redis-cli"]
    program = directory / "redis-cli"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)


def have_redis() -> bool:
    """Whether there is one."""
    return shutil.which("redis-server") is not None or Paths().rootfs.is_dir()


needs_redis = [
    pytest.mark.redis,
    pytest.mark.skipif(not have_redis(), reason="no redis-server: `python3 -m e2e.cluster build` brings one"),
]
