"""Keys that sign receipts: kept in a Secret, rotated without a gap, printed nowhere."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvstrata.clients.pki import generate_key
from kvstrata.clients.signing import (
    CURRENT_KEY,
    PREVIOUS_KEY,
    SINCE_KEY,
    SigningError,
    SigningKeys,
    generate,
    is_signed,
    public_pem,
    read_public_pem,
)
from kvstrata.contract.receipt.chain import check_chain
from kvstrata.contract.receipt.record import key_id, read_receipt
from tests.support.receipts import SINCE, erasure, issue, keys, rotation


def test_keys_are_read_from_their_secret_as_they_were_put_there() -> None:
    both = generate(SINCE).rotated(SINCE)
    read = SigningKeys.from_secret_data(both.secret_data())
    assert (read.current_id, read.previous_id, read.since) == (both.current_id, both.previous_id, SINCE)
    assert PREVIOUS_KEY not in both.without_previous().secret_data()


def test_a_rotation_carries_a_chain_from_one_key_to_the_next() -> None:
    old = generate(SINCE)
    first = issue(old, None, erasure("order-1"))
    both = old.rotated(SINCE)
    assert both.previous_id == old.current_id != both.current_id
    second = issue(both, first, rotation(both), signer=both.previous_id)
    third = issue(both.without_previous(), second, erasure("order-2"))
    receipts = [read_receipt(data) for data in (first, second, third)]
    assert check_chain(receipts, is_signed, {old.current_id}).unvouched == ()


def test_a_rotation_waits_for_the_one_before() -> None:
    with pytest.raises(SigningError, match="not over"):
        generate(SINCE).rotated(SINCE).rotated(SINCE)


def test_nothing_is_signed_in_the_name_of_a_key_that_is_not_there() -> None:
    with pytest.raises(SigningError, match=keys(2).current_id[:16]):
        issue(keys(1), None, erasure(), signer=keys(2).current_id)


def test_the_same_record_is_signed_to_the_same_bytes() -> None:
    assert issue(keys(), None, erasure()) == issue(keys(), None, erasure())


def test_a_public_key_is_read_from_what_is_published() -> None:
    for identifier, pem in keys(2, previous=1).public_pems().items():
        assert key_id(read_public_pem(pem)) == identifier


def test_other_keys_than_ed25519_are_refused_without_being_quoted() -> None:
    other = generate_key()
    assert isinstance(other, ec.EllipticCurvePrivateKey)
    private = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = other.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    good = generate(SINCE).secret_data()
    broken = (
        {**good, CURRENT_KEY: private},
        {**good, CURRENT_KEY: b"no key"},
        {**good, SINCE_KEY: b"yesterday"},
        {**good, PREVIOUS_KEY: b""},
        {SINCE_KEY: SINCE.encode()},
    )
    for data in broken:
        with pytest.raises(SigningError) as refused:
            SigningKeys.from_secret_data(data)
        assert "BEGIN" not in str(refused.value)
    for pem in (public, b"", good[CURRENT_KEY]):
        with pytest.raises(SigningError):
            read_public_pem(pem)


def test_nothing_prints_a_private_key() -> None:
    both = keys(2, previous=1)
    shown = f"{both!r} {both}"
    for seed in (1, 2):
        assert (bytes([seed]) * 32).hex() not in shown
    assert "PrivateKey" not in shown


def test_a_public_key_that_is_none_signs_nothing() -> None:
    assert not is_signed(b"short", b"message", b"s" * 64)
    assert public_pem(keys().current.public_key().public_bytes_raw()).startswith(b"-----BEGIN PUBLIC KEY")
