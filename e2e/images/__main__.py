"""``python3 -m e2e.images build|load|push|list [NAME ...]``: build images, load them into the cluster in use, push.

Nothing is built or loaded again while its inputs are unchanged. Two images are worked on at a time, the slow one first:
downloads and archives leave room for each other. Without names, all images are meant; `push` then means those that the
chart names. Servers are also unpacked: tests run them on this machine
(`e2e.cluster.rootfs.server_command`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from e2e.cluster import digests
from e2e.cluster.archive import image_identities, unpack_programs
from e2e.cluster.cli import main as cluster
from e2e.cluster.locks import exclusive
from e2e.cluster.progress import ClusterError, Progress, describe
from e2e.cluster.settings import Paths
from e2e.images.catalogue import IMAGES, Image, select
from e2e.images.registry import check_registry, push_archives

AT_A_TIME = 2


def side_by_side(work: Callable[[Image], int], images: Sequence[Image]) -> int:
    """Do some work on each image; returns the first exit code other than 0, or 0. After a failure none is begun."""
    failures: list[int] = []

    def unless_one_failed(image: Image) -> None:
        if not failures and (code := work(image)):
            failures.append(code)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for _ in pool.map(unless_one_failed, sorted(images, key=lambda image: not image.is_slow)):
            pass
    return next(iter(failures), 0)


def build(images: Sequence[Image], paths: Paths) -> int:
    """Build images as docker-archives; returns the exit code of the first that failed, or 0."""
    return side_by_side(lambda image: _build(image, paths), images)


def _build(image: Image, paths: Paths) -> int:
    code = cluster(image.build_command(paths))
    if image.is_server and not code:
        unpack(image, paths)
    return code


def unpack(image: Image, paths: Paths) -> None:
    """Write an image's programs and libraries to where tests look for them; a quick no-op when they are there."""
    name, root = f"unpacked-{image.name}", paths.unpacked(image.name)
    content = digests.digest_of({"images": image_identities(image.archive(paths))})
    with exclusive(paths, name, Progress()):
        if root.is_dir() and digests.is_unchanged(paths, name, content):
            return
        partial = root.with_name(root.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        unpack_programs(image.archive(paths), partial)
        shutil.rmtree(root, ignore_errors=True)
        partial.rename(root)
        digests.remember(paths, name, content)


def load(images: Sequence[Image], paths: Paths) -> int:
    """Build images that are out of date, and load each into the cluster once it is built; returns the exit code."""
    return side_by_side(
        lambda image: _build(image, paths) or cluster(["load", str(image.archive(paths))]),
        images,
    )


def push(images: Sequence[Image], paths: Paths, registry: str) -> int:
    """Build the images, and push them to a registry; returns the exit code."""
    try:
        check_registry(registry)
        if code := build(images, paths):
            return code
        push_archives({image.name_in(registry): image.archive(paths) for image in images}, paths, Progress())
    except ClusterError as error:
        print(describe(error), file=sys.stderr)
        return 1
    return 0


def show(images: Sequence[Image], paths: Paths) -> int:
    """Print the images with their tags and whether they are built; returns 0."""
    for image in images:
        archive = image.archive(paths)
        size = f"{archive.stat().st_size / 1e6:,.0f} MB" if archive.exists() else "not built"
        print(f"{image.name:<12} {image.tag:<40} {size:>10}  {image.purpose}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m e2e.images", description="The images of tests and demos.")
    parser.add_argument("verb", choices=("build", "load", "push", "list"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(image.name for image in IMAGES))
    parser.add_argument("--registry", default="", metavar="HOST/PATH", help="where `push` puts images")
    options = parser.parse_args(arguments)
    try:
        images = select(options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.verb == "push":
        chosen = images if options.names else [image for image in images if image.is_product]
        return push(chosen, Paths(), options.registry)
    return {"build": build, "load": load, "list": show}[options.verb](images, Paths())


if __name__ == "__main__":
    sys.exit(main())
