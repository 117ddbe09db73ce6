"""Processes that the kernel ends for want of memory, as it ends a container that grows beyond its limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.cluster.cgroups import CGROUP_ROOT, hierarchies, is_version_2

LIMIT_BYTES = 64 << 20
_TAKE = (
    "import os; open('/proc/self/oom_score_adj', 'w').write('-900'); held = bytearray(1 << 30); os.write(1, held[:1])"
)


def kill_for_memory(process: subprocess.Popen[bytes]) -> None:
    """Have the kernel end a process: it shares a group of little memory with one that asks for much more.

    Skips the test where this user may make no control groups.
    """
    with _group() as group:
        (group / "cgroup.procs").write_text(str(process.pid))
        asking = subprocess.Popen(
            [sys.executable, "-c", _TAKE],
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            stdout=subprocess.DEVNULL,
        )
        try:
            process.wait(120)
        finally:
            asking.kill()
            asking.wait()


@contextmanager
def _group() -> Iterator[Path]:
    if is_version_2():
        parent = CGROUP_ROOT
    else:
        parent = next(h.own_group for h in hierarchies() if "memory" in h.mount_options.split(","))
    group = parent / f"kvstrata-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.max" if is_version_2() else "memory.limit_in_bytes")
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group with a bound of memory can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()
