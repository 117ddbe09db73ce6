"""Ways to key management services: who may name one, and what is said of one that cannot be gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.api.cachedomain import KeyManagement
from kvstrata.reconcile.custody import CustodyError
from kvstrata.reconcile.custody.services import KmsServices, by_service_account
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE

ADDRESS = "https://bao.keys.svc:8200"


def kms(**fields: str) -> KeyManagement:
    reference = {"name": "bao", "key": "ca.crt"}
    return KeyManagement.model_validate(
        {"address": ADDRESS, "role": "kvstrata", "authorityConfigMapRef": reference, **fields}
    )


def services(kube: MemoryKube, *allowed: str) -> KmsServices:
    return KmsServices(kube, allowed, by_service_account(Path("/nonexistent")))


def config_map(**data: str) -> dict[str, object]:
    metadata = {"name": "bao", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.mark.parametrize("other", ["https://bao.keys.svc", "https://bao.keys.svc:8201", "https://evil.svc:8200"])
async def test_an_address_is_allowed_by_its_whole_name_and_port(other: str) -> None:
    kube = MemoryKube()
    with pytest.raises(CustodyError, match="has not allowed"):
        await services(kube, ADDRESS).client(NAMESPACE, kms(address=other))


async def test_what_is_wrong_with_the_authority_is_named() -> None:
    kube = MemoryKube()
    allowed = services(kube, f"{ADDRESS}/")
    with pytest.raises(CustodyError, match="does not exist, or has no certificate authority"):
        await allowed.client(NAMESPACE, kms())
    kube.put(config_map(**{"ca.crt": "no certificate"}))
    with pytest.raises(CustodyError, match=f"the way to {ADDRESS} cannot be made"):
        await allowed.client(NAMESPACE, kms())
