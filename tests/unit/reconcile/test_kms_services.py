"""Ways to key management services: who may name one, and what is said of one that cannot be gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.api.cachedomain import KeyManagement
from kvstrata.clients.transit import KmsError, KmsFailure, TransitClient
from kvstrata.clients.transit_tokens import KubernetesLogin
from kvstrata.model.keys import FROM_NAMESPACE, AllowedService
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.kms_domains_store import KmsDomain
from kvstrata.reconcile.keys.kms_services import KmsServices, by_service_account
from tests.custody.token_file import TokenFile
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE
from tests.tiers.certificates import Authority

ADDRESS = "https://bao.keys.svc:8200"


def kms(**fields: str) -> KeyManagement:
    reference = {"name": "bao", "key": "ca.crt"}
    return KeyManagement.model_validate(
        {"address": ADDRESS, "role": "kvstrata", "authorityConfigMapRef": reference, **fields}
    )


def services(kube: MemoryKube, *allowed: str) -> KmsServices:
    from_namespace = (AllowedService(one, authority=FROM_NAMESPACE) for one in allowed)
    return KmsServices(kube, from_namespace, by_service_account(Path("/nonexistent")))


def config_map(**data: str) -> dict[str, object]:
    metadata = {"name": "bao", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.mark.parametrize("other", ["https://bao.keys.svc", "https://bao.keys.svc:8201", "https://evil.svc:8200"])
async def test_an_address_is_allowed_by_its_whole_name_and_port(other: str) -> None:
    asked = services(MemoryKube(), ADDRESS)
    with pytest.raises(CustodyError, match="does not allow"):
        await asked.authority(NAMESPACE, kms(address=other))
    with pytest.raises(CustodyError, match="does not allow"):
        await asked.client(KmsDomain("d", NAMESPACE, "u", kms(address=other), b""))


WAYS: list[tuple[AllowedService, dict[str, str], bool]] = [
    (AllowedService(ADDRESS), {"authMount": "kubernetes", "mount": "another"}, True),
    (AllowedService(ADDRESS), {"authMount": "attacker"}, False),
    (AllowedService(ADDRESS), {"namespace": "attacker"}, False),
    (AllowedService(ADDRESS, "team/a", "k8s"), {"namespace": "team/a", "authMount": "k8s", "role": "any"}, True),
    (AllowedService(ADDRESS, "team/a", "k8s"), {"authMount": "k8s"}, False),
    (AllowedService(ADDRESS, "team/a", "k8s"), {"namespace": "team/a"}, False),
    (AllowedService(ADDRESS, role="kvstrata"), {}, True),
    (AllowedService(ADDRESS, role="kvstrata"), {"role": "admin"}, False),
]


@pytest.mark.parametrize(("allowed", "fields", "may"), WAYS)
async def test_the_token_is_shown_to_a_method_in_a_namespace_that_was_allowed_and_no_other(
    allowed: AllowedService, fields: dict[str, str], may: bool
) -> None:
    ways = KmsServices(
        MemoryKube(), [replace(allowed, authority=FROM_NAMESPACE)], by_service_account(Path("/nonexistent"))
    )
    with pytest.raises(CustodyError, match="does not exist" if may else f"does not allow {ADDRESS} with namespace"):
        await ways.authority(NAMESPACE, kms(**fields))
    with pytest.raises(CustodyError, match="cannot be made" if may else "does not allow"):
        await ways.client(KmsDomain("d", NAMESPACE, "u", kms(**fields), b"no certificate"))


@pytest.mark.parametrize("path", ["..", "x/../../attacker", "x/./y", "a//b", "/a", "a/"])
def test_no_path_leads_elsewhere(path: str) -> None:
    for field in ("mount", "authMount", "namespace"):
        with pytest.raises(ValueError, match="must be a path such as"):
            kms(**{field: path})
    with pytest.raises(ValueError, match="is no path"):
        KubernetesLogin("kvstrata", Path("/nonexistent"), method=path)
    for options in ({"mount": path}, {"namespace": path}):
        with pytest.raises(ValueError, match="is no path"):
            TransitClient(ADDRESS, b"", TokenFile(Path("/nonexistent")), **options)


async def test_a_new_authority_replaces_the_client_once_and_the_old_one_says_so(tmp_path: Path) -> None:
    kube = MemoryKube()
    allowed = services(kube, ADDRESS)
    for name in ("first", "second"):
        directory = tmp_path / name
        directory.mkdir()
        kube.put(config_map(**{"ca.crt": Authority(directory).file.read_text()}))
        kms_domain = KmsDomain("d", NAMESPACE, "u", kms(), await allowed.authority(NAMESPACE, kms()))
        one, other = await asyncio.gather(allowed.client(kms_domain), allowed.client(kms_domain))
        assert one is other
        if name == "first":
            old = one
    assert one is not old
    with pytest.raises(KmsError) as caught:
        await old.service()
    assert caught.value.reason is KmsFailure.DISCONNECTED
    await allowed.close()


async def test_what_is_wrong_with_the_authority_is_named() -> None:
    kube = MemoryKube()
    allowed = services(kube, f"{ADDRESS}/")
    with pytest.raises(CustodyError, match="does not exist, or has no certificate authority"):
        await allowed.authority(NAMESPACE, kms())
    kube.put(config_map(**{"ca.crt": "no certificate"}))
    with pytest.raises(CustodyError, match=f"the way to {ADDRESS} cannot be made"):
        await allowed.client(KmsDomain("d", NAMESPACE, "u", kms(), await allowed.authority(NAMESPACE, kms())))


async def test_the_authority_is_the_installers_and_a_namespace_cannot_choose_another(tmp_path: Path) -> None:
    kube, pem = MemoryKube(), Authority(tmp_path).file.read_text()
    kube.put(config_map(**{"ca.crt": "the namespace's own"}))
    ways = KmsServices(kube, [AllowedService(ADDRESS, authority=pem)], by_service_account(Path("/nonexistent")))
    assert await ways.authority(NAMESPACE, kms()) == pem.encode()
    # A record of before has an authority of its namespace.
    client = await ways.client(KmsDomain("d", NAMESPACE, "u", kms(), b"the namespace's own"))
    assert client is await ways.client(KmsDomain("d", NAMESPACE, "u", kms(), pem.encode()))
    await ways.close()


async def test_without_the_installers_authority_a_service_is_not_used() -> None:
    kube = MemoryKube()
    kube.put(config_map(**{"ca.crt": "the namespace's own"}))
    entries = [AllowedService(ADDRESS)]
    ways = KmsServices(kube, entries, by_service_account(Path("/nonexistent")))
    for asked in (ways.authority(NAMESPACE, kms()), ways.client(KmsDomain("d", NAMESPACE, "u", kms(), b""))):
        with pytest.raises(CustodyError, match=f"no authority of {ADDRESS}: add the one that signed its certificate"):
            await asked
    entries.append(AllowedService(ADDRESS, authority=FROM_NAMESPACE))
    ways = KmsServices(kube, entries, by_service_account(Path("/nonexistent")))
    assert await ways.authority(NAMESPACE, kms()) == b"the namespace's own"
    nameless = kms().model_copy(update={"authority_config_map_ref": None})
    with pytest.raises(CustodyError, match=r"spec\.kms\.authorityConfigMapRef is missing"):
        await ways.authority(NAMESPACE, nameless)
