"""Faults of one container: killed, frozen, out of memory. They are done to its processes, as a node would do them.

The processes are found from outside, by the control group that kubelet made for the container, because a container's
own first process ignores most signals from inside. This needs root and a cluster whose node runs on this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.cgroups import CGROUP_ROOT, is_version_2

from .kubectl import CommandError, Kubectl, wait_until

OOM_ROOM_BYTES = 16 << 20
"""Free memory of a container that is to run out of it: less than its first process holds, so that the kernel kills
that one and not the process that asked for the memory."""

PACE_S = 0.1
"""Between two looks whether a paced container is ahead."""

_TAKE_ALL_MEMORY = "exec tail /dev/zero"


@dataclass(frozen=True, slots=True)
class Life:
    """One run of a container: a restart changes the count, a new pod the id."""

    pod_uid: str
    container: str
    restarts: int
    started_at: str


class Victim:
    """One container of a pod."""

    def __init__(self, kubectl: Kubectl, namespace: str, pod: str, container: str) -> None:
        self._kubectl, self._namespace, self.pod, self.container = kubectl, namespace, pod, container

    def send(self, what: signal.Signals) -> None:
        """Send a signal to the container's first process, from outside."""
        os.kill(self.first_pid(), what)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every process of the container while the block runs: its connections stay open and silent."""
        members = _members(self._group())
        for pid in members:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            _send(members, signal.SIGCONT)

    @contextmanager
    def paced(self, is_ahead: Callable[[], bool]) -> Iterator[None]:
        """Stop every process of the container in each moment in which `is_ahead()`, while the block runs. The API
        server may be away meanwhile."""
        group, ended = self._group(), threading.Event()

        def pace() -> None:
            while not ended.wait(PACE_S):
                _send(_members(group), signal.SIGSTOP if is_ahead() else signal.SIGCONT)

        thread = threading.Thread(target=pace, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            _send(_members(group), signal.SIGCONT)

    def run_out_of_memory(self) -> None:
        """Leave the container hardly any memory and have something in it ask for more: the kernel ends it."""
        before = self.life()
        group = self._group()
        _limit_file(group).write_text(str(_held_bytes(group) + OOM_ROOM_BYTES))
        with contextlib.suppress(CommandError):
            self._kubectl.exec(self.pod, self._namespace, self.container, "sh", "-c", _TAKE_ALL_MEMORY)
        wait_until("kubelet saw the container end", lambda: self._ended_since(before))
        # While it restarts a container, kubelet may not report for a moment how the last one ended.
        end = wait_until("kubelet reports how the container ended", self.last_end)
        assert end.get("reason") == "OOMKilled", f"{self.container} ended otherwise: {end}"

    def life(self) -> Life:
        """Return the run that the API server knows of."""
        pod = self._kubectl.get("pod", self.pod, self._namespace)
        return next(life for life in lives([pod]) if life.container == self.container)

    def last_end(self) -> dict[str, Any]:
        """Return how the container last ended: `reason`, `exitCode`; empty if it never did."""
        state = self._status()
        ended: dict[str, Any] = state["state"].get("terminated") or state.get("lastState", {}).get("terminated") or {}
        return ended

    def first_pid(self) -> int:
        """Return the host's id of the container's first process."""
        for pid in _members(self._group()):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split()
                if fields[-1] == "1":
                    return pid
        raise AssertionError(f"{self.container} of {self.pod} has no first process")

    def running(self) -> bool:
        """Whether the container runs and passed its startup probe."""
        state = self._status()
        return bool(state.get("started")) and "running" in state["state"]

    def _ended_since(self, before: Life) -> bool:
        state = self._status()
        return state["restartCount"] > before.restarts or "terminated" in state["state"]

    def _status(self) -> dict[str, Any]:
        pod = self._kubectl.get("pod", self.pod, self._namespace)
        found: dict[str, Any] = next(c for c in _container_states(pod) if c["name"] == self.container)
        return found

    def _group(self) -> Path:
        """Return the container's control group in the hierarchy that bounds memory."""
        container_id = self._status()["containerID"].rpartition("/")[2]
        root = CGROUP_ROOT if is_version_2() else CGROUP_ROOT / "memory"
        found = [Path(folder) for folder, _, _ in os.walk(root) if container_id in os.path.basename(folder)]
        if not found:
            raise AssertionError(f"the processes of {self.container} do not run on this machine")
        return found[0]


def lives(pods: list[dict[str, Any]]) -> frozenset[Life]:
    """Return the runs of all containers of some pods, to see later that none was restarted."""
    return frozenset(
        Life(pod["metadata"]["uid"], state["name"], state["restartCount"], state["state"]["running"]["startedAt"])
        for pod in pods
        for state in _container_states(pod)
        if "running" in state["state"]
    )


def _container_states(pod: dict[str, Any]) -> list[dict[str, Any]]:
    status = pod["status"]
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _members(group: Path) -> list[int]:
    return [int(pid) for listing in group.rglob("cgroup.procs") for pid in listing.read_text().split()]


def _send(members: list[int], what: signal.Signals) -> None:
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def _held_bytes(group: Path) -> int:
    """Return the memory that the kernel cannot take back: no page cache."""
    figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    names = ("anon", "shmem") if is_version_2() else ("total_rss", "total_shmem")
    return sum(int(figures.get(name, 0)) for name in names)


def _limit_file(group: Path) -> Path:
    return group / ("memory.max" if is_version_2() else "memory.limit_in_bytes")
