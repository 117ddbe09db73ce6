"""The operator's certificate authority for gates, managed Redis servers and its own client: P-256 keys, PEM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstrata.model.redis.credentials import TlsFacts
from kvstrata.objects import names

AUTHORITY_LIFETIME = timedelta(days=3650)
LEAF_LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from this long before their issue, because clocks of nodes differ."""

RENEW_AT_REMAINING = 1 / 3
"""A certificate is replaced when this share of its lifetime is left."""

MAX_COMMON_NAME = 64
"""RFC 5280, ub-common-name; subject alternative names have no such bound."""

TLS_KEYS = (names.CERTIFICATE_KEY, names.PRIVATE_KEY_KEY, names.AUTHORITY_KEY)

PrivateKey = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key (PKCS #8), both PEM."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def generate_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def create_authority(common_name: str, now: datetime, key: PrivateKey) -> KeyPair:
    """Return a self-signed authority that may sign leaves only, valid for ten years. `now` is aware, here and below."""
    name = _subject(common_name)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _certificate(name, name, key, now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return KeyPair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def issue_server(
    authority: KeyPair, dns_names: Sequence[str], now: datetime, key: PrivateKey, *, for_peers: bool = False
) -> KeyPair:
    """Return a server certificate for `dns_names`, valid for one year but never longer than its authority. With
    `for_peers` it is a client certificate, too, as servers of a Redis Cluster need. Raises ValueError for no names,
    or for an authority that cannot be read."""
    if not dns_names:
        raise ValueError("a server certificate needs at least one DNS name")
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if for_peers else [])]
    return _issue(authority, dns_names[0], now, key, usages, alternatives)


def issue_client(authority: KeyPair, common_name: str, now: datetime, key: PrivateKey) -> KeyPair:
    """Return a client certificate, valid for one year. Raises ValueError for an authority that cannot be read."""
    return _issue(authority, common_name, now, key, [ExtendedKeyUsageOID.CLIENT_AUTH], None)


def needs_renewal(certificate_pem: bytes, now: datetime) -> bool:
    """Whether a certificate is unreadable, not valid yet, or in the last third of its life."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError:
        return True
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now < start or end - now <= (end - start) * RENEW_AT_REMAINING


def fingerprint(certificate_pem: bytes) -> str:
    """SHA-256 of the first certificate of a PEM file, in hexadecimal; raises ValueError if there is none."""
    return x509.load_pem_x509_certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()


def together(*authorities_pem: bytes) -> bytes:
    """Return one PEM file with every distinct authority, in order; unreadable ones are left out."""
    found = (_pem(one) for pem in authorities_pem for one in _certificates(pem))
    return b"".join(dict.fromkeys(found))


def describe(values: Mapping[str, bytes], authority_pem: bytes, changed_at: datetime) -> TlsFacts:
    """Return facts about a Secret with `tls.crt`, `tls.key` and `ca.crt`, without its key."""
    missing = tuple(key for key in TLS_KEYS if not values.get(key))
    authorities = _certificates(values.get(names.AUTHORITY_KEY, b""))
    trusted = frozenset(one.fingerprint(hashes.SHA256()).hex() for one in authorities)
    own = fingerprint(authority_pem)
    facts = TlsFacts("", trusted=trusted, authority=own, issued_by_it=False, changed_at=changed_at)
    if missing:
        several = " and ".join(missing)
        return replace(facts, problem=f"has no {several}: add {'it' if len(missing) == 1 else 'them'}, in PEM")
    try:
        leaf = x509.load_pem_x509_certificate(values[names.CERTIFICATE_KEY])
    except ValueError:
        return replace(facts, problem="has no certificate in PEM in tls.crt")
    facts = replace(
        facts,
        fingerprint=leaf.fingerprint(hashes.SHA256()).hex(),
        not_after=leaf.not_valid_after_utc,
        names=_names(leaf),
        issued_by_it=_is_issued_by(leaf, authority_pem),
        renew_at=leaf.not_valid_after_utc - (leaf.not_valid_after_utc - leaf.not_valid_before_utc) * RENEW_AT_REMAINING,
    )
    if not trusted:
        return replace(facts, problem="has no certificate in PEM in ca.crt")
    try:
        key = serialization.load_pem_private_key(values[names.PRIVATE_KEY_KEY], password=None)
    except (ValueError, TypeError):
        return replace(facts, problem="has no private key in PEM without a password in tls.key")
    if key.public_key() != leaf.public_key():
        return replace(facts, problem="has a tls.key that does not belong to its tls.crt")
    return facts


def _certificates(pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def _is_issued_by(leaf: x509.Certificate, authority_pem: bytes) -> bool:
    try:
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(leaf: x509.Certificate) -> frozenset[str]:
    try:
        extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(extension.value.get_values_for_type(x509.DNSName))


def _issue(
    authority: KeyPair,
    common_name: str,
    now: datetime,
    key: PrivateKey,
    usages: Sequence[x509.ObjectIdentifier],
    alternatives: x509.SubjectAlternativeName | None,
) -> KeyPair:
    issuer = x509.load_pem_x509_certificate(authority.certificate_pem)
    issuer_key = serialization.load_pem_private_key(authority.key_pem, password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not an elliptic-curve key")
    lifetime = min(LEAF_LIFETIME, issuer.not_valid_after_utc - now)
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _certificate(_subject(common_name), issuer.subject, key, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    issued = builder.sign(issuer_key, hashes.SHA256())
    if not _is_issued_by(issued, authority.certificate_pem):
        raise ValueError("the authority's key does not belong to its certificate")
    return KeyPair(_pem(issued), _key_pem(key))


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: PrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    public_key = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:MAX_COMMON_NAME])])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    signs = signs_certificates
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **unused)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
