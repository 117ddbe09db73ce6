"""Content digests of inputs, so that nothing is built or loaded again while its inputs are unchanged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from e2e.cluster.settings import Paths


def digest_of(values: Mapping[str, object], trees: Iterable[Path] = ()) -> str:
    """A SHA-256 over plain values and over the names, modes and contents of files and folders."""
    state = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for tree in trees:
        for path in sorted(tree.rglob("*")) if tree.is_dir() else [tree]:
            _add_path(state, path, path.relative_to(tree))
    return state.hexdigest()


def _add_path(state: hashlib._Hash, path: Path, name: Path) -> None:
    if path.is_symlink():
        content = os.readlink(path).encode()
        kind = "link"
    elif path.is_file():
        content = path.read_bytes()
        kind = f"file {path.stat().st_mode & 0o111:o}"
    else:
        return
    state.update(f"{name}\0{kind}\0{len(content)}\0".encode())
    state.update(content)


def is_unchanged(paths: Paths, name: str, digest: str) -> bool:
    """True when ``name`` was last completed with exactly these inputs."""
    try:
        return (paths.digests / name).read_text() == digest
    except OSError:
        return False


def remember(paths: Paths, name: str, digest: str) -> None:
    """Record that ``name`` was completed with these inputs. Call it only after success."""
    paths.digests.mkdir(parents=True, exist_ok=True)
    (paths.digests / name).write_text(digest)


def forget(paths: Paths, name: str) -> None:
    """Make the next :func:`is_unchanged` false; call it before an output is replaced."""
    (paths.digests / name).unlink(missing_ok=True)
