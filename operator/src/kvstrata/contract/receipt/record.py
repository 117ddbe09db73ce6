"""Receipts: signed records of erasures, chained for each domain.

A record names its domain, its number in the domain's chain, the digest of its predecessor and its signer. It is an
erasure with its claims, or the hand-over from one signing key to the next. A receipt is a record with its signatures,
as canonical JSON: a document that differs by one byte is refused.

Receipts are read for years, so a reader takes every version up to its own. Of later ones it can read the head, which
never changes: an operator that was rolled back continues a chain that a newer one wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from kvstrata.contract import MALFORMED, ContractError, Meaningful
from kvstrata.contract.receipt.claims import claims, contradiction, required_residue
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.receipt.vocabulary import Moment, Name, evidence
from kvstrata.contract.wire import Form, HexDigest, canonical_json, digest_bytes, from_wire, no_constant, to_wire

RECEIPT_VERSION = 1
MAX_RECEIPT_BYTES = 64 * 1024 * 1024
SIGNED_PREFIX = b"kvstrata receipt\n"
"""Signed bytes begin with this, so that no other document's signature is a receipt's."""

_HEAD = ("domain", "namespace", "previous", "sequence", "signer")

IsSigned = Callable[[bytes, bytes, bytes], bool]


class Fault(Meaningful):
    """Why a receipt or a chain is refused."""

    MALFORMED = "Malformed", "This is no receipt, or it was changed."
    NOT_CANONICAL = "NotCanonical", "The bytes are not those that were written: the file was changed."
    UNKNOWN_VERSION = "UnknownVersion", "A newer version wrote this receipt: verify it with a newer plugin."
    CLAIMS_EXCEED_FACTS = "ClaimsExceedFacts", "The receipt claims more than its facts prove."
    RESIDUE_WITHHELD = "ResidueWithheld", "The facts show residue that the receipt does not name."
    CONTRADICTION = "Contradiction", "The facts cannot all be so."
    KEY_SWAPPED = "KeySwapped", "The public key in the file is not the signing key that the receipt names."
    SIGNATURE_FORGED = "SignatureForged", "The signature does not belong to this receipt: one of the two was changed."
    UNKNOWN_SIGNER = "UnknownSigner", "None of the given public keys signed this."
    OTHER_DOMAIN = "OtherDomain", "Receipts of several domains are no chain."
    CHAIN_BEGINS_LATE = "ChainBeginsLate", "The first receipts of the chain are missing."
    CHAIN_HOLE = "ChainHole", "A receipt in the middle of the chain is missing."
    CHAIN_FORK = "ChainFork", "Two receipts follow the same one: the history was rewritten, or two operators signed."
    CHAIN_BROKEN = "ChainBroken", "A receipt does not follow the one before it: one of the two was replaced."
    CHAIN_TRUNCATED = "ChainTruncated", "The chain does not end with the receipt that it should end with."
    KEY_CHANGED = "KeyChanged", "The signing key changed without a hand-over."


class ReceiptError(ContractError):
    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault}: {fault.meaning} ({detail})")
        self.fault = fault


class HandOverKind(StrEnum):
    ROTATED = "Rotated"
    LOST = "Lost"


@evidence
class HandOver:
    """The signing key changes. From the next record on the new key signs."""

    kind: HandOverKind
    """Rotated: the old key signed this. Lost: it was gone, so the new key alone signed, and no other vouches for it."""

    new_key: HexDigest
    """Key id of the new key: the SHA-256 of its 32 bytes."""

    at: Moment
    """When."""


@evidence
class Head:
    """A record's place in its chain; the same in every version."""

    domain: Annotated[str, Form("[0-9a-f]{1,32}", "domain id")]
    """The domain's random id."""

    namespace: Name
    """Its namespace."""

    sequence: int
    """The record's number, from 1."""

    previous: HexDigest | None
    """Digest of the record before; null for the first."""

    signer: HexDigest
    """Key id of the key that signs this record."""


@dataclass(frozen=True, slots=True)
class Record:
    """One link of a domain's chain: exactly one of `erasure`, which claims `claimed`, and `hand_over`."""

    head: Head
    erasure: Erasure | None = None
    claimed: tuple[ReceiptClaim, ...] = ()
    hand_over: HandOver | None = None

    @classmethod
    def of_erasure(cls, head: Head, erasure: Erasure) -> Record:
        """Return the record of an erasure, with all claims that its facts prove. Raises ReceiptError for facts that
        readers would refuse."""
        record = cls(head, erasure, claims(erasure))
        record.check()
        return record

    def encode(self) -> bytes:
        """Return the canonical bytes, of which digest and signatures are made."""
        body: dict[str, Any]
        if self.hand_over is not None:
            body = {"handOver": to_wire(self.hand_over)}
        else:
            body = {"erasure": to_wire(self.erasure), "claims": [str(claim) for claim in self.claimed]}
        return canonical_json({"receipt": RECEIPT_VERSION, **to_wire(self.head), **body})

    def check(self) -> None:
        """Raise ReceiptError if this claims more than its facts prove, omits residue, or contradicts itself."""
        if (self.erasure is None) == (self.hand_over is None):
            raise ReceiptError(Fault.MALFORMED, "a record is an erasure or a hand-over")
        if self.erasure is None:
            return
        wrong = contradiction(self.erasure)
        if wrong:
            raise ReceiptError(Fault.CONTRADICTION, wrong)
        quiet = required_residue(self.erasure) - {item.kind for item in self.erasure.residue}
        if quiet:
            raise ReceiptError(Fault.RESIDUE_WITHHELD, f"{min(quiet)} is not named")
        beyond = [claim for claim in self.claimed if claim not in claims(self.erasure)]
        if beyond:
            raise ReceiptError(Fault.CLAIMS_EXCEED_FACTS, f"{beyond[0]} is not proven")
        if len(set(self.claimed)) != len(self.claimed):
            raise ReceiptError(Fault.MALFORMED, "a claim is there twice")


@evidence
class Signature:
    """An ed25519 signature over `signed_bytes` of a record, and the public key that it is to be checked with."""

    public_key: Annotated[str, Form("[0-9a-f]{64}", "public key")]
    value: Annotated[str, Form("[0-9a-f]{128}", "signature")]

    @property
    def key_id(self) -> str:
        return key_id(bytes.fromhex(self.public_key))


@dataclass(frozen=True, slots=True)
class Link:
    """A receipt as far as every version can read it: its place in the chain, its bytes, and its signatures.

    `body` is the record as JSON, of any version.
    """

    head: Head
    version: int
    signatures: tuple[Signature, ...]
    body: Mapping[str, Any]
    signed: bytes

    @property
    def digest(self) -> str:
        """The digest by which the next record names this one."""
        return digest_bytes(self.signed)

    @property
    def subject_uid(self) -> str | None:
        """Uid of the order, None if unknown."""
        erasure = self.body.get("erasure")
        subject = erasure.get("subject") if isinstance(erasure, dict) else None
        uid = subject.get("uid") if isinstance(subject, dict) else None
        return uid if isinstance(uid, str) else None

    @property
    def next_signer(self) -> str:
        """Key id of the key that signs the next record, according to this one: after a hand-over the new one."""
        change = self.body.get("handOver")
        new = change.get("newKey") if isinstance(change, dict) else None
        return new if isinstance(new, str) else self.head.signer


@dataclass(frozen=True, slots=True)
class Receipt:
    record: Record
    link: Link


def key_id(public_key: bytes) -> str:
    """Return the id of an ed25519 public key: the SHA-256 of its 32 bytes."""
    return digest_bytes(public_key)


def signed_bytes(record: bytes) -> bytes:
    """Return the bytes to sign for a record's canonical bytes."""
    return SIGNED_PREFIX + record


def encode_receipt(record: bytes, signatures: tuple[Signature, ...]) -> bytes:
    """Return the file of a receipt: its record, which `Record.encode` gave, and the signatures over it."""
    return canonical_json({"record": json.loads(record), "signatures": [to_wire(one) for one in signatures]})


def read_link(data: bytes) -> Link:
    """Return a receipt's place in its chain, of any version. Raises ReceiptError for anything but a canonical receipt.

    One line feed at the end is allowed, because editors and shells add it.
    """
    data = data.removesuffix(b"\n")
    if len(data) > MAX_RECEIPT_BYTES:
        raise ReceiptError(Fault.MALFORMED, f"it has more than {MAX_RECEIPT_BYTES} bytes")
    with _refusals():
        raw = json.loads(data.decode("utf-8"), parse_constant=no_constant)
        if canonical_json(raw) != data:
            raise ReceiptError(Fault.NOT_CANONICAL, "it reads otherwise than it is written")
        if not isinstance(raw, dict) or raw.keys() != {"record", "signatures"} or not isinstance(raw["record"], dict):
            raise ReceiptError(Fault.MALFORMED, "a receipt has a record and signatures")
        body = raw["record"]
        version = body.get("receipt")
        if type(version) is not int or version < 1:
            raise ReceiptError(Fault.MALFORMED, "it has no version")
        head = from_wire(Head, {name: body[name] for name in _HEAD}, "record")
        signatures = from_wire(_Signed, {"signatures": raw["signatures"]}, "receipt").signatures
    if head.sequence < 1 or (head.sequence == 1) != (head.previous is None):
        raise ReceiptError(Fault.MALFORMED, "only the first record of a chain has no predecessor")
    return Link(head, version, signatures, body, canonical_json(body))


def read_receipt(data: bytes) -> Receipt:
    """Return a receipt whose facts bear its claims; signatures and chain are not checked here.

    Raises ReceiptError for everything else.
    """
    link = read_link(data)
    if link.version > RECEIPT_VERSION:
        raise ReceiptError(Fault.UNKNOWN_VERSION, f"version {link.version}, and this knows {RECEIPT_VERSION}")
    record = _read_record(link)
    record.check()
    successors = 1 if record.hand_over is not None and record.hand_over.kind is HandOverKind.ROTATED else 0
    if len(link.signatures) != 1 + successors:
        raise ReceiptError(Fault.MALFORMED, "it has more or fewer signatures than it needs")
    return Receipt(record, link)


def check_signatures(link: Link, is_signed: IsSigned) -> None:
    """Raise ReceiptError unless every signature holds, the first is by the record's signer, and a second one by the key
    that the record hands over to.

    `is_signed(public key, message, signature)` returns whether an ed25519 signature holds. `read_receipt` checks that
    all required signatures exist; this reads records of any version.
    """
    signers = list(dict.fromkeys((link.head.signer, link.next_signer)))
    if not link.signatures or len(link.signatures) > len(signers):
        raise ReceiptError(Fault.MALFORMED, "it has more or fewer signatures than it needs")
    for signer, signature in zip(signers, link.signatures, strict=False):
        if signature.key_id != signer:
            raise ReceiptError(Fault.KEY_SWAPPED, f"it should be key {signer[:16]}, and is {signature.key_id[:16]}")
        public_key, value = bytes.fromhex(signature.public_key), bytes.fromhex(signature.value)
        if not is_signed(public_key, signed_bytes(link.signed), value):
            raise ReceiptError(Fault.SIGNATURE_FORGED, f"key {signer[:16]} did not sign it")


@evidence
class _Signed:
    signatures: tuple[Signature, ...]


@evidence
class _ErasureBody:
    erasure: Erasure
    claims: tuple[ReceiptClaim, ...]


@evidence
class _HandOverBody:
    hand_over: HandOver


def _read_record(link: Link) -> Record:
    body = {name: value for name, value in link.body.items() if name not in (*_HEAD, "receipt")}
    with _refusals():
        if "handOver" not in body:
            erased = from_wire(_ErasureBody, body, "record")
            return Record(link.head, erased.erasure, erased.claims)
        change = from_wire(_HandOverBody, body, "record").hand_over
        # A lost key signs nothing: its successor does, from this record on.
        if change.kind is HandOverKind.LOST and change.new_key != link.head.signer:
            raise ReceiptError(Fault.MALFORMED, "a key that followed a lost one did not sign that it did")
        return Record(link.head, hand_over=change)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of reading into ReceiptError."""
    try:
        yield
    except ReceiptError:
        raise
    except ContractError as error:
        raise ReceiptError(Fault.MALFORMED, str(error)) from None
    except MALFORMED as error:
        raise ReceiptError(Fault.MALFORMED, type(error).__name__) from None
