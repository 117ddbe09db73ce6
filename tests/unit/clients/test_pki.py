from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvstrata.clients import pki
from tests.support.certificates import is_issued_for

NOW = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> pki.KeyPair:
    return pki.create_authority("kvstrata", NOW, pki.generate_key())


def _load(pair: pki.KeyPair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate_pem)


def test_an_authority_lives_ten_years_and_signs_leaves_only(authority: pki.KeyPair) -> None:
    certificate = _load(authority)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert certificate.not_valid_after_utc == NOW + timedelta(days=3650)


def test_a_server_certificate_names_its_hosts_and_nothing_else(authority: pki.KeyPair) -> None:
    pair = pki.issue_server(authority, ["gate.m.ns.kvstrata.internal", "localhost"], NOW, pki.generate_key())
    certificate = _load(pair)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gate.m.ns.kvstrata.internal", "localhost"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert certificate.not_valid_after_utc == NOW + timedelta(days=365)
    certificate.verify_directly_issued_by(_load(authority))


def test_an_authority_with_the_key_of_another_issues_nothing(authority: pki.KeyPair) -> None:
    """Nothing that it issues would be trusted, and servers would have it in place of certificates that are."""
    other = pki.create_authority("kvstrata", NOW, pki.generate_key())
    mixed = pki.KeyPair(authority.certificate_pem, other.key_pem)
    with pytest.raises(ValueError, match="does not belong"):
        pki.issue_client(mixed, "kvstrata-operator", NOW, pki.generate_key())
    with pytest.raises(ValueError, match="does not belong"):
        pki.issue_server(mixed, ["localhost"], NOW, pki.generate_key())


def test_a_client_certificate_cannot_serve(authority: pki.KeyPair) -> None:
    certificate = _load(pki.issue_client(authority, "kvstrata-operator", NOW, pki.generate_key()))
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert certificate.subject.rfc4514_string() == "CN=kvstrata-operator"


def test_a_long_host_name_is_kept_whole_in_the_alternative_names(authority: pki.KeyPair) -> None:
    name = f"gate.{'m' * 40}.{'n' * 60}.kvstrata.internal"
    pair = pki.issue_server(authority, [name], NOW, pki.generate_key())
    assert is_issued_for(pair.certificate_pem, pair.key_pem, authority.certificate_pem, [name])


def test_a_leaf_never_outlives_its_authority(authority: pki.KeyPair) -> None:
    late = NOW + timedelta(days=3600)
    certificate = _load(pki.issue_client(authority, "x", late, pki.generate_key()))
    assert certificate.not_valid_after_utc == _load(authority).not_valid_after_utc


@pytest.mark.parametrize(
    ("days", "expected"), [(0, False), (200, False), (240, False), (250, True), (364, True), (400, True), (-1, True)]
)
def test_renewal_is_due_in_the_last_third_of_a_life(authority: pki.KeyPair, days: int, expected: bool) -> None:
    pair = pki.issue_client(authority, "x", NOW, pki.generate_key())
    assert pki.needs_renewal(pair.certificate_pem, NOW + timedelta(days=days)) is expected


def test_what_cannot_be_read_is_renewed() -> None:
    assert pki.needs_renewal(b"not a certificate", NOW)


def test_a_stored_pair_is_rejected_when_any_part_of_it_is_foreign(authority: pki.KeyPair) -> None:
    pair = pki.issue_server(authority, ["a.example"], NOW, pki.generate_key())
    other = pki.create_authority("kvstrata", NOW, pki.generate_key())
    ca, key = authority.certificate_pem, pair.key_pem
    assert is_issued_for(pair.certificate_pem, key, ca, ["a.example"])
    assert not is_issued_for(pair.certificate_pem, key, ca, ["a.example", "b.example"])
    assert not is_issued_for(pair.certificate_pem, key, other.certificate_pem)
    assert not is_issued_for(pair.certificate_pem, other.key_pem, ca)
    assert not is_issued_for(b"junk", key, ca)
    assert not is_issued_for(pair.certificate_pem, b"junk", ca)


def test_a_server_certificate_without_names_is_refused(authority: pki.KeyPair) -> None:
    with pytest.raises(ValueError, match="DNS name"):
        pki.issue_server(authority, [], NOW, pki.generate_key())


def test_a_key_pair_does_not_print_its_key(authority: pki.KeyPair) -> None:
    assert "PRIVATE" not in repr(authority)


def test_openssl_in_strict_mode_accepts_the_chain(authority: pki.KeyPair) -> None:
    now = datetime.now(UTC)
    ca = pki.create_authority("kvstrata", now, pki.generate_key())
    pair = pki.issue_server(ca, ["localhost"], now, pki.generate_key())
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    client.load_verify_locations(cadata=ca.certificate_pem.decode())
    _load_chain(server, pair)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (near, far, near):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert near.getpeercert()


def _load_chain(context: ssl.SSLContext, pair: pki.KeyPair) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(pair.certificate_pem + pair.key_pem)
        file.flush()
        context.load_cert_chain(file.name)
