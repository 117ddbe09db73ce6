"""The certificate that a model's pods show to callers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvstrata.clients import pki
from kvstrata.model.pods import SecretFacts
from kvstrata.plan.kinds.model_certificate import is_usable
from tests.support import worlds
from tests.support.objects import NAMESPACE, model, pod
from tests.support.worlds import Simulation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SUBJECTS = ("gate.tiny.team-a.kvstrata.internal", "kvs-tiny")
MISMATCH = "the new certificate in /tls cannot be used, and the former one is: key values mismatch"
OWN_SECRET = {"mode": "Secret", "secretRef": {"name": "caller-tls"}}


def at_rest(tls: dict[str, Any] | None = None) -> Simulation:
    authentication = {"apiKeys": {"secretRef": {"name": "keys"}}}
    gate = {"authentication": authentication, **({"tls": tls} if tls else {})}
    simulation = Simulation(model(gate=gate), pod("pod-0"))
    simulation.come_to_rest()
    return simulation


def message(simulation: Simulation, kind: str = "CertificateCurrent") -> str:
    conditions = simulation.status("CachedModel", "tiny")["conditions"]
    return str(next(one["message"] for one in conditions if one["type"] == kind))


@pytest.mark.parametrize(("tls", "secret"), [(OWN_SECRET, "caller-tls"), (None, "kvs-tiny-gate-tls")])
def test_a_certificate_that_pods_cannot_use_is_named_with_its_secret(tls: dict[str, Any] | None, secret: str) -> None:
    simulation = at_rest(tls)
    assert simulation.condition("CachedModel", "tiny", "CertificateCurrent") == ("True", "CertificateShown")
    simulation.ack("pod-0", certificate=MISMATCH)
    simulation.settle()
    for kind in ("CertificateCurrent", "Ready"):
        assert simulation.condition("CachedModel", "tiny", kind) == ("False", "CertificateUnusable")
        assert message(simulation, kind).startswith(f"Secret {secret}, pod pod-0: {MISMATCH}; ")
    simulation.ack("pod-0")
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "CertificateCurrent") == ("True", "CertificateShown")
    assert simulation.condition("CachedModel", "tiny", "Ready")[0] == "True"


def test_a_model_that_serves_plain_text_has_no_certificate_to_judge() -> None:
    simulation = at_rest({"mode": "Disabled"})
    kinds = {one["type"] for one in simulation.status("CachedModel", "tiny")["conditions"]}
    assert "CertificateCurrent" not in kinds


def test_other_names_of_the_services_are_put_into_another_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = at_rest()
    slot = ("Secret", NAMESPACE, "kvs-tiny-gate-tls")
    before = simulation.kube.objects[slot]["data"]["tls.crt"]
    simulation.restart()
    simulation.come_to_rest()
    assert simulation.kube.objects[slot]["data"]["tls.crt"] == before
    monkeypatch.setattr(worlds, "CONTEXT", replace(worlds.CONTEXT, cluster_domain="example.internal"))
    simulation.restart()
    simulation.come_to_rest()
    assert simulation.kube.objects[slot]["data"]["tls.crt"] != before
    assert simulation.unsettled() == {}


def facts(authority: pki.KeyPair, values: dict[str, bytes]) -> SecretFacts:
    tls = pki.describe(values, authority.certificate_pem, NOW) if values.get("tls.crt") else None
    return SecretFacts(frozenset(values), "1", tls=tls)


def test_only_a_whole_certificate_of_our_authority_for_exactly_these_names_stays() -> None:
    authority, other = (pki.create_authority("test", NOW, pki.generate_key()) for _ in range(2))

    def made(subjects: tuple[str, ...] = SUBJECTS, issuer: pki.KeyPair = authority) -> dict[str, bytes]:
        pair = pki.issue_server(issuer, subjects, NOW, pki.generate_key())
        return {"tls.crt": pair.certificate_pem, "tls.key": pair.key_pem, "ca.crt": authority.certificate_pem}

    good = made()
    assert is_usable(facts(authority, good), SUBJECTS)
    assert not is_usable(facts(authority, made(("another", *SUBJECTS))), SUBJECTS), "a name of a former Service"
    assert not is_usable(facts(authority, made(SUBJECTS[:1])), SUBJECTS)
    assert not is_usable(facts(authority, made(issuer=other)), SUBJECTS)
    assert not is_usable(facts(authority, good | {"tls.key": made()["tls.key"]}), SUBJECTS), "another key"
    for lacking in good:
        assert not is_usable(facts(authority, good | {lacking: b""}), SUBJECTS)
    late = replace(facts(authority, good), renewal_due=pki.needs_renewal(good["tls.crt"], NOW + timedelta(days=300)))
    assert not is_usable(late, SUBJECTS)
