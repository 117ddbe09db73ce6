"""Where a real redis-server is: in the product's own image, unpacked. An installed one is not looked for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from e2e.cluster.rootfs import server_command
from e2e.cluster.settings import Paths


def put_client_into(directory: Path, client: str = "redis-cli") -> None:
    """Make `directory` hold `redis-cli` or `valkey-cli`, for commands that look for it in PATH."""
    program = directory / client
    program.write_text(f'#!/bin/sh\nexec {shlex.join(server_command(client.removesuffix("-cli"), client))} "$@"\n')
    program.chmod(0o755)


needs_redis = [
    pytest.mark.redis,
    pytest.mark.skipif(
        not Paths().unpacked("redis").is_dir(), reason="no redis-server: `python3 -m e2e.images build redis` brings one"
    ),
]
