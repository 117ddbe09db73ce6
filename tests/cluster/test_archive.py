"""Images written without any image tool are what an image tool would read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from e2e.cluster.archive import image_identities, unpack_programs, write_image

pytestmark = pytest.mark.claim("an image that the local cluster makes has the content and the identity that it says")


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


def layer(*entries: tuple[str, bytes | str]) -> bytes:
    """A layer of files, and of links, whose target is text; a name that begins with `.wh.` removes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def test_what_is_unpacked_are_the_programs_that_a_container_would_see(tmp_path: Path) -> None:
    first = layer(
        ("usr/bin/kept", b"old"),
        ("usr/bin/replaced", b"old"),
        ("usr/bin/removed", b"old"),
        ("usr/lib/gone/a.so", b"old"),
        ("usr/lib/anew/old.so", b"old"),
        ("usr/share/doc/kept", b"text"),
        ("etc/passwd", b"root"),
    )
    second = layer(
        ("usr/bin/replaced", b"new"),
        ("usr/bin/.wh.removed", b""),
        ("usr/lib/.wh.gone", b""),
        ("usr/lib/anew/.wh..wh..opq", b""),
        ("usr/lib/anew/new.so", b"new"),
        ("usr/lib/link.so", "/usr/lib/anew/new.so"),
    )
    image = layer(
        ("manifest.json", json.dumps([{"Layers": ["1.tar", "2.tar"]}]).encode()), ("1.tar", first), ("2.tar", second)
    )
    (tmp_path / "image.tar").write_bytes(image)
    root = tmp_path / "root"
    unpack_programs(tmp_path / "image.tar", root)
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file() and not path.is_symlink()}
    assert {name: path.read_bytes() for name, path in found.items()} == {
        "usr/bin/kept": b"old",
        "usr/bin/replaced": b"new",
        "usr/lib/anew/new.so": b"new",
    }
    assert found["usr/bin/kept"].stat().st_mode & 0o111 == 0o111
    assert os.readlink(root / "usr/lib/link.so") == "/usr/lib/anew/new.so"


@pytest.mark.parametrize("junk", [b"", b"not a tar at all"])
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "junk.tar").write_bytes(junk)
    with pytest.raises(ValueError, match="not a docker-archive"):
        image_identities(tmp_path / "junk.tar")
