"""A build that the disk has no room for is told of before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e.cluster import disk
from e2e.cluster.disk import GIB, LEAST_BYTES, warn_of_little_room
from e2e.cluster.progress import ClusterError

pytestmark = pytest.mark.claim("a disk without room is told of before anything is built")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder `.local` that takes 8 MiB, whatever the length of its files says."""
    local = tmp_path / ".local"
    local.mkdir()
    (local / "built").write_bytes(b"1" * (8 << 20))
    with open(local / "sparse", "wb") as sparse:
        sparse.truncate(100 * GIB)
    return local


def leave(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    def usage(of: Path) -> SimpleNamespace:
        assert of.exists()
        return SimpleNamespace(free=free_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_enough_is_not_spoken_of(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 5 * GIB)
    assert warn_of_little_room(local, 5 * GIB) is None
    assert warn_of_little_room(local.parent / "not made yet", 5 * GIB) is None


def test_what_is_built_counts(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 5 * GIB)
    assert warn_of_little_room(local, 5 * GIB + (8 << 20)) is None
    warning = warn_of_little_room(local, 22 * GIB)
    assert warning is not None
    assert "takes about 22 GiB when everything is built; it has 0.0 GiB, and the disk has 5.0 GiB left" in warning


def test_nothing_is_begun_on_a_disk_that_is_full(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, LEAST_BYTES - 1)
    with pytest.raises(ClusterError, match="has 1023 MiB left; the kubelet evicts pods below 512 MiB") as refused:
        warn_of_little_room(local, disk.CLUSTER_BYTES)
    assert "make clean" in refused.value.advice
