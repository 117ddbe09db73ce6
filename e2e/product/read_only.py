"""A directory of a container that becomes read-only, as a file system does when its disk fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .kubectl import wait_until

_REMOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pid, path, flags = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
if libc.setns(mounts, 0x00020000) or libc.mount(None, path, None, flags, None):
    sys.exit(os.strerror(ctypes.get_errno()))
"""
_READ_ONLY, _REMOUNT_THIS_MOUNT = 0x1, 0x20 | 0x1000  # MS_RDONLY; MS_REMOUNT and MS_BIND


@contextmanager
def read_only(pid: int, path: str) -> Iterator[None]:
    """Let a mount point of a process' container be read-only while the block runs. Needs root on its machine."""
    # A mount with a file that is open for writing is busy.
    wait_until("the disk is read-only", lambda: _remount(pid, path, _REMOUNT_THIS_MOUNT | _READ_ONLY))
    try:
        yield
    finally:
        assert _remount(pid, path, _REMOUNT_THIS_MOUNT)


def _remount(pid: int, path: str, flags: int) -> bool:
    command = [sys.executable, "-c", _REMOUNT, str(pid), path, str(flags)]
    return subprocess.run(command, check=False).returncode == 0
