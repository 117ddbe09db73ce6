"""Images of servers for clusters in pods: those of the catalogue, and of programs that tests install."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.cli import main as cluster
from e2e.cluster.settings import REPOSITORY, TRIXIE, Paths
from e2e.images.__main__ import load
from e2e.images.catalogue import select
from tests.tiers.server_kinds import ServerKind

DOCKERFILE = REPOSITORY / "e2e" / "images" / "server" / "Dockerfile"


def load_server_image(kind: ServerKind) -> str:
    """Build the image of a server if it is not there, load it into the cluster, and return its name.

    Skips the test if the program is not installed. Raises RuntimeError if the image was not built or loaded.
    """
    if kind.image:
        (image,) = select([kind.image])
        if load([image], Paths()):
            raise RuntimeError(f"no image of {kind.name}: the message is above")
        return image.tag
    program = Path(kind.command()[0])
    name = f"kvstrata-{kind.name}"
    tag, archive = f"localhost/{name}:local", Paths().images / f"{name}.tar"
    build = [
        "image", "build",
        "--context", str(program.parent),
        "--file", str(DOCKERFILE),
        "--tag", tag,
        "--build-arg", f"BASE={TRIXIE.base_image}",
        "--build-arg", f"SERVER={program.name}",
        "--out", str(archive),
    ]  # fmt: skip
    if cluster(build) or cluster(["load", str(archive)]):
        raise RuntimeError(f"no image of {kind.name}: the message is above")
    return tag
