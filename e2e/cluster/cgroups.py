"""The node's control groups: one group in every hierarchy, below which kubelet makes those of the pods.

Hosts come in two kinds. Version 1 has one hierarchy per controller (or a few controllers together); the node gets a
group below this process' own in each. Version 2 has a single one; there the node's group is made at the top, because
the group of a login session holds processes, and then may not hand controllers to children.

The version 2 branch follows the kernel's documentation and kind's setup in its containers, but it has never been run:
the project is developed on a version 1 host. On a version 2 host ``up --cluster kind`` is the alternative.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.processes import wait_until
from e2e.cluster.progress import ClusterError

CGROUP_ROOT = Path("/sys/fs/cgroup")
V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids")
INIT_GROUP = "init"

COUNTS_AS = 3
"""For how many of the host's processes the whole node counts on busy processors. By default a group counts as one, so a
node with all its pods stands still beside a dozen processes of tests."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup hierarchy of the host.

    Attributes:
        mount_options: how to mount it again, such as ``cpu,cpuacct`` or ``none,name=systemd``; empty for version 2.
        own_group: the folder of the group that this process is in.
    """

    mount_options: str
    own_group: Path


class NodeCgroups:
    """Make, join, empty and remove the node's groups.

    Each group is recorded in ``record`` before it is made, so that another command can undo an interrupted start.

    Args:
        record: file that lists the groups' folders, one a line, that a process of the node joins.
        name: name of the node's group in every hierarchy.
    """

    def __init__(self, record: Path, name: str) -> None:
        self.record = record
        self._name = name

    @property
    def mount_description(self) -> str:
        """Hierarchies that the node's init script mounts: ``v2``, or those of version 1, one a line."""
        if is_version_2():
            return "v2"
        return "\n".join(h.mount_options for h in hierarchies() if h.mount_options)

    def create(self) -> None:
        """Make the groups."""
        folders = self._folders()
        self.record.write_text("".join(f"{folder}\n" for folder in folders))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            # In version 1 a new cpuset is empty, and no process may join it until it has processors and memory.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if not is_version_2() and (folder / name).exists():
                    (folder / name).write_text((folder.parent / name).read_text())
            if (folder / "cpu.shares").exists():
                (folder / "cpu.shares").write_text(str(1024 * COUNTS_AS))

    def delegate(self) -> None:
        """Let the node's root group hand its controllers to pods (version 2 only; it must hold no process then)."""
        if not is_version_2():
            return
        try:
            self._delegate()
        except OSError as error:
            raise ClusterError(
                f"the node's control group cannot hand its controllers to pods: {error}",
                advice="inside a container this needs a cgroup namespace with delegation; use `up --cluster kind`",
            ) from error

    def _delegate(self) -> None:
        node = CGROUP_ROOT / self._name
        for pid in (node / "cgroup.procs").read_text().split():
            (node / INIT_GROUP / "cgroup.procs").write_text(pid)
        for group in (CGROUP_ROOT, node):
            available = set((group / "cgroup.controllers").read_text().split())
            enabled = set((group / "cgroup.subtree_control").read_text().split())
            for controller in V2_CONTROLLERS:
                if controller in available - enabled:
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")
        (node / "cpu.weight").write_text(str(100 * COUNTS_AS))

    def namespace_root(self) -> list[Path]:
        """The groups that become the roots of the node's cgroup namespace."""
        return [CGROUP_ROOT / self._name] if is_version_2() else self._recorded()

    def destroy(self) -> None:
        """Kill every process in the groups and remove them.

        Raises:
            ClusterError: something could not be removed within some seconds.
        """
        roots = [folder.parent if folder.name == INIT_GROUP else folder for folder in self._recorded()]
        if not wait_until(lambda: _kill_members(roots) == 0, timeout_s=20, interval_s=0.1):
            raise ClusterError("processes of the node do not end", advice="run `down` again; see `ps` for state D")
        deadline = time.monotonic() + 10
        while left := [root for root in roots if not _remove_tree(root)]:
            if time.monotonic() > deadline:
                raise ClusterError(f"could not remove the control groups {left}", advice="run `down` again")
            time.sleep(0.1)
        self.record.unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        if is_version_2():
            return [CGROUP_ROOT / self._name / INIT_GROUP]
        return [hierarchy.own_group / self._name for hierarchy in hierarchies()]

    def _recorded(self) -> list[Path]:
        try:
            return [Path(line) for line in self.record.read_text().splitlines() if line]
        except OSError:
            return []


def is_version_2() -> bool:
    """True on hosts with the unified hierarchy alone."""
    return (CGROUP_ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Hierarchy]:
    """The mounted version 1 hierarchies of this host, and the version 2 one that hybrid hosts mount beside them."""
    return parse_hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def parse_hierarchies(own_groups: str, mountinfo: str) -> list[Hierarchy]:
    """Join /proc/self/cgroup (which group we are in) with /proc/self/mountinfo (where it is mounted)."""
    mounts: list[tuple[str, str, frozenset[str], str]] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, super_options = right.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            root, mount_point = left.split()[3:5]
            mounts.append((kind, mount_point, frozenset(super_options.split(",")), root))
    found = []
    for line in own_groups.splitlines():
        _, controllers, group = line.split(":", 2)
        wanted = frozenset(controllers.split(",")) if controllers else frozenset()
        kind = "cgroup" if controllers else "cgroup2"
        for mount_kind, mount_point, options, root in mounts:
            if mount_kind == kind and wanted <= options:
                inside = group.removeprefix(root) if root != "/" else group
                mount_options = f"none,{controllers}" if controllers.startswith("name=") else controllers
                found.append(Hierarchy(mount_options, Path(mount_point) / inside.lstrip("/")))
                break
    return found


def _kill_members(roots: list[Path]) -> int:
    """Send SIGKILL to every process below ``roots``; the number of processes that were still there."""
    members: set[int] = set()
    for root in roots:
        for listing in root.rglob("cgroup.procs"):
            try:
                members |= {int(pid) for pid in listing.read_text().split()}
            except OSError:
                continue
    members -= {0, os.getpid()}
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # A child of this very process stays a member until its exit status is taken.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(members)


def _remove_tree(root: Path) -> bool:
    """Remove a group and all below it; False while the kernel still keeps one of them."""
    for folder, _, _ in os.walk(root, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass
    return not root.exists()
