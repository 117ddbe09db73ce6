"""Whether bytes are anywhere in processes and files: what somebody with root on every machine would find."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.processes import recorded_pid
from tests.dataplane import memory_scan


def forms(secret: bytes) -> list[bytes]:
    """The forms in which a secret travels: as it is, as base64, and as base64 of something that holds its base64."""
    text = base64.b64encode(secret)
    within = [text[shift : shift + (len(text) - shift) // 3 * 3] for shift in range(3)]
    return [secret, text, *(base64.b64encode(part) for part in within)]


def processes_with(patterns: Sequence[bytes], processes: Mapping[str, int]) -> set[str]:
    """Return the names of the processes that hold one of the patterns in memory that they may write to."""
    return {name for name, pid in processes.items() if any(memory_scan.in_process(pid, patterns))}


def folders_with(patterns: Sequence[bytes], folders: Mapping[str, Path]) -> set[str]:
    """Return the names of the folders of which a file holds one of the patterns."""
    return {
        name
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and any(memory_scan.in_file(path, patterns))
    }


def control_plane(directory: Path) -> tuple[dict[str, int], dict[str, Path]]:
    """Return the processes of a control plane, and etcd's files."""
    pids = {name: recorded_pid(directory / "pid" / name) for name in ("etcd", "kube-apiserver")}
    data = (directory / "etcd-data").read_text()
    return {name: pid for name, pid in pids.items() if pid is not None}, {"etcd's files": Path(data)}
