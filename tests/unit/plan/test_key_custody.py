"""A change of custody is refused while there are keys, and what may be said of a key's end follows from its custody."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.receipt.claims import claims, contradiction
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.model.keys import Destruction, Undestroyed
from kvstrata.model.world import World
from kvstrata.plan.keys.custody import refused_change
from tests.support.objects import domain, model, policy, redis_tier
from tests.support.receipts import data_key, erasure, residue
from tests.support.worlds import Simulation

T1 = "2026-11-22T10:00:01Z"
A, B = "a" * 32, "b" * 32
KMS: dict[str, Any] = {
    "address": "https://openbao.keys.svc:8200",
    "role": "kvstrata",
    "authorityConfigMapRef": {"name": "openbao", "key": "ca.crt"},
}


def read(spec: dict[str, Any], **status: Any) -> CacheDomain:
    return CacheDomain.model_validate({**domain(**spec), "status": status})


def refusal(spec: dict[str, Any], keys: dict[str, bytes | str], **status: Any) -> str:
    """Why the custody of a spec cannot be while there are these keys."""
    found = refused_change(World("team-a", 1, b"", data_keys=keys), read(spec, **status))
    return found.message if found is not None else ""


def test_a_domain_that_says_nothing_keeps_keys_in_secrets() -> None:
    assert read({}).spec.key_custody is KeyCustody.SECRET


class TestAChangeOfCustody:
    def test_is_free_while_there_are_no_keys_or_all_are_there_already(self) -> None:
        assert not refusal({"keyCustody": "KMS", "kms": KMS}, {})
        assert not refusal({"keyCustody": "KMS", "kms": KMS}, {A: "id"}, keyCustody="KMS")

    def test_is_refused_by_a_sentence_that_says_what_to_do(self) -> None:
        message = refusal({"keyCustody": "KMS", "kms": KMS}, {A: b"key"})
        assert message.startswith("spec.keyCustody cannot become KMS while 1 data key is in custody Secret")
        assert "set it back to Secret" in message
        assert "team-a" in message
        assert A not in message

    def test_away_from_a_service_has_to_leave_the_way_to_it(self) -> None:
        message = refusal({}, {A: "id"}, keyCustody="KMS")
        assert "set it back to KMS with spec.kms as it was" in message

    def test_counts_the_keys(self) -> None:
        message = refusal({"keyCustody": "KMS", "kms": KMS}, {A: b"key", B: b"other"})
        assert "2 data keys are in custody Secret" in message

    def test_stalls_the_domain_and_leaves_keys_where_they_are(self) -> None:
        sealed = redis_tier(encryption="Required")
        sim = Simulation(domain(), sealed, model(tiers=("shared",)), policy("acme"))
        sim.settle()
        before = sim.entry("acme").keys
        assert isinstance(before[0], DataKey)
        sim.edit("CacheDomain", "default", keyCustody="KMS", kms=KMS)
        sim.settle()
        assert sim.condition("CacheDomain", "default", "Stalled") == ("True", "KeyCustodyInUse")
        assert sim.status("CacheDomain", "default")["keyCustody"] == "Secret"
        sim.edit("TenantCachePolicy", "acme", cacheGeneration=2)
        sim.come_to_rest()
        (after,) = sim.entry("acme").keys
        assert isinstance(after, DataKey), "new ones are drawn where the others are"
        assert after != before[0]
        sim.edit("CacheDomain", "default", keyCustody=None, kms=None)
        sim.settle()
        assert sim.condition("CacheDomain", "default", "Stalled")[0] != "True"


PARTIES = (None, *Party)
IN_SECRETS = (Residue.ETCD_HISTORY, Residue.ETCD_BACKUPS)


@pytest.mark.parametrize(("custody", "remover", "destroyer"), list(product(KeyCustody, PARTIES, PARTIES)))
def test_a_receipt_claims_of_a_key_s_end_what_its_custody_can_know(
    custody: KeyCustody, remover: Party | None, destroyer: Party | None
) -> None:
    if destroyer is not None and (remover is None or custody is KeyCustody.SECRET):
        return  # no custody reports that, and a receipt refuses it
    removed = None if remover is None else Statement(remover, "one", T1)
    destroyed = None if destroyer is None else Statement(destroyer, "one", T1)
    fact = data_key(custody=custody, removed=removed, destroyed=destroyed)
    facts = erasure(keys=(fact,), residue=residue(*(IN_SECRETS if custody is KeyCustody.SECRET else ())))
    assert contradiction(facts) is None
    claimed = {ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED} & {*claims(facts)}
    revoked = remover in (Party.OPERATOR, Party.CUSTODY)
    assert (ReceiptClaim.KEYS_REVOKED in claimed) == revoked
    assert (ReceiptClaim.KEYS_DESTROYED in claimed) == (revoked and destroyer is Party.CUSTODY)


@pytest.mark.parametrize("by", Party)
def test_keys_in_secrets_are_never_called_destroyed(by: Party) -> None:
    fact = data_key(custody=KeyCustody.SECRET, destroyed=Statement(by, "one", T1))
    assert ReceiptClaim.KEYS_DESTROYED not in claims(erasure(keys=(fact,), residue=residue(*IN_SECRETS)))


@pytest.mark.parametrize(
    ("confirmed", "why_not"), [(None, None), (Statement(Party.CUSTODY, "kms", T1), Undestroyed.STILL_THERE)]
)
def test_an_end_is_confirmed_or_says_why_not(confirmed: Statement | None, why_not: Undestroyed | None) -> None:
    with pytest.raises(ValueError, match="confirmed"):
        Destruction(confirmed, why_not)
