"""File systems of a test's own, on loop devices, and a group of processes whose disk is slow."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from e2e.cluster.cgroups import CGROUP_ROOT, is_version_2

IMAGE_BYTES = 64 << 20
SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
LOSE_THE_LOG = struct.pack("I", 2)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


class FileSystem:
    """An ext4 in a file, mounted at `path`."""

    def __init__(self, directory: Path) -> None:
        self.image, self.path = directory / "image", directory / "mounted"
        self.path.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(IMAGE_BYTES)
        run("mkfs.ext4", "-qF", "-m0", str(self.image))

    def mount(self, *options: str) -> None:
        run("mount", "-o", ",".join(("loop", *options)), str(self.image), str(self.path))

    def unmount(self) -> None:
        with suppress(subprocess.CalledProcessError):
            run("umount", "-l", str(self.path))  # tiers may not be closed yet

    def lose_power(self) -> None:
        """Forget all that is not on the disk, and come back."""
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(descriptor, SHUTDOWN, LOSE_THE_LOG)
        os.close(descriptor)
        run("umount", str(self.path))
        self.mount()

    def device(self) -> str:
        device = run("losetup", "-nO", "NAME", "-j", str(self.image)).split()[0]
        told = os.stat(device)
        return f"{os.major(told.st_rdev)}:{os.minor(told.st_rdev)}"


@contextmanager
def mounted(directory: Path) -> Iterator[FileSystem]:
    """Mount an empty file system below `directory`, or skip the test and say what lacks."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip(
            "file systems of the test's own need root, mkfs.ext4 and loop devices: run it on a machine of one's own"
        )
    file_system = FileSystem(directory)
    try:
        file_system.mount()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr}")
    try:
        yield file_system
    finally:
        file_system.unmount()


@contextmanager
def slow_group(device: str, bytes_per_s: int) -> Iterator[Path]:
    """Make a group of processes that read from a device no faster, or skip the test and say what lacks.

    A process is put into it by its id in `cgroup.procs`; all have to be ended or taken out again.
    """
    root = CGROUP_ROOT if is_version_2() else CGROUP_ROOT / "blkio"
    group = root / f"kvstrata-test-{os.getpid()}"
    made = False
    try:
        _hand_down_io(root)
        group.mkdir()
        made = True
        bound, line = ("io.max", "{} rbps={}") if is_version_2() else ("blkio.throttle.read_bps_device", "{} {}")
        (group / bound).write_text(line.format(device, bytes_per_s))
    except OSError as error:
        if made:
            group.rmdir()
        pytest.skip(f"no control group that slows a disk down can be made at {root}: {error}")
    try:
        yield group
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(process)
        group.rmdir()


def _hand_down_io(root: Path) -> None:
    """Let groups below `root` bound I/O, where that has to be said (version 2). Raises OSError if it may not be.

    Version 2 follows the kernel's documentation; the project is developed on a version 1 host.
    """
    if is_version_2() and "io" not in (root / "cgroup.subtree_control").read_text().split():
        (root / "cgroup.subtree_control").write_text("+io")
