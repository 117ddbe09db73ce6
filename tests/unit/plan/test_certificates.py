"""The life of a certificate: renewed and loaded while clients trust what servers show."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from kvstrata.clients import pki
from kvstrata.model.redis.credentials import ServerCredentials, TlsFacts
from kvstrata.objects import names
from kvstrata.plan.actions import Order, Turn
from kvstrata.plan.redis.certificates import CertificateCase, certificate_finding, next_step
from kvstrata.plan.redis.passwords import OVERLAP_S, SETTLE_S
from tests.support.certificates import is_issued_for

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("localhost", "shared.team.svc")
SERVERS = ("one", "two")
KUBELET_S = 90.0


class Tier:
    """Servers with a certificate that the operator issues; files of its Secret arrive late at servers and clients."""

    def __init__(self) -> None:
        self.now = START
        self.authority = pki.create_authority("first", START, pki.generate_key())
        self.secret = self._issued() | {names.AUTHORITY_KEY: self.authority.certificate_pem}
        self.changed_at = START
        self.writes = [(START, self.secret)]
        self.shown = dict.fromkeys(SERVERS, self.secret[names.CERTIFICATE_KEY])
        self.turns: list[Turn] = []

    def _issued(self) -> dict[str, bytes]:
        pair = pki.issue_server(self.authority, NAMES, self.now, pki.generate_key(), for_peers=True)
        return {names.CERTIFICATE_KEY: pair.certificate_pem, names.PRIVATE_KEY_KEY: pair.key_pem}

    @property
    def file(self) -> dict[str, bytes]:
        """What pods have: the newest write that had time to arrive."""
        arrived = [data for at, data in self.writes if (self.now - at).total_seconds() >= KUBELET_S]
        return arrived[-1] if arrived else self.writes[0][1]

    @property
    def facts(self) -> TlsFacts:
        return pki.describe(self.secret, self.authority.certificate_pem, self.changed_at)

    def case(self) -> CertificateCase:
        looks = {
            name: ServerCredentials(name, certificate=pki.fingerprint(shown)) for name, shown in self.shown.items()
        }
        return CertificateCase(SERVERS, looks, self.now, self.facts, "shared-tls", True, NAMES)

    def step(self) -> bool:
        """Do what comes next; return whether there was anything to do."""
        step = next_step(self.case())
        if step is None:
            return False
        for name in step.orders:
            self.shown[name] = self.file[names.CERTIFICATE_KEY]
        if step.turn is not None:
            self._turn(step.turn)
        return True

    def _turn(self, turn: Turn) -> None:
        both = pki.together(self.authority.certificate_pem, self.secret[names.AUTHORITY_KEY])
        self.turns.append(turn)
        match turn:
            case Turn.TRUST:
                self.secret = self.secret | {names.AUTHORITY_KEY: both}
            case Turn.ISSUE:
                self.secret = self._issued() | {names.AUTHORITY_KEY: both}
            case Turn.DISTRUST:
                self.secret = self.secret | {names.AUTHORITY_KEY: self.authority.certificate_pem}
        self.changed_at = self.now
        self.writes.append((self.now, self.secret))

    def distrusting(self) -> list[str]:
        """The servers whose certificate a client does not trust that connects now, with a file as late as may be."""
        trusted = self.file[names.AUTHORITY_KEY]
        return [
            name
            for name, shown in self.shown.items()
            if not any(is_issued_for(shown, self.key_of(shown), one) for one in split(trusted))
        ]

    def key_of(self, certificate: bytes) -> bytes:
        return next(
            data[names.PRIVATE_KEY_KEY] for _, data in self.writes if data[names.CERTIFICATE_KEY] == certificate
        )

    def settle(self) -> None:
        """Work for as long as it takes; no client is ever turned away by a certificate."""
        for _ in range(300):
            done = not self.step()
            assert self.distrusting() == []
            if done:
                return
            self.now += timedelta(seconds=5)
        raise AssertionError(f"no end: {next_step(self.case())}")


def split(pem: bytes) -> list[bytes]:
    end = b"-----END CERTIFICATE-----\n"
    return [part + end for part in pem.split(end) if part.strip()]


def test_a_certificate_is_renewed_and_shown_by_every_server() -> None:
    tier = Tier()
    tier.now += timedelta(days=300)
    tier.settle()
    assert tier.turns == [Turn.ISSUE]
    assert set(tier.shown.values()) == {tier.secret[names.CERTIFICATE_KEY]}
    finding = certificate_finding(tier.case(), next_step(tier.case()))
    assert (finding.status, finding.reason) == ("True", "CertificateShown")


def test_a_server_is_told_until_it_shows_the_new_certificate() -> None:
    tier = Tier()
    tier.now += timedelta(days=300)
    tier.step()
    for _ in range(int(KUBELET_S // 5)):
        step = next_step(tier.case())
        assert step is not None
        assert step.orders == dict.fromkeys(SERVERS, (Order.LOAD_CERTIFICATE,))
        assert certificate_finding(tier.case(), step).reason == "LoadingCertificate"
        tier.step()
        tier.now += timedelta(seconds=5)
    tier.step()
    assert next_step(tier.case()) is None


def test_a_new_authority_takes_the_formers_place_while_clients_trust_both() -> None:
    tier = Tier()
    tier.now += timedelta(days=10)
    tier.authority = pki.create_authority("second", tier.now, pki.generate_key())
    began = tier.now
    tier.settle()
    assert tier.turns == [Turn.TRUST, Turn.ISSUE, Turn.DISTRUST]
    assert (tier.now - began).total_seconds() >= SETTLE_S + OVERLAP_S
    assert tier.secret[names.AUTHORITY_KEY] == tier.authority.certificate_pem
    assert set(tier.shown.values()) == {tier.secret[names.CERTIFICATE_KEY]}


def test_a_certificate_that_has_ended_is_not_kept_waiting_for_a_new_authority() -> None:
    tier = Tier()
    tier.now += timedelta(days=400)
    tier.authority = pki.create_authority("second", tier.now, pki.generate_key())
    tier.step()
    tier.step()
    assert tier.turns == [Turn.TRUST, Turn.ISSUE]


def test_a_former_authority_stays_trusted_while_a_server_is_silent() -> None:
    tier = Tier()
    tier.authority = pki.create_authority("second", tier.now, pki.generate_key())
    while Turn.ISSUE not in tier.turns or tier.case().others:
        tier.step()
        tier.now += timedelta(seconds=5)
    tier.now += timedelta(seconds=OVERLAP_S)
    case = tier.case()
    silent = replace(case, looks={**case.looks, "two": ServerCredentials("two", "Timeout", "did not answer")})
    step = next_step(silent)
    assert step is not None
    assert step.turn is None
    assert next_step(case) != step


def test_a_certificate_without_a_name_that_servers_have_now_is_issued_anew() -> None:
    tier = Tier()
    case = tier.case()
    step = next_step(replace(case, names=(*NAMES, "*.shared.team.svc")))
    assert step is not None
    assert step.turn is Turn.ISSUE


PAIR = Tier().secret


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({names.PRIVATE_KEY_KEY: b""}, "has no tls.key: add it"),
        ({names.PRIVATE_KEY_KEY: b"", names.AUTHORITY_KEY: b""}, "has no tls.key and ca.crt: add them"),
        ({names.CERTIFICATE_KEY: b"junk"}, "no certificate in PEM in tls.crt"),
        ({names.AUTHORITY_KEY: b"junk"}, "no certificate in PEM in ca.crt"),
        ({names.PRIVATE_KEY_KEY: b"junk"}, "no private key in PEM"),
        ({names.PRIVATE_KEY_KEY: Tier().secret[names.PRIVATE_KEY_KEY]}, "does not belong to its tls.crt"),
    ],
)
def test_a_users_secret_that_is_not_whole_is_named_with_what_lacks_and_changes_nothing(
    change: dict[str, bytes], named: str
) -> None:
    tier = Tier()
    facts = pki.describe(PAIR | change, tier.authority.certificate_pem, START)
    looks = {name: ServerCredentials(name, certificate="another") for name in SERVERS}
    case = CertificateCase(SERVERS, looks, START, facts, "mine", False)
    assert next_step(case) is None
    finding = certificate_finding(case, None)
    assert (finding.status, finding.reason) == ("False", "InvalidTlsSecret")
    assert finding.message.startswith("Secret mine ")
    assert named in finding.message


def test_a_users_certificate_is_loaded_and_never_issued() -> None:
    tier = Tier()
    tier.now += timedelta(days=400)
    tier.authority = pki.create_authority("second", tier.now, pki.generate_key())
    case = tier.case()
    foreign = replace(case, secret="mine", issued=False, names=())
    assert next_step(foreign) is None
    assert certificate_finding(foreign, None).reason == "CertificateExpired"
    other = replace(foreign, looks={name: ServerCredentials(name, certificate="another") for name in SERVERS})
    step = next_step(other)
    assert step is not None
    assert (step.turn, set(step.orders)) == (None, set(SERVERS))


def test_what_is_told_of_a_secret_holds_no_key() -> None:
    tier = Tier()
    body = tier.secret[names.PRIVATE_KEY_KEY].decode().splitlines()[1]
    assert body not in repr(tier.facts)
