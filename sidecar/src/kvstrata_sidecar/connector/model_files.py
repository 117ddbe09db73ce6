"""A digest of a model's files that takes seconds for hundreds of gigabytes.

The digest is of names, lengths and contents. Files without weights (configuration, tokenizer, code) are read whole.
Of a file of weights its header is read, which has names, shapes and places of all tensors, and a stripe in the middle
of at most `MAX_STRIPES` tensors, spread evenly over the file; of other large files as many stripes.

It misses a change of weights that keeps every name, length and header and all bytes of the stripes: a few edited
elements, or an edited tensor among those without a stripe. Training, merging and quantization change tensors densely
and are seen. It also misses files that change after they were read. Files that change between their loading and the
digest have the digest of other weights than are loaded; so a caller can require that nothing changed since a moment.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

WHOLE_BYTES = 8 << 20
"""Files of weights up to this length are read whole."""

OTHERS_WHOLE_BYTES = 64 << 20
"""The same of other files: a tokenizer of 256,000 words has 33 MB."""

STRIPE_BYTES = 4096
MAX_STRIPES = 256
MAX_HEADER_BYTES = 64 << 20

SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin", ".gguf", ".pt", ".pth")

PASSED_OVER = (".md", ".png", ".jpg", ".lock", ".incomplete")
"""Suffixes of files that no engine reads."""

LENGTH_BYTES = 8


class FilesChangedError(Exception):
    """A model's files may be others than those that were loaded."""


class ModelFiles:
    """Digests of files in a directory; `read_bytes` counts all bytes read. None may have changed after
    `unchanged_since_s`, in seconds since 1970."""

    def __init__(self, unchanged_since_s: float = math.inf) -> None:
        self.read_bytes = 0
        self._unchanged_since_s = unchanged_since_s

    def digest(self, directory: Path, suffixes: Sequence[str] = (), *, downloaded: bool = False) -> str:
        """Return 64 hexadecimal digits for all files below `directory`, or for those with one of `suffixes`. Raises
        OSError for a directory without such files and for a file that cannot be read. Raises FilesChangedError, unless
        they are `downloaded`, if one was written, replaced, renamed or removed too late, or a link to it, or if a
        folder on the way was renamed; that is missed if an entry of this folder came or went afterwards."""
        whole = hashlib.sha256()
        found = sorted(_files(directory, tuple(suffixes)))
        if not found:
            raise FileNotFoundError(f"{directory} holds no files of a model")
        for path in found:
            whole.update(f"{path.relative_to(directory)}\0".encode())
            whole.update(self._digest_of(path))
        if not downloaded:  # after all reads, because a change meanwhile counts as well
            # Beside a single file others may come and go.
            folders = set() if suffixes else {directory, *(path.parent for path in found)}
            self._require_unchanged({*found, *folders, *(link for path in found for link in _links(path.absolute()))})
        return whole.hexdigest()

    def _require_unchanged(self, paths: Collection[Path]) -> None:
        # Each write and rename sets this time, and no caller can set it back.
        changed = [path for path in paths for about in (path.lstat(), path.stat()) if self._is_late(about)]
        places = {place for path in paths for place in (path.parent.resolve() / path.name, path.resolve())}
        for folder in {folder for place in places for folder in place.parents}:
            about = folder.stat()
            # Entries of others come and go, which sets both times; a rename of the folder sets the former alone.
            if self._is_late(about) and about.st_ctime_ns != about.st_mtime_ns:
                changed.append(folder)
        if changed:
            raise FilesChangedError(f"{changed[0]} changed while the engine started: restart the pod to reuse blocks")

    def _is_late(self, about: os.stat_result) -> bool:
        return about.st_ctime > self._unchanged_since_s

    def _digest_of(self, path: Path) -> bytes:
        own = hashlib.sha256()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            own.update(size.to_bytes(LENGTH_BYTES, "little"))
            if size > _whole_bytes(path):  # without it the kernel reads 128 KiB and more for a stripe
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for start, length in self._parts(descriptor, path, size):
                own.update(self._read(descriptor, start, length))
        finally:
            os.close(descriptor)
        return own.digest()

    def _parts(self, descriptor: int, path: Path, size: int) -> Iterator[tuple[int, int]]:
        """Yield start and length of the parts to read."""
        if size <= _whole_bytes(path):
            yield 0, size
            return
        middles: list[int] = []
        if path.suffix == SAFETENSORS:
            length = int.from_bytes(self._read(descriptor, 0, LENGTH_BYTES), "little")
            if length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                yield 0, LENGTH_BYTES + length
                middles = _middles(self._read(descriptor, LENGTH_BYTES, length), LENGTH_BYTES + length)
        if not middles:
            middles = [size * number // (MAX_STRIPES - 1) for number in range(MAX_STRIPES)]
        if len(middles) > MAX_STRIPES:  # with the first and the last
            last = len(middles) - 1
            middles = [middles[number * last // (MAX_STRIPES - 1)] for number in range(MAX_STRIPES)]
        for middle in middles:
            start = max(0, min(size - STRIPE_BYTES, middle - STRIPE_BYTES // 2))
            yield start, STRIPE_BYTES

    def _read(self, descriptor: int, start: int, length: int) -> bytes:
        data = bytearray()
        while len(data) < length and (part := os.pread(descriptor, length - len(data), start + len(data))):
            data += part
        self.read_bytes += len(data)
        return bytes(data)


def _whole_bytes(path: Path) -> int:
    return WHOLE_BYTES if path.suffix in WEIGHTS else OTHERS_WHOLE_BYTES


def _files(directory: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files to digest. Hidden names belong to downloaders and file systems, as `..data` of a ConfigMap."""
    for folder, folders, names in os.walk(directory, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            wanted = name.endswith(suffixes) if suffixes else not name.endswith(PASSED_OVER)
            if wanted and not name.startswith(".") and path.is_file():
                yield path


def _links(path: Path) -> Iterator[Path]:
    """Yield the symbolic links on the way to an absolute path."""
    for part in (path, *path.parents):
        if part.is_symlink():
            yield part
            yield from _links(part.parent / part.readlink())


def _middles(header: bytes, start: int) -> list[int]:
    """Return the middle of each tensor in a safetensors file; empty for a malformed header."""
    try:
        tensors = json.loads(header)
        places = [one["data_offsets"] for name, one in tensors.items() if name != "__metadata__"]
        return sorted(start + (int(first) + int(last)) // 2 for first, last in places)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
