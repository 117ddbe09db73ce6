"""Certificates for tests: an authority, and leaves signed by it."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """A certificate authority that lives as long as a test run."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = (
            _builder(subject, subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, directory: Path, common_name: str, *, server: bool) -> Path:
        """Write tls.crt, tls.key and ca.crt for `common_name` into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        names: list[x509.GeneralName] = [x509.DNSName(common_name), x509.DNSName("localhost")]
        names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        leaf = (
            _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]), self.certificate.subject,
                     key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(self._key, hashes.SHA256())
        )  # fmt: skip
        pem = serialization.Encoding.PEM
        (directory / "tls.crt").write_bytes(leaf.public_bytes(pem))
        (directory / "tls.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        (directory / "ca.crt").write_bytes(self.certificate.public_bytes(pem))
        return directory


def client_context(directory: Path, *, present: bool) -> ssl.SSLContext:
    """Return a client context that trusts the directory's authority and, if asked, presents its certificate."""
    context = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    if present:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return context


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
