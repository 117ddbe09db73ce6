"""The data keys' files: one for each keyspace and generation that the policy in force names, for the cache server.

They are in the memory volume of the pod, readable by the pod's own user alone. What is there is exactly what the
policy names before the cache server is asked to apply it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from kvstrata.contract.datakey import KEYS_DIRECTORY, DataKey, file_name, parse_file_name
from kvstrata.contract.erase import LeftKeys

_DRAFT = ".draft"


class KeyFiles:
    """Keeps the files in `directory` / keys. Raises OSError where it cannot: a policy without its keys is not applied.

    What a predecessor in this pod left is replaced.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / KEYS_DIRECTORY
        self._written: dict[str, DataKey] = {}

    def write(self, keys: Mapping[str, tuple[DataKey, ...]]) -> None:
        """Write the keys of each keyspace that are not there as they should be, and remove all other files."""
        wanted = {file_name(keyspace, key.generation): key for keyspace, own in keys.items() for key in own}
        if not wanted and not self._directory.exists():
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)
        there = set(os.listdir(self._directory))
        for name in there - wanted.keys():
            (self._directory / name).unlink(missing_ok=True)
        self._written = {name: key for name, key in self._written.items() if name in wanted and name in there}
        for name, key in wanted.items():
            if self._written.get(name) != key:
                self._write(name, key)

    def left(self, keyspaces: Collection[str]) -> LeftKeys:
        """Return how many keys of these keyspaces are held to be written, and how many files there are, unfinished
        ones of anybody included.
        """
        names = [parse_file_name(name) for name in self._written]
        held = sum(name is not None and name[0] in keyspaces for name in names)
        there = os.listdir(self._directory) if self._directory.exists() else []
        files = sum((one := parse_file_name(name)) is None or one[0] in keyspaces for name in there)
        return LeftKeys(gate=held, volume=files)

    def _write(self, name: str, key: DataKey) -> None:
        draft = self._directory / _DRAFT
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
        try:
            if os.write(descriptor, key.secret) != len(key.secret):
                raise OSError("a data key's file was not written in full")
        finally:
            os.close(descriptor)
        draft.replace(self._directory / name)
        self._written[name] = key
