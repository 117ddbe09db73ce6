"""Where a real redis-server is: in the local cluster's root file system, or else installed."""

from __future__ import annotations

import shutil

import pytest

from e2e.cluster.rootfs import redis_server_command
from e2e.cluster.settings import Paths


def redis_server() -> list[str]:
    """Return the argv prefix that runs redis-server on this machine, without installing it."""
    return redis_server_command() if Paths().rootfs.is_dir() else ["redis-server"]


def have_redis() -> bool:
    """Whether there is one."""
    return shutil.which("redis-server") is not None or Paths().rootfs.is_dir()


needs_redis = [
    pytest.mark.redis,
    pytest.mark.skipif(not have_redis(), reason="no redis-server: `python3 -m e2e.cluster build` brings one"),
]
