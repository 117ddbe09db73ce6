"""Data keys in Secrets, taken out of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.objects import labels, names
from kvstrata.plan.actions import EnsureSecret, Material
from kvstrata.reconcile.domain_store import DomainStore, Versions
from kvstrata.reconcile.erasure.keys import revoke_in_secrets
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.secrets import decode
from tests.support.memory_kube import MemoryKube
from tests.support.memory_secret_store import MemorySecretStore

NAMESPACE = "team-a"
OWNER = {"apiVersion": "kvstrata.io/v1alpha1", "kind": "CacheDomain", "name": "default", "uid": "u"}
ACME, GLOBEX, OTHER = "a" * 32, "a" + "b" * 31, "c" * 32
NOW = datetime(2026, 11, 22, 10, tzinfo=UTC)


class Kept:
    """A domain with keys of three epochs in two Secrets."""

    def __init__(self) -> None:
        drawn = iter(range(1, 256))
        self.kube = MemoryKube()
        owner = {"name": OWNER["name"], "uid": OWNER["uid"], "namespace": NAMESPACE}
        self.kube.put({"apiVersion": OWNER["apiVersion"], "kind": OWNER["kind"], "metadata": owner, "spec": {}})
        self.secret_store = MemorySecretStore(
            self.kube, "kvstrata-system", lambda n: bytes([next(drawn)]) * n, lambda: NOW
        )
        self.domain = DomainStore(NAMESPACE, 1, bytes(64), versions=Versions(lambda: NOW))

    async def draw(self, *epochs: str) -> None:
        """Have keys drawn, as a plan orders it."""
        for epoch in epochs:
            name = names.data_keys_secret(epoch)
            made = labels.of_domain("data-keys")
            await self.secret_store.ensure(
                self.domain, EnsureSecret(name, Material.DATA_KEYS, made, OWNER, epochs=(epoch,))
            )

    def stored(self, epoch: str) -> set[str]:
        """The epochs whose keys are in the Secret of this epoch."""
        return {*decode(self.kube.objects["Secret", NAMESPACE, names.data_keys_secret(epoch)])}


@pytest.fixture
async def kept() -> Kept:
    made = Kept()
    await made.draw(ACME, GLOBEX, OTHER)
    return made


async def test_revoked_keys_are_gone_from_their_secrets_and_others_stay(kept: Kept) -> None:
    assert names.data_keys_secret(ACME) == names.data_keys_secret(GLOBEX)
    globex = kept.domain.data_keys[GLOBEX]
    await revoke_in_secrets(kept.secret_store, kept.domain, OWNER, [ACME, OTHER])
    assert (kept.stored(ACME), kept.stored(OTHER)) == ({GLOBEX}, set())
    assert kept.domain.data_keys == {GLOBEX: globex}


async def test_what_is_in_no_secret_counts_as_gone_each_time(kept: Kept) -> None:
    for _ in range(2):
        await revoke_in_secrets(kept.secret_store, kept.domain, OWNER, [ACME])
        assert ACME not in kept.domain.data_keys


async def test_a_refused_write_is_an_error_without_an_epoch(kept: Kept) -> None:
    def refuse(verb: str, kind: str, name: str) -> None:
        raise KubeError(403, "Forbidden", "no")

    kept.kube.before_write = refuse
    with pytest.raises(CustodyError, match="403") as caught:
        await revoke_in_secrets(kept.secret_store, kept.domain, OWNER, [ACME])
    assert ACME not in str(caught.value)
    assert ACME in kept.domain.data_keys
