"""Deterministic signatures of receipts. The offline verifier uses them, so this imports only `cryptography`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvstrata.contract.receipt.record import Record, Signature, encode_receipt, key_id, signed_bytes
from kvstrata.contract.receipt.vocabulary import moment_in_s

CURRENT_KEY = "current.pem"
PREVIOUS_KEY = "previous.pem"
SINCE_KEY = "since"


class SigningError(ValueError):
    """A key is missing or unusable."""


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """The signing key, and the previous one until every chain has been handed over. `since` is when the current key
    came into use, in UTC and whole seconds."""

    current: Ed25519PrivateKey = field(repr=False)
    since: str
    previous: Ed25519PrivateKey | None = field(default=None, repr=False)

    @property
    def current_id(self) -> str:
        return key_id(_raw(self.current))

    @property
    def previous_id(self) -> str | None:
        return None if self.previous is None else key_id(_raw(self.previous))

    def rotated(self, since: str) -> SigningKeys:
        """Return new keys with the current one as the previous. Raises SigningError if there is a previous one
        already: a chain not handed over could not be continued."""
        if self.previous is not None:
            raise SigningError("the last rotation is not over: some chain has not been handed over")
        return SigningKeys(Ed25519PrivateKey.generate(), since, self.current)

    def without_previous(self) -> SigningKeys:
        """For use when every chain has been handed over to the current key."""
        return SigningKeys(self.current, self.since)

    def secret_data(self) -> dict[str, bytes]:
        data = {CURRENT_KEY: _private_pem(self.current), SINCE_KEY: self.since.encode()}
        return data if self.previous is None else data | {PREVIOUS_KEY: _private_pem(self.previous)}

    @classmethod
    def from_secret_data(cls, data: Mapping[str, bytes]) -> SigningKeys:
        """Read the Secret's data. Raises SigningError, which does not quote it."""
        try:
            since = data[SINCE_KEY].decode("ascii")
            moment_in_s(since)
            previous = _private(data[PREVIOUS_KEY]) if PREVIOUS_KEY in data else None
            return cls(_private(data[CURRENT_KEY]), since, previous)
        except (KeyError, ValueError, TypeError):
            raise SigningError("the Secret holds no usable ed25519 key") from None

    def sign(self, record: Record) -> bytes:
        """Return a record's receipt, signed by the key that its head names, a rotation by both keys. Raises
        SigningError without that key, and ReceiptError for an invalid record."""
        record.check()
        keys = {key_id(_raw(key)): key for key in (self.current, self.previous) if key is not None}
        signers = [record.head.signer]
        change = record.hand_over
        if change is not None and change.new_key != record.head.signer:
            signers.append(change.new_key)
        if missing := [signer for signer in signers if signer not in keys]:
            raise SigningError(f"there is no private key {missing[0][:16]}")
        body = record.encode()
        signatures = (
            Signature(_raw(keys[signer]).hex(), keys[signer].sign(signed_bytes(body)).hex()) for signer in signers
        )
        return encode_receipt(body, tuple(signatures))

    def public_pems(self) -> dict[str, bytes]:
        return {key_id(_raw(key)): public_pem(_raw(key)) for key in (self.current, self.previous) if key is not None}


def generate(since: str) -> SigningKeys:
    return SigningKeys(Ed25519PrivateKey.generate(), since)


def is_signed(public_key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_pem(public_key: bytes) -> bytes:
    return Ed25519PublicKey.from_public_bytes(public_key).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def read_public_pem(data: bytes) -> bytes:
    """Return the key's 32 bytes. Raises SigningError for anything but an ed25519 public key in PEM."""
    try:
        found = serialization.load_pem_public_key(data)
    except (ValueError, TypeError):
        raise SigningError("it is no public key in PEM") from None
    if not isinstance(found, Ed25519PublicKey):
        raise SigningError("it is no ed25519 key")
    return found.public_bytes_raw()


def _raw(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _private(pem: bytes) -> Ed25519PrivateKey:
    found = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(found, Ed25519PrivateKey):
        raise SigningError("it is no ed25519 key")
    return found


def _private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
