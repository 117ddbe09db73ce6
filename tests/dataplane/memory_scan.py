"""Finds bytes in a process' memory and in files: whether what was erased is erased."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PIECE_BYTES = 32 << 20


def in_process(pid: int, patterns: Sequence[bytes]) -> list[int]:
    """Return how often each pattern occurs in what the process has mapped to write to, shared memory included."""
    found = [0] * len(patterns)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if "w" not in rights or line.endswith("[vvar]"):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            for position in range(start, end, PIECE_BYTES):
                try:
                    memory.seek(position)
                    piece = memory.read(min(PIECE_BYTES, end - position))
                except OSError:
                    break
                _count(piece, patterns, found)
    return found


def in_file(path: Path, patterns: Sequence[bytes]) -> list[int]:
    """Return how often each pattern occurs in a file."""
    found = [0] * len(patterns)
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            _count(piece, patterns, found)
    return found


def _count(piece: bytes, patterns: Sequence[bytes], found: list[int]) -> None:
    for number, pattern in enumerate(patterns):
        found[number] += piece.count(pattern)
