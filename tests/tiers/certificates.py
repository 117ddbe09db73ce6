"""A throw-away CA and a server certificate signed by it."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SERVER_NAME = "tier.test.internal"


@dataclass(frozen=True)
class Certificates:
    """Paths to PEM files."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def redis_options(self) -> list[str]:
        """The options that make redis-server use them, without asking clients for theirs."""
        files = ["--tls-ca-cert-file", str(self.ca), "--tls-cert-file", str(self.certificate)]
        return [*files, "--tls-key-file", str(self.key), "--tls-auth-clients", "no"]

    def only_tls(self, port: int) -> list[str]:
        """The options with which a server of a cluster speaks TLS alone: to clients, replicas and other servers."""
        listening = ["--port", "0", "--tls-port", str(port), "--tls-replication", "yes", "--tls-cluster", "yes"]
        return [*listening, *self.redis_options]


class Authority:
    """A CA whose certificate is `ca.crt` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test CA of {directory.name}")])
        self.file = directory / "ca.crt"
        ca = _certificate(self._name, self._name, self._key, self._key, (SERVER_NAME,), is_ca=True)
        self.file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, stem: str = "tls") -> Certificates:
        """Write a certificate for host names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = _certificate(subject, self._name, key, self._key, names, is_ca=False)
        paths = Certificates(self.file, self._directory / f"{stem}.crt", self._directory / f"{stem}.key")
        paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        paths.key.write_bytes(key.private_bytes(*encoding))
        return paths


def issue(directory: Path) -> Certificates:
    """Write a CA and a certificate for SERVER_NAME into `directory`."""
    return Authority(directory).issue(SERVER_NAME)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    *,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if is_ca:
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(signer, hashes.SHA256())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
