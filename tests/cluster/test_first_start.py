"""The first start: steps that need nothing of each other run side by side, and a failure ends with nothing left."""

from __future__ import annotations

import argparse
import fcntl
import io
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from e2e.cluster import build, image_build, local, locks, rootfs
from e2e.cluster.build import CLUSTER_PROGRAMS, KUBERNETES, PAUSE, build_binaries
from e2e.cluster.cli import Commands
from e2e.cluster.image_build import Buildah
from e2e.cluster.local import LocalCluster
from e2e.cluster.locks import exclusive
from e2e.cluster.node import Node
from e2e.cluster.node_components import NodeComponents
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import TRIXIE, Paths
from e2e.images.__main__ import AT_A_TIME, side_by_side
from e2e.images.catalogue import IMAGES, Image, select

MEETING_S = 20
"""How long one step waits here for another that is to run beside it."""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "local")


@pytest.fixture
def progress() -> Progress:
    return Progress(io.StringIO())


def recorded(calls: list[str], name: str) -> Callable[..., None]:
    return lambda *_, **__: calls.append(name)


def test_the_slow_image_is_worked_on_beside_the_others_in_turn() -> None:
    meeting, begun = Barrier(AT_A_TIME), list[str]()

    def work(image: Image) -> int:
        begun.append(image.name)
        if len(begun) <= AT_A_TIME:
            meeting.wait(MEETING_S)
        return 0

    assert side_by_side(work, select(["operator", "sidecar", "engine-cpu"])) == 0
    assert sorted(begun) == ["engine-cpu", "operator", "sidecar"]
    assert set(begun[:AT_A_TIME]) == {"engine-cpu", "operator"}


def test_after_a_failed_image_none_is_begun_and_its_exit_code_is_returned() -> None:
    begun: list[str] = []

    def work(image: Image) -> int:
        begun.append(image.name)
        return 3

    assert side_by_side(work, IMAGES) == 3
    assert len(begun) <= AT_A_TIME


def test_the_base_image_is_made_beside_the_builders_root_file_system(
    paths: Paths, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, pulled = Barrier(2), list[str]()

    def debootstrap(_: Paths, target: Path, debian: Any, packages: Any, *, log: Path) -> None:
        for folder in ("etc/dpkg/dpkg.cfg.d", "usr"):
            (target / folder).mkdir(parents=True)
        (target / "etc/debian_version").write_text(debian.point_release)
        meeting.wait(MEETING_S)

    for module in (image_build, rootfs):
        monkeypatch.setattr(module, "debootstrap", debootstrap)
        monkeypatch.setattr(module, "require_root", lambda _: None)
    monkeypatch.setattr(Buildah, "_run", lambda _, *words, **__: pulled.append(words[0]))
    Buildah(paths).ensure_base(TRIXIE, progress)
    assert (paths.rootfs / "etc/debian_version").exists()
    assert (paths.images / "base-trixie.tar").exists()
    assert pulled == ["pull"]
    Buildah(paths).ensure_base(TRIXIE, progress)
    assert pulled == ["pull"], "nothing is to be done again"


def test_a_line_of_progress_is_one_write() -> None:
    writes: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    Progress(Stream()).report("one line")
    assert "".join(writes) == "one line\n"
    assert len([text for text in writes if text]) == 1


def test_a_program_does_not_wait_for_another_that_is_compiled(
    paths: Paths, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(build, "output_of", lambda _: "go1.26")
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/go")
    monkeypatch.setattr(build, "_build_changed", lambda _, __, program, *___: built.append(program.name))
    with exclusive(paths, f"binary-{KUBERNETES.name}", progress):
        build_binaries(paths, progress, [PAUSE])
    build_binaries(paths, progress, CLUSTER_PROGRAMS)
    assert built == ["pause", "kubernetes", "pause"]


class Parts:
    """The parts of a local cluster, which only record that they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.programs: list[str] = []
        monkeypatch.setattr(local, "build_binaries", self._build)
        for name in ("build_rootfs", "require_root"):
            monkeypatch.setattr(local, name, lambda *_: None)
        for name in ("start", "destroy"):
            monkeypatch.setattr(Node, name, recorded(self.calls, name))
        monkeypatch.setattr(Node, "command", lambda _: ["true"])
        monkeypatch.setattr(NodeComponents, "start_containerd", recorded(self.calls, "containerd"))
        monkeypatch.setattr(local, "load_into_node", self._load)
        self._failure = failure

    def _build(self, _: Paths, __: Progress, programs: Any = CLUSTER_PROGRAMS) -> None:
        self.programs += [program.name for program in programs]

    def _load(self, *_: Any) -> None:
        self.calls.append("load")
        if self._failure is not None:
            raise self._failure


def test_images_are_loaded_before_kubernetes_is_compiled(
    paths: Paths, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    LocalCluster(paths, progress).load([])
    assert parts.programs == ["pause"]
    assert parts.calls == ["destroy", "start", "containerd", "load", "destroy"]


def test_a_failed_load_leaves_no_node(paths: Paths, progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch, ClusterError("full"))
    with pytest.raises(ClusterError, match="full"):
        LocalCluster(paths, progress).load([])
    assert parts.calls[-1] == "destroy"


def test_a_cluster_that_is_up_keeps_its_node(paths: Paths, progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    monkeypatch.setattr(LocalCluster, "is_up", lambda _: True)
    LocalCluster(paths, progress).load([])
    assert (parts.programs, parts.calls) == ([], ["load"])


def test_images_can_be_loaded_while_a_start_builds_but_not_while_it_starts_the_node(
    paths: Paths, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_during: list[str] = []

    def noted(step: str) -> Callable[[LocalCluster], None]:
        def note(_: LocalCluster) -> None:
            with (paths.locks / locks.CLUSTER).open("w") as lock, suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free_during.append(step)

        return note

    paths.locks.mkdir(parents=True)
    for step in ("prepare", "up"):
        monkeypatch.setattr(LocalCluster, step, noted(step))
    Commands(paths, progress).up(argparse.Namespace(cluster="local"))
    assert free_during == ["prepare"]
