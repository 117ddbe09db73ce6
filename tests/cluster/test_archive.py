"""Images written without any image tool are what an image tool would read."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from e2e.cluster.archive import image_identities, write_image


@pytest.fixture
def content(tmp_path: Path) -> Path:
    folder = tmp_path / "content"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_bytes(b"\x7fELF")
    (folder / "bin" / "tool").chmod(0o755)
    (folder / "bin" / "alias").symlink_to("tool")
    return folder


def write(output: Path, content: Path, tag: str = "localhost/tool:1") -> None:
    write_image(output, tag=tag, files=[("/opt", content)], command=["/opt/bin/tool"])


def test_every_digest_in_the_image_is_that_of_its_content(tmp_path: Path, content: Path) -> None:
    write(tmp_path / "image.tar", content)
    with tarfile.open(tmp_path / "image.tar") as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive.getmembers()}  # type: ignore[union-attr]
    (image,) = json.loads(files["manifest.json"])
    configuration = files[image["Config"]]
    assert image["Config"] == f"{hashlib.sha256(configuration).hexdigest()}.json"
    layers = [f"sha256:{hashlib.sha256(files[name]).hexdigest()}" for name in image["Layers"]]
    assert json.loads(configuration)["rootfs"]["diff_ids"] == layers
    assert json.loads(configuration)["config"]["Entrypoint"] == ["/opt/bin/tool"]


def test_the_layer_keeps_modes_and_links(tmp_path: Path, content: Path) -> None:
    write(tmp_path / "image.tar", content)
    with tarfile.open(tmp_path / "image.tar") as archive:
        (layer_name,) = json.load(archive.extractfile("manifest.json"))[0]["Layers"]  # type: ignore[arg-type]
        with tarfile.open(fileobj=archive.extractfile(layer_name)) as layer:
            assert layer.getmember("opt/bin/tool").mode & 0o111 == 0o111
            assert layer.getmember("opt/bin/alias").linkname == "tool"


def test_the_same_content_is_the_same_image_whenever_it_is_written(tmp_path: Path, content: Path) -> None:
    write(tmp_path / "first.tar", content)
    os.utime(content / "bin" / "tool", (1, 1))
    write(tmp_path / "second.tar", content)
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()


def test_changed_content_has_another_identity(tmp_path: Path, content: Path) -> None:
    write(tmp_path / "first.tar", content)
    (content / "bin" / "tool").write_bytes(b"changed")
    write(tmp_path / "second.tar", content)
    first, second = image_identities(tmp_path / "first.tar"), image_identities(tmp_path / "second.tar")
    assert first.keys() == second.keys() == {"localhost/tool:1"}
    assert first != second


@pytest.mark.parametrize("junk", [b"", b"not a tar at all"])
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "junk.tar").write_bytes(junk)
    with pytest.raises(ValueError, match="not a docker-archive"):
        image_identities(tmp_path / "junk.tar")
