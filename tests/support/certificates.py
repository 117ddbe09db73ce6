"""Certificates that the operator issued, checked as a client checks them."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization


def is_issued_for(
    certificate_pem: bytes, key_pem: bytes, authority_pem: bytes, dns_names: Sequence[str] | None = None
) -> bool:
    """Whether a stored pair is whole: the key fits, the authority signed it and, if given, it names `dns_names`."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, InvalidSignature):
        return False
    if key.public_key() != certificate.public_key():
        return False
    if dns_names is None:
        return True
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return False
    return set(extension.value.get_values_for_type(x509.DNSName)) == set(dns_names)
