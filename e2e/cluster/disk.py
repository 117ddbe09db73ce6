"""Check of the disk's free space before a build begins, instead of a build or a pod that stops halfway."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from e2e.cluster.progress import ClusterError

GIB = 1 << 30
CLUSTER_BYTES = 17 * GIB
"""Disk space of a local cluster that runs the demo: built binaries, images, and the node's copy of them."""

ALL_BYTES = 22 * GIB
"""With all that tests install besides."""

LEAST_BYTES = GIB
"""Least free space in any case: the local cluster's kubelet evicts pods when half of it is left."""


def warn_of_little_room(local: Path, needed_bytes: int) -> str | None:
    """Return a warning if the free space and the size of `local` are less than `needed_bytes`, which is an estimate.

    Raises ClusterError if less than LEAST_BYTES are free: nothing could run.
    """
    free_bytes = shutil.disk_usage(local if local.exists() else local.parent).free
    if free_bytes < LEAST_BYTES:
        raise ClusterError(
            f"the disk of {local} has {free_bytes >> 20} MiB left; the kubelet evicts pods below "
            f"{LEAST_BYTES >> 21} MiB",
            advice="free some space; `make clean` removes everything that was built",
        )
    if free_bytes >= needed_bytes:
        return None
    built_bytes = _size_of(local)
    if free_bytes + built_bytes >= needed_bytes:
        return None
    whole, built, free = (size / GIB for size in (needed_bytes, built_bytes, free_bytes))
    return (
        f"warning: {local} takes about {whole:.0f} GiB when everything is built; it has {built:.1f} GiB, and the disk"
        f" has {free:.1f} GiB left. If a step fails because the disk is full, free some space."
    )


def _size_of(folder: Path) -> int:
    """Return the disk space of the files below a folder."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
