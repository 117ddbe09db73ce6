"""What a cache server logs in to Redis tiers with: files of the policy volume, and nothing in policy.json."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import Bundle, Root, Rules
from kvstrata.contract.policy.cache_view import POLICY_FILE
from kvstrata.contract.policy.tiers import ACCESS_DIRECTORY, Server, TierAccess, TierRules
from kvstrata_sidecar.gate.policy.volume import PolicyVolume

FULL = TierAccess(b"password-1", b"authority-1")


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[PolicyVolume]:
    made = PolicyVolume(tmp_path)
    yield made
    made.close()


def bundle(**access: TierAccess) -> Bundle:
    tiers = tuple(TierRules(name, (Server("r", 1),), 1, password=True) for name in access)
    return Bundle(Root("d" * 16, "m", "u", 1, 1, Rules(), (), tiers=tiers, access=access))


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / ACCESS_DIRECTORY).iterdir()}


def test_they_are_there_before_the_policy_and_go_after_it_was_applied(volume: PolicyVolume, tmp_path: Path) -> None:
    volume.write_policy(bundle(shared=FULL, far=TierAccess(b"password-2")))
    there = {"shared.password": b"password-1", "shared.ca.crt": b"authority-1", "far.password": b"password-2"}
    assert listing(tmp_path) == there
    volume.write_policy(bundle(far=TierAccess(b"password-3")))
    assert listing(tmp_path) == there | {"far.password": b"password-3"}
    volume.policy_applied()
    assert listing(tmp_path) == {"far.password": b"password-3"}


def test_they_are_readable_by_one_user_and_no_other_file_has_what_they_have(
    volume: PolicyVolume, tmp_path: Path
) -> None:
    volume.write_policy(bundle(shared=FULL))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ACCESS_DIRECTORY).iterdir()} == {0o400}
    policy = (tmp_path / POLICY_FILE).read_bytes()
    assert b'"shared"' in policy
    assert b"password-1" not in policy
    assert b"authority-1" not in policy


def test_a_policy_whose_access_cannot_be_written_is_not_written(volume: PolicyVolume, tmp_path: Path) -> None:
    (tmp_path / ACCESS_DIRECTORY).write_bytes(b"in the way")
    with pytest.raises(FileExistsError):
        volume.write_policy(bundle(shared=FULL))
    assert not (tmp_path / POLICY_FILE).exists()


def test_no_representation_shows_them() -> None:
    assert "password-1" not in repr(bundle(shared=FULL))
    assert "authority-1" not in repr(bundle(shared=FULL))
