"""Write and read images as docker-archive files (as ``docker save`` makes them), with no registry and no image tool."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

IMAGE_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
BLOCK_BYTES = 1 << 20
WHITEOUT = ".wh."
"""Prefix of the name of an entry that removes an entry of an earlier layer."""


def write_image(output: Path, *, tag: str, files: Sequence[tuple[str, Path]], command: Sequence[str]) -> None:
    """Write an image of one layer.

    The same inputs give the same bytes: owners and times are left out.

    Args:
        output: the docker-archive file; replaced only when it is complete.
        tag: the image's name, ``host/name:tag``.
        files: (name in the image, file or folder of the host); symbolic links inside folders are kept.
        command: the image's entry point.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    with _layer(files, output.parent) as layer, tarfile.open(partial, "w") as archive:
        layer_digest = _sha256(layer)
        configuration = json.dumps(
            {
                "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": {"Entrypoint": list(command), "Env": [IMAGE_PATH]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
                "history": [{"created_by": "e2e.cluster"}],
            },
            sort_keys=True,
        ).encode()
        configuration_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
        layer_name = f"{layer_digest}/layer.tar"
        manifest = [{"Config": configuration_name, "RepoTags": [tag], "Layers": [layer_name]}]
        _add_bytes(archive, configuration_name, configuration)
        _add_bytes(archive, "manifest.json", json.dumps(manifest).encode())
        entry = tarfile.TarInfo(layer_name)
        entry.size = layer.seek(0, io.SEEK_END)
        layer.seek(0)
        archive.addfile(entry, layer)
    partial.replace(output)


def image_identities(archive: Path) -> dict[str, str]:
    """The images of a docker-archive: tag to digest of its configuration, which identifies the content.

    Raises:
        ValueError: the file is no docker-archive.
    """
    try:
        with tarfile.open(archive) as opened:
            member = opened.extractfile("manifest.json")
            manifest = json.load(member) if member is not None else []
    except (OSError, tarfile.TarError, KeyError) as error:
        raise ValueError(f"{archive} is not a docker-archive: {error}") from error
    return {tag: Path(image["Config"]).stem for image in manifest for tag in image["RepoTags"] or []}


def unpack_programs(archive: Path, target: Path) -> None:
    """Write programs and libraries of an image (its ``usr`` without ``usr/share``) into a new folder.

    Entries of an earlier layer that a later one removes are left out, as a container would not see them.
    """
    with tarfile.open(archive) as opened:
        member = opened.extractfile("manifest.json")
        assert member is not None
        (image,) = json.load(member)
        for name in image["Layers"]:
            with tarfile.open(fileobj=opened.extractfile(name)) as layer:
                _apply(layer, target)


def _apply(layer: tarfile.TarFile, target: Path) -> None:
    # Images have absolute links, which Python refuses by default from version 3.14 on.
    layer.extraction_filter = lambda entry, _: entry
    for entry in layer:
        path = Path(entry.name)
        if path.parts[:1] != ("usr",) or path.parts[:2] == ("usr", "share"):
            continue
        if path.name == WHITEOUT + WHITEOUT + ".opq":
            _remove(target / path.parent)
            (target / path.parent).mkdir()
        elif path.name.startswith(WHITEOUT):
            _remove(target / path.with_name(path.name.removeprefix(WHITEOUT)))
        else:
            if not entry.isdir():
                _remove(target / path)
            layer.extract(entry, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _layer(files: Sequence[tuple[str, Path]], folder: Path) -> Iterator[IO[bytes]]:
    """A layer's tar in a temporary file beside the output, positioned at its beginning."""
    with tempfile.TemporaryFile(dir=folder) as stream:
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as layer:
            for name, source in files:
                layer.add(source, arcname=name.lstrip("/"), filter=_anonymous)
        stream.seek(0)
        yield stream


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _sha256(stream: IO[bytes]) -> str:
    state = hashlib.sha256()
    while block := stream.read(BLOCK_BYTES):
        state.update(block)
    return state.hexdigest()


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
