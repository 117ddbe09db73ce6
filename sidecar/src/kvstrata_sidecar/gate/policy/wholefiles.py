"""Files that the cache server reads: each appears under its name at once and whole, for the pod's own user alone."""

from __future__ import annotations

import os
from pathlib import Path

_DRAFT = ".draft"


def write_whole(directory: Path, name: str, content: bytes | bytearray) -> None:
    """Write a file, in place of one that has the name. Raises OSError, also where not all of it could be written."""
    draft = directory / _DRAFT
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(f"a file in {directory.name} was not written in full")
    finally:
        os.close(descriptor)
    draft.replace(directory / name)
