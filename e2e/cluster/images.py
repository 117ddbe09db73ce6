"""The images that the cluster itself needs, and loading images into the node."""

from __future__ import annotations

import subprocess
from pathlib import Path

from e2e.cluster import digests
from e2e.cluster.archive import image_identities, write_image
from e2e.cluster.build import KUBERNETES, PAUSE
from e2e.cluster.node import Node
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import COREDNS_IMAGE, PAUSE_IMAGE, Paths

CONTAINERD_NAMESPACE = "k8s.io"


def build_system_images(paths: Paths, progress: Progress) -> list[Path]:
    """Write the images of pause and CoreDNS from the built binaries, unless they are there already.

    Returns:
        Their docker-archive files.
    """
    pause, coredns = paths.images / "pause.tar", paths.images / "coredns.tar"
    for output, tag, program, name in (
        (pause, PAUSE_IMAGE, PAUSE, "/pause"),
        (coredns, COREDNS_IMAGE, KUBERNETES, "/coredns"),
    ):
        source = paths.bin / program.name
        if output.exists() and output.stat().st_mtime_ns > source.stat().st_mtime_ns:
            continue
        with progress.step(f"write the image {tag}"):
            write_image(output, tag=tag, files=[(name, source)], command=[name])
    return [pause, coredns]


def load_into_node(node: Node, paths: Paths, archives: list[Path], progress: Progress) -> None:
    """Import docker-archives into the node's containerd; those whose content is there already are skipped.

    Raises:
        ClusterError: a file is no docker-archive, or the import failed.
    """
    for archive in archives:
        identities = read_identities(archive)
        # Kept on the node's disk, so that the record vanishes with the image store that it describes.
        record = paths.node_disk / "containerd" / "kvstrata-imported"
        if all(_recorded(record, tag) == identity for tag, identity in identities.items()):
            progress.report(f"{', '.join(identities)}: already in the cluster")
            continue
        with progress.step(f"load {', '.join(identities)} into the cluster ({archive.stat().st_size >> 20} MiB)"):
            _import(node, archive)
        record.mkdir(parents=True, exist_ok=True)
        for tag, identity in identities.items():
            (record / _file_name(tag)).write_text(identity)


def read_identities(archive: Path) -> dict[str, str]:
    """As :func:`image_identities`, with an error for the user."""
    try:
        identities = image_identities(archive)
    except ValueError as error:
        advice = "make it with `python3 -m e2e.cluster image build ... --out FILE.tar` or `docker save`"
        raise ClusterError(str(error), advice=advice) from error
    if not identities:
        raise ClusterError(f"{archive} holds no image with a name", advice="save it by name: `docker save NAME:TAG`")
    return identities


def _import(node: Node, archive: Path) -> None:
    # From standard input, because the file may lie where the node cannot see it.
    with archive.open("rb") as content:
        finished = subprocess.run(
            [*node.command(), "ctr", "--namespace", CONTAINERD_NAMESPACE, "images", "import", "-"],
            stdin=content,
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode != 0:
        raise ClusterError(f"containerd did not import {archive}: {finished.stderr.strip()}")


def _recorded(record: Path, tag: str) -> str | None:
    try:
        return (record / _file_name(tag)).read_text()
    except OSError:
        return None


def _file_name(tag: str) -> str:
    return digests.digest_of({"tag": tag})
