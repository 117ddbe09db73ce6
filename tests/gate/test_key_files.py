"""The data keys' files: what the policy names and nothing else, readable by one user, before the policy itself."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules
from kvstrata.contract.policy.cache_view import POLICY_FILE
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata_sidecar.gate.policy.volume import KeyFiles, PolicyVolume

A, B = "a" * 32, "b" * 32
OLD, NEW = DataKey(1, b"1" * 32), DataKey(2, b"2" * 32)


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / KEYS_DIRECTORY).iterdir()}


def test_files_are_what_the_policy_names_now(tmp_path: Path) -> None:
    files = KeyFiles(tmp_path)
    files.write({A: (OLD,), B: (OLD,)})
    assert listing(tmp_path) == {f"{A}.1": OLD.secret, f"{B}.1": OLD.secret}
    files.write({A: (NEW, OLD)})
    assert listing(tmp_path) == {f"{A}.1": OLD.secret, f"{A}.2": NEW.secret}
    files.write({})
    assert listing(tmp_path) == {}


def test_a_file_is_readable_by_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KeyFiles(tmp_path).write({A: (OLD,)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / KEYS_DIRECTORY / f"{A}.1").stat().st_mode) == 0o400
    assert stat.S_IMODE((tmp_path / KEYS_DIRECTORY).stat().st_mode) == 0o700


def test_what_is_as_it_should_be_is_not_written_again(tmp_path: Path) -> None:
    files = KeyFiles(tmp_path)
    files.write({A: (OLD,)})
    inode = (tmp_path / KEYS_DIRECTORY / f"{A}.1").stat().st_ino
    files.write({A: (OLD,)})
    assert (tmp_path / KEYS_DIRECTORY / f"{A}.1").stat().st_ino == inode
    (tmp_path / KEYS_DIRECTORY / f"{A}.1").unlink()
    files.write({A: (OLD,)})
    assert listing(tmp_path) == {f"{A}.1": OLD.secret}


def test_what_a_predecessor_left_is_replaced(tmp_path: Path) -> None:
    KeyFiles(tmp_path).write({A: (DataKey(1, b"x" * 32),), B: (OLD,)})
    (tmp_path / KEYS_DIRECTORY / ".draft").write_bytes(b"half")
    KeyFiles(tmp_path).write({A: (OLD,)})
    assert listing(tmp_path) == {f"{A}.1": OLD.secret}


def test_a_bundle_without_keys_makes_no_directory(tmp_path: Path) -> None:
    KeyFiles(tmp_path).write({})
    assert list(tmp_path.iterdir()) == []


def test_a_policy_whose_keys_cannot_be_written_is_not_written(tmp_path: Path) -> None:
    volume = PolicyVolume(tmp_path)
    (tmp_path / KEYS_DIRECTORY).write_bytes(b"in the way")
    entry = Entry("acme", A, Scope(ScopeKind.TENANT, "acme"), "uid", keys=(OLD,))
    with pytest.raises(FileExistsError):
        volume.write_policy(Bundle(Root("d" * 16, "m", "u", 1, 1, Rules(), ()), {"acme": entry}))
    assert not (tmp_path / POLICY_FILE).exists()
    volume.close()
