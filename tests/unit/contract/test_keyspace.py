"""Keyspaces: no two scopes or epochs share one, and none is minted from a weak key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.policy.keyspace import (
    PUBLIC_SCOPE,
    Scope,
    ScopeKind,
    derive_keyspace,
    epoch_from_random,
    is_epoch,
    is_keyspace,
)

KEY = bytes(range(32))
EPOCH = "0" * 32

scopes = st.builds(Scope, st.sampled_from(ScopeKind), st.text(max_size=12))
epochs = st.binary(min_size=16, max_size=16).map(epoch_from_random)


@given(st.tuples(scopes, epochs), st.tuples(scopes, epochs))
def test_two_scopes_or_epochs_never_share_a_keyspace(a: tuple[Scope, str], b: tuple[Scope, str]) -> None:
    assert (derive_keyspace(KEY, *a) == derive_keyspace(KEY, *b)) == (a == b)


def test_no_field_can_be_read_as_part_of_its_neighbour() -> None:
    # Without length prefixes both would be hashed as "TenantTenantx".
    one = Scope(ScopeKind.TENANT, "Tenantx")
    other = Scope(ScopeKind.TENANT, "x")
    assert derive_keyspace(KEY, one, EPOCH) != derive_keyspace(KEY, other, EPOCH)
    moved = [derive_keyspace(KEY, Scope(ScopeKind.GROUP, name), EPOCH) for name in ("", "0", "00")]
    assert len(set(moved)) == 3


def test_the_derivation_is_what_earlier_versions_stored_under() -> None:
    assert derive_keyspace(KEY, Scope(ScopeKind.TENANT, "acme"), EPOCH) == "de1d83e3f294ef727b17283b5a1bedcf"
    assert derive_keyspace(KEY, PUBLIC_SCOPE, EPOCH) == "aadcb20fd015f7db0cbb3527b584ee6e"


@pytest.mark.parametrize("length", [0, 16, 31])
def test_a_short_domain_key_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        derive_keyspace(bytes(length), PUBLIC_SCOPE, EPOCH)


@pytest.mark.parametrize("epoch", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n"])
def test_a_malformed_epoch_is_refused(epoch: str) -> None:
    assert not is_epoch(epoch)
    with pytest.raises(ValueError, match="epoch"):
        derive_keyspace(KEY, PUBLIC_SCOPE, epoch)


@given(scopes, epochs)
def test_a_keyspace_is_a_salt_that_every_engine_accepts_and_names_nobody(scope: Scope, epoch: str) -> None:
    keyspace = derive_keyspace(KEY, scope, epoch)
    assert is_keyspace(keyspace)
    assert len(keyspace) == 32
    assert set(keyspace) <= set("0123456789abcdef")


@pytest.mark.parametrize("length", [15, 17])
def test_an_epoch_takes_exactly_sixteen_random_bytes(length: int) -> None:
    with pytest.raises(ValueError, match="16"):
        epoch_from_random(bytes(length))
