"""The control plane that other tests run against: it serves, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from e2e.cluster import control_plane
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.processes import wait_until
from e2e.cluster.progress import ClusterError
from e2e.cluster.settings import KUBERNETES_VERSION, Paths, kubebuilder_assets

pytestmark = [
    pytest.mark.apiserver,
    pytest.mark.claim("a control plane serves, is stopped by whoever has its folder, and names a component that dies"),
]

needs_binaries = pytest.mark.skipif(
    not ((kubebuilder_assets() or Paths().bin) / "kube-apiserver").exists(),
    reason="no kube-apiserver: run `python3 -m e2e.cluster build`, or set KUBEBUILDER_ASSETS",
)


def processes_that_name(folder: Path) -> list[str]:
    """Command lines of all running processes in which a folder occurs."""
    return list(_processes_that_name(folder).values())


def _processes_that_name(folder: Path) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in command:
                found[int(entry.name)] = command
    return found


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of etcd's data, which other control planes do not share."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(control_plane, "MEMORY_FOLDER", folder)
    return folder


@needs_binaries
def test_a_control_plane_serves_and_leaves_nothing_behind(tmp_path: Path, memory: Path) -> None:
    with ControlPlane(tmp_path) as plane:
        version = plane.get("/version")["gitVersion"]
        if kubebuilder_assets() is None:
            assert version == f"v{KUBERNETES_VERSION}"
        command = [plane.kubectl, "--kubeconfig", plane.kubeconfig, "get", "namespace", "default", "-o", "name"]

        def has_default() -> bool:
            """Whether there is the namespace that the API server makes by itself, after it is ready."""
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            return answer.stdout == "namespace/default\n"

        assert wait_until(has_default, timeout_s=60)
        assert plane.kubeconfig.stat().st_mode & 0o077 == 0, "others can read the administrator's key"
        assert len(processes_that_name(tmp_path)) == 2

    assert processes_that_name(tmp_path) == []
    assert list(memory.iterdir()) == []
    assert not plane.kubeconfig.exists()


@needs_binaries
def test_another_object_on_the_same_folder_stops_what_the_first_started(tmp_path: Path) -> None:
    first, second = ControlPlane(tmp_path), ControlPlane(tmp_path)
    first.start()
    try:
        assert second.is_running()
        with pytest.raises(ClusterError, match="already runs"):
            second.start()
    finally:
        second.stop()
    assert not first.is_running()
    assert processes_that_name(tmp_path) == []


@pytest.mark.skipif(kubebuilder_assets() is not None, reason="KUBEBUILDER_ASSETS has no kube-scheduler")
def test_a_scheduler_that_ends_is_started_again_until_the_control_plane_stops(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, scheduler=True):

        def schedulers() -> set[int]:
            running = _processes_that_name(tmp_path).items()
            return {pid for pid, command in running if Path(command.split()[0]).name == "kube-scheduler"}

        assert wait_until(lambda: len(schedulers()) == 1, timeout_s=60)
        (first,) = schedulers()
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: len(schedulers() - {first}) == 1, timeout_s=60)
    assert wait_until(lambda: processes_that_name(tmp_path) == [], timeout_s=10)


def test_a_folder_without_binaries_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="etcd is not there") as refused:
        ControlPlane(tmp_path / "state", binaries=tmp_path).start()
    assert "e2e.cluster build" in refused.value.advice


@needs_binaries
def test_a_component_that_dies_is_named_with_its_log_and_nothing_keeps_running(tmp_path: Path, memory: Path) -> None:
    real = kubebuilder_assets() or Paths().bin
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "etcd").symlink_to(real / "etcd")
    broken = binaries / "kube-apiserver"
    broken.write_text("#!/bin/sh\necho it broke\nexit 1\n")
    broken.chmod(0o755)

    with pytest.raises(ClusterError, match="kube-apiserver died") as refused:
        ControlPlane(tmp_path / "state", binaries=binaries).start()

    assert refused.value.log is not None
    assert "it broke" in refused.value.log.read_text()
    assert processes_that_name(tmp_path) == []
    assert list(memory.iterdir()) == []
