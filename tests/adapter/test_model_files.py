"""The digest of a model's files: which changes it sees, and what it reads."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata_sidecar.connector import model_files
from kvstrata_sidecar.connector.model_files import MAX_STRIPES, STRIPE_BYTES, WHOLE_BYTES, FilesChangedError, ModelFiles

GIB = 1 << 30
TENSOR_BYTES = 16 << 10
TENSORS = 24
SHARD = "model-00001-of-00002.safetensors"
LONGEST_S = 5.0


def header_of(tensors: int, tensor_bytes: int) -> bytes:
    """Return length and header of a safetensors file with tensors of this size."""
    named = {
        f"layers.{number}.weight": {
            "dtype": "BF16",
            "shape": [tensor_bytes // 2],
            "data_offsets": [number * tensor_bytes, (number + 1) * tensor_bytes],
        }
        for number in range(tensors)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **named}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two shards in its directory, as a PersistentVolumeClaim has it; only small files are read whole."""
    monkeypatch.setattr(model_files, "WHOLE_BYTES", 8 * STRIPE_BYTES)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "tokenizer.json").write_text("[]")
    for name in (SHARD, SHARD.replace("00001", "00002", 1)):
        header = header_of(TENSORS, TENSOR_BYTES)
        (directory / name).write_bytes(header + os.urandom(TENSORS * TENSOR_BYTES))
    return directory


def edit(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def retrain(directory: Path) -> None:
    """Change one tensor of 24 in one of the shards."""
    start = len(header_of(TENSORS, TENSOR_BYTES)) + 7 * TENSOR_BYTES
    edit(directory / SHARD, start, os.urandom(TENSOR_BYTES))


def flip_in_a_stripe(directory: Path) -> None:
    """Change the byte in the middle of a tensor."""
    middle = len(header_of(TENSORS, TENSOR_BYTES)) + 7 * TENSOR_BYTES + TENSOR_BYTES // 2
    byte = (directory / SHARD).read_bytes()[middle]
    edit(directory / SHARD, middle, bytes([byte ^ 1]))


def lengthen(directory: Path) -> None:
    with (directory / SHARD).open("ab") as file:
        file.write(b"\0")


def swap_shards(directory: Path) -> None:
    first, second = sorted(directory.glob("*.safetensors"))
    first.rename(directory / "x")
    second.rename(first)
    (directory / "x").rename(second)


SEEN: dict[str, Callable[[Path], object]] = {
    "one retrained tensor": retrain,
    "a bit in a stripe": flip_in_a_stripe,
    "a byte of a header": lambda directory: edit(directory / SHARD, 40, b"X"),
    "another configuration": lambda directory: (directory / "config.json").write_text('{"hidden_size": 9}'),
    "another tokenizer": lambda directory: (directory / "tokenizer.json").write_text("{}"),
    "a longer shard": lengthen,
    "a shard less": lambda directory: (directory / SHARD).unlink(),
    "shards in another order": swap_shards,
    "code beside the weights": lambda directory: (directory / "modeling.py").write_text("x = 1"),
}


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN.keys())
def test_a_change_of_the_model_is_seen(model: Path, change: Callable[[Path], object]) -> None:
    before = ModelFiles().digest(model)
    change(model)
    assert ModelFiles().digest(model) != before


def settled_s() -> float:
    """Wait until a change has a later time than all before, and return a moment between them."""
    time.sleep(0.02)
    now_s = time.time()
    time.sleep(0.02)
    return now_s


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN.keys())
def test_files_that_changed_too_late_have_no_digest(model: Path, change: Callable[[Path], object]) -> None:
    files = ModelFiles(settled_s())
    assert files.digest(model)
    change(model)
    with pytest.raises(FilesChangedError, match="changed while the engine started"):
        files.digest(model)
    assert files.digest(model, downloaded=True)


def test_a_write_that_keeps_length_and_times_is_a_change(model: Path) -> None:
    about, files = (model / SHARD).stat(), ModelFiles(settled_s())
    flip_in_a_stripe(model)
    os.utime(model / SHARD, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(FilesChangedError):
        files.digest(model)


def test_another_directory_behind_a_link_is_a_change_also_if_its_files_are_older(model: Path) -> None:
    current, latest, other = (model.with_name(name) for name in ("current", "latest", "other"))
    shutil.copytree(model, other)
    latest.symlink_to(model)
    current.symlink_to(latest)
    files = ModelFiles(settled_s())
    assert files.digest(current)
    swapped = model.with_name("swapped")
    swapped.symlink_to(other)
    swapped.rename(latest)
    with pytest.raises(FilesChangedError, match="latest changed"):
        files.digest(current)
    model.rename(model.with_name("moved"))
    other.rename(model)
    with pytest.raises(FilesChangedError):
        files.digest(model)


@pytest.mark.parametrize("suffixes", [(), (SHARD,)], ids=["folder", "file"])
@pytest.mark.parametrize("path", ["models/team/model", "here/model", "current"])
def test_another_folder_on_the_way_is_a_change_also_if_all_in_it_is_older(
    model: Path, tmp_path: Path, path: str, suffixes: tuple[str, ...]
) -> None:
    for place in ("models", "later"):
        shutil.copytree(model, tmp_path / place / "team" / "model")
    (tmp_path / "here").symlink_to(tmp_path / "models" / "team")
    (tmp_path / "current").symlink_to(tmp_path / "here" / "model")
    files = ModelFiles(settled_s())
    (tmp_path / "models" / "another").mkdir()
    (tmp_path / "beside").write_text("other models come and go")
    assert files.digest(tmp_path / path, suffixes)
    (tmp_path / "models").rename(tmp_path / "former")
    (tmp_path / "later").rename(tmp_path / "models")
    with pytest.raises(FilesChangedError, match="models changed while the engine started"):
        files.digest(tmp_path / path, suffixes)
    assert files.digest(tmp_path / path, suffixes, downloaded=True)


def test_a_single_file_does_not_change_with_its_neighbours(model: Path) -> None:
    files = ModelFiles(settled_s())
    (model / "another.gguf").write_bytes(b"x")
    assert files.digest(model, (SHARD,))
    retrain(model)
    with pytest.raises(FilesChangedError):
        files.digest(model, (SHARD,))


def test_a_large_tokenizer_is_read_whole(model: Path) -> None:
    tokenizer = model / "tokenizer.json"
    tokenizer.write_bytes(bytes(33 << 20))
    before = ModelFiles().digest(model)
    edit(tokenizer, 20_000_001, b"x")
    assert ModelFiles().digest(model) != before


def test_a_copy_with_other_times_and_documents_is_the_same_model(model: Path) -> None:
    before = ModelFiles().digest(model)
    os.utime(model / SHARD, (1, 1))
    (model / "README.md").write_text("# A model")
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").write_text("")
    assert ModelFiles().digest(model) == before
    linked = model.with_name("snapshot")
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    assert ModelFiles().digest(linked) == before, "as the hub's cache has it"


@pytest.mark.parametrize("bytes_edited", [1, (TENSOR_BYTES - STRIPE_BYTES) // 2])
def test_edited_elements_between_the_stripes_are_missed(model: Path, bytes_edited: int) -> None:
    before = ModelFiles().digest(model)
    edit(model / SHARD, len(header_of(TENSORS, TENSOR_BYTES)), os.urandom(bytes_edited))
    assert ModelFiles().digest(model) == before


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b"[1, 2, 3]"])
def test_weights_with_a_malformed_header_are_read_in_stripes(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(2 * WHOLE_BYTES))
    files = ModelFiles()
    before = files.digest(tmp_path)
    assert files.read_bytes <= MAX_STRIPES * STRIPE_BYTES + 64
    edit(path, WHOLE_BYTES, os.urandom(WHOLE_BYTES))
    assert ModelFiles().digest(tmp_path) != before


def test_a_directory_without_a_model_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ModelFiles().digest(tmp_path)


@pytest.mark.parametrize("tensors", [24, 3000], ids=["dense", "many experts"])
def test_140_gigabytes_take_seconds_and_few_bytes(tmp_path: Path, tensors: int) -> None:
    shards, shard_bytes = 30, 140 * GIB // 30
    header = header_of(tensors, shard_bytes // tensors)
    for number in range(shards):
        path = tmp_path / f"model-{number:05}-of-{shards:05}.safetensors"
        path.write_bytes(header)
        os.truncate(path, shard_bytes)
    (tmp_path / "config.json").write_text("{}")
    files, began_s = ModelFiles(), time.process_time()
    files.digest(tmp_path)
    took_s = time.process_time() - began_s
    assert files.read_bytes <= shards * (MAX_STRIPES * STRIPE_BYTES + 2 * len(header)) + 2
    assert took_s < LONGEST_S
