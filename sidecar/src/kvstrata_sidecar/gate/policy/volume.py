"""Files for the cache server in the pod's memory volume: policy, data keys, and manifests of pools. Each appears whole.

Key files exist for each keyspace and generation that the policy in force names, readable by the pod's own user alone.
They are complete before the cache server applies the policy, except for keys that the bundle only names: their files
are written when the operator delivers them, and the gate keeps no other copy.

A manifest's file is named by its digest, is written before a policy names it, and is removed after the cache server has
applied a policy that does not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Set
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase import LeftKeys
from kvstrata.contract.messages.key_delivery import overwrite
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.cache_view import (
    FRESHNESS_FILE,
    FRESHNESS_FORMAT,
    MANIFESTS_DIRECTORY,
    POLICY_FILE,
    CacheView,
    data_keys,
    manifests,
)
from kvstrata.contract.policy.data_key import (
    DATA_KEY_BYTES,
    KEYS_DIRECTORY,
    BundledKey,
    DataKey,
    file_name,
    key_id,
    parse_file_name,
)
from kvstrata_sidecar.gate import log


class KeyFiles:
    """Keeps the files in `directory` / keys. Raises OSError on failure: a policy without its keys is not applied. A
    predecessor's files are replaced, except for correct keys that the bundle only names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / KEYS_DIRECTORY
        self._written: dict[str, DataKey] = {}
        self._brought: dict[str, str] = {}
        """Ids of delivered keys, by file."""
        self._lacking: dict[str, str] = {}
        """Ids of missing named keys, by file."""
        self.changes = 0

    def __len__(self) -> int:
        return len(self._written) + len(self._brought)

    @property
    def lacking(self) -> frozenset[str]:
        """Ids of keys that the policy names and that were not delivered."""
        return frozenset(self._lacking.values())

    def write(self, keys: Mapping[str, tuple[BundledKey, ...]]) -> None:
        """Write missing or wrong keys of each keyspace, and remove all other files."""
        wanted = {file_name(keyspace, key.generation): key for keyspace, own in keys.items() for key in own}
        if not wanted and not self._directory.exists():
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)
        there = set(os.listdir(self._directory))
        self._lacking = {}
        self._brought = {name: one for name, one in self._brought.items() if name in wanted}
        self.changes += bool(there - wanted.keys())
        for name in there - wanted.keys():
            (self._directory / name).unlink(missing_ok=True)
        self._written = {name: key for name, key in self._written.items() if name in wanted and name in there}
        for name, key in wanted.items():
            if isinstance(key, DataKey):
                if self._written.get(name) != key:
                    self._write(name, key.secret)
                    self._written[name] = key
            elif name not in there or not self._is(name, key.id):
                self._lack(name, key.id)

    def bring(self, secrets: Mapping[str, bytearray]) -> int:
        """Write the missing ones of these keys, by id; return the number of files."""
        fitting = [(name, one) for name, one in self._lacking.items() if one in secrets]
        for name, one in fitting:
            self._write(name, secrets[one])
            self._brought[name] = one
            del self._lacking[name]
        return len(fitting)

    def left(self, keyspaces: Collection[str]) -> LeftKeys:
        """Return counts of these keyspaces' keys in memory and of their files, including all unfinished files."""
        names = [parse_file_name(name) for name in self._written]
        held = sum(name is not None and name[0] in keyspaces for name in names)
        there = os.listdir(self._directory) if self._directory.exists() else []
        files = sum((one := parse_file_name(name)) is None or one[0] in keyspaces for name in there)
        return LeftKeys(gate=held, volume=files)

    def _is(self, name: str, wanted: str) -> bool:
        if self._brought.get(name) == wanted:
            return True
        secret = self._read(name)
        if secret is None:
            return False
        found = key_id(secret)
        overwrite(secret)
        if found == wanted:
            self._brought[name] = wanted
        return found == wanted

    def _lack(self, name: str, wanted: str) -> None:
        """Remove any other file of a named key, and record the key as missing."""
        self._brought.pop(name, None)
        self._written.pop(name, None)
        if (self._directory / name).exists():
            (self._directory / name).unlink(missing_ok=True)
            self.changes += 1
        self._lacking[name] = wanted

    def _read(self, name: str) -> bytearray | None:
        secret = bytearray(DATA_KEY_BYTES)
        try:
            with open(self._directory / name, "rb", buffering=0) as file:
                count = file.readinto(secret)
        except FileNotFoundError:
            return None
        return secret if count == DATA_KEY_BYTES else None

    def _write(self, name: str, secret: bytes | bytearray) -> None:
        write_whole(self._directory, name, secret)
        self.changes += 1


_DRAFT = ".draft"


def write_whole(directory: Path, name: str, content: bytes | bytearray) -> None:
    """Replace a file atomically. Raises OSError, also if it could not be written in full."""
    draft = directory / _DRAFT
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(f"a file in {directory.name} was not written in full")
    finally:
        os.close(descriptor)
    draft.replace(directory / name)


class ManifestFiles:
    """Keeps the files in `directory` / pools. Raises OSError on failure: a policy without them is not applied. A
    predecessor's files are replaced, or removed with the first removal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / MANIFESTS_DIRECTORY
        self._written: set[str] = set()
        self._left = self._directory.exists()
        """Whether there may be files that the policy does not name."""

    def add(self, manifests: Mapping[str, bytes]) -> None:
        if manifests:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        for digest, hashes in manifests.items():
            if digest not in self._written:
                self._write(digest, hashes)
        self._left = self._left or not self._written <= manifests.keys()

    def retain(self, digests: Set[str]) -> None:
        if not self._left:
            return
        for name in set(os.listdir(self._directory)) - digests:
            (self._directory / name).unlink(missing_ok=True)
        self._written &= digests
        self._left = False

    def _write(self, digest: str, hashes: bytes) -> None:
        write_whole(self._directory, digest, hashes)
        self._written.add(digest)


class PolicyVolume:
    """The memory volume that the cache server reads: the policy by atomic rename, freshness in place, data keys and
    manifests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.keys = KeyFiles(directory)
        self._manifests = ManifestFiles(directory)
        self._named: frozenset[str] = frozenset()
        path = directory / FRESHNESS_FILE
        self._freshness = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # A started gate has confirmed nothing yet, regardless of its predecessor's files.
        os.pwrite(self._freshness, FRESHNESS_FORMAT.pack(0), 0)

    def enforced_before(self) -> tuple[int, int]:
        """Return revision and term of the policy of a predecessor in this pod, or zeros."""
        try:
            view = CacheView.decode((self._directory / POLICY_FILE).read_bytes())
        except (OSError, ContractError):
            return (0, 0)
        return (view.revision, view.term)

    def write_policy(self, bundle: Bundle) -> None:
        named = manifests(bundle)
        self._manifests.add(named)
        self.keys.write(data_keys(bundle))
        target = self._directory / POLICY_FILE
        draft = target.with_suffix(".tmp")
        draft.write_bytes(CacheView.of(bundle).encode())
        draft.chmod(0o644)
        draft.replace(target)
        self._named = frozenset(named)

    def keys_left(self, keyspaces: Collection[str]) -> LeftKeys:
        return self.keys.left(keyspaces)

    def policy_applied(self) -> None:
        """Remove manifests that the applied policy does not name."""
        try:
            self._manifests.retain(self._named)
        except OSError as error:
            # They only take room in the volume; the next revision tries again.
            log.warning("manifests that no policy names were not removed", problem=str(error))

    def write_freshness(self, sent_ns: int) -> None:
        """Eight aligned bytes, so no reader sees half of them."""
        os.pwrite(self._freshness, FRESHNESS_FORMAT.pack(sent_ns), 0)

    def close(self) -> None:
        os.close(self._freshness)
