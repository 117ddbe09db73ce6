"""Files for the cache server in the pod's memory volume: policy, data keys, manifests of pools, access to Redis tiers.

Key files exist for each keyspace and generation that the policy in force names, readable by the pod's own user alone.
They are complete before the cache server applies the policy, except for keys that the bundle only names: their files
are written when the operator delivers them, and the gate keeps no other copy.

A manifest's file is named by its digest. Manifests, and passwords and authorities of tiers, are written before a policy
names them, and removed after the cache server has applied a policy that does not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase import LeftKeys
from kvstrata.contract.messages.key_delivery import overwrite
from kvstrata.contract.policy import cache_view, data_key
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.data_key import BundledKey, DataKey
from kvstrata.contract.policy.tiers import ACCESS_DIRECTORY, files_of
from kvstrata_sidecar.gate import log


class KeyFiles:
    """Keeps the files in `directory` / keys. Raises OSError on failure: a policy without its keys is not applied. A
    predecessor's files are replaced, except for correct keys that the bundle only names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / data_key.KEYS_DIRECTORY
        self._written: dict[str, DataKey] = {}
        self._brought: dict[str, str] = {}  # ids of delivered keys, by file
        self._lacking: dict[str, str] = {}  # ids of missing named keys, by file
        self.changes = 0

    def __len__(self) -> int:
        return len(self._written) + len(self._brought)

    @property
    def lacking(self) -> frozenset[str]:
        """Ids of keys that the policy names and that were not delivered."""
        return frozenset(self._lacking.values())

    def write(self, keys: Mapping[str, tuple[BundledKey, ...]]) -> None:
        """Write missing or wrong keys of each keyspace, and remove all other files."""
        wanted = {data_key.file_name(keyspace, key.generation): key for keyspace, own in keys.items() for key in own}
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
        names = [data_key.parse_file_name(name) for name in self._written]
        held = sum(name is not None and name[0] in keyspaces for name in names)
        there = os.listdir(self._directory) if self._directory.exists() else []
        files = sum((one := data_key.parse_file_name(name)) is None or one[0] in keyspaces for name in there)
        return LeftKeys(gate=held, volume=files)

    def _is(self, name: str, wanted: str) -> bool:
        """Whether a file holds the key with this id."""
        if self._brought.get(name) == wanted:
            return True
        secret = bytearray(data_key.DATA_KEY_BYTES)
        try:
            with open(self._directory / name, "rb", buffering=0) as file:
                found = file.readinto(secret) == len(secret) and data_key.key_id(secret) == wanted
        except FileNotFoundError:
            return False
        finally:
            overwrite(secret)
        if found:
            self._brought[name] = wanted
        return found

    def _lack(self, name: str, wanted: str) -> None:
        """Remove any other file of a named key, and record the key as missing."""
        self._brought.pop(name, None)
        self._written.pop(name, None)
        if (self._directory / name).exists():
            (self._directory / name).unlink(missing_ok=True)
            self.changes += 1
        self._lacking[name] = wanted

    def _write(self, name: str, secret: bytes | bytearray) -> None:
        write_whole(self._directory, name, secret)
        self.changes += 1


def write_whole(directory: Path, name: str, content: bytes | bytearray, mode: int = 0o400) -> None:
    """Replace a file atomically. Raises OSError, also if it could not be written in full."""
    draft = directory / ".draft"
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        if os.write(descriptor, content) != len(content):
            raise OSError(f"a file in {directory.name} was not written in full")
    finally:
        os.close(descriptor)
    draft.replace(directory / name)


class NamedFiles:
    """Keeps the files in `directory` that the policy names. Raises OSError on failure: a policy without them is not
    applied. A predecessor's files are replaced, or removed with the first removal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, bytes] = {}
        self._named: frozenset[str] = frozenset()

    def add(self, files: Mapping[str, bytes]) -> None:
        """Write the files of the next policy."""
        if files:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            if self._written.get(name) != content:
                write_whole(self._directory, name, content)
                self._written[name] = content
        self._named = frozenset(files)

    def retain(self) -> None:
        """Remove the files that were not in the last `add`."""
        there = os.listdir(self._directory) if self._directory.exists() else []
        for name in set(there) - self._named:
            (self._directory / name).unlink(missing_ok=True)
        self._written = {name: content for name, content in self._written.items() if name in self._named}


class PolicyVolume:
    """The volume that the cache server reads. Each file appears whole, except freshness, which is written in place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.keys = KeyFiles(directory)
        self._manifests = NamedFiles(directory / cache_view.MANIFESTS_DIRECTORY)
        self._access = NamedFiles(directory / ACCESS_DIRECTORY)
        path = directory / cache_view.FRESHNESS_FILE
        self._freshness = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # A started gate has confirmed nothing yet, regardless of its predecessor's files.
        os.pwrite(self._freshness, cache_view.FRESHNESS_FORMAT.pack(0), 0)

    def enforced_before(self) -> tuple[int, int]:
        """Return revision and term of the policy of a predecessor in this pod, or zeros."""
        try:
            view = cache_view.CacheView.decode((self._directory / cache_view.POLICY_FILE).read_bytes())
        except (OSError, ContractError):
            return (0, 0)
        return (view.revision, view.term)

    def write_policy(self, bundle: Bundle) -> None:
        self._manifests.add(cache_view.manifests(bundle))
        self._access.add(files_of(bundle.root.access))
        self.keys.write(cache_view.data_keys(bundle))
        write_whole(self._directory, cache_view.POLICY_FILE, cache_view.CacheView.of(bundle).encode(), 0o644)

    def policy_applied(self) -> None:
        """Remove files that the applied policy does not name."""
        try:
            self._manifests.retain()
            self._access.retain()
        except OSError as error:
            # They only take room in the volume; the next revision tries again.
            log.warning("files that no policy names were not removed", problem=str(error))

    def write_freshness(self, sent_ns: int) -> None:
        """Eight aligned bytes, so no reader sees half of them."""
        os.pwrite(self._freshness, cache_view.FRESHNESS_FORMAT.pack(sent_ns), 0)

    def close(self) -> None:
        os.close(self._freshness)
