"""The Job before an uninstall refuses, or releases objects after the operator has ended."""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

import pytest

from kvstrata.cli import uninstall
from kvstrata.cli.uninstall import Uninstall, parse
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.lease import LEASE_NAME, RELEASE
from kvstrata.clients.resources import LEASE
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.plan.kinds import model_deletion
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, Raw, domain, model, policy

OPERATOR = "kvstrata-system"
LABELS = {"app.kubernetes.io/component": "operator", "app.kubernetes.io/instance": "kvs"}
POLICY = ("TenantCachePolicy", NAMESPACE, "acme")


class Cluster(MemoryKube):
    """An operator's Deployment whose pod ends at the second look."""

    def __init__(self, *objects: Raw) -> None:
        super().__init__()
        self.scaled: list[int] = []
        metadata = {"name": "kvs-1", "namespace": OPERATOR, "labels": LABELS}
        self.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}})
        for one in objects:
            self.put(one)

    async def scale(self, namespace: str, deployment: str, replicas: int) -> None:
        assert (namespace, deployment) == (OPERATOR, "kvs-kvstrata")
        self.scaled.append(replicas)

    async def pod_ends(self, _: float) -> None:
        self.remove("Pod", OPERATOR, "kvs-1")

    def options(self, *more: str) -> argparse.Namespace:
        selector = ",".join(f"{name}={value}" for name, value in LABELS.items())
        given = {"release": "kvs", "namespace": OPERATOR, "revision": "1", "deployment": "kvs-kvstrata"}
        given |= {"selector": selector, "replicas": "2", "watch-namespaces": NAMESPACE}
        return parse([*(f"--{name}={value}" for name, value in given.items()), *more])

    async def uninstall(self, *more: str) -> tuple[int, str]:
        return await Uninstall(self, self.options(*more), self.pod_ends).run()


def acme(*finalizers: str) -> Raw:
    made = policy("acme")
    made["metadata"]["finalizers"] = list(finalizers)
    return made


async def test_a_release_whose_operator_is_needed_stays_and_keeps_its_operator() -> None:
    cluster = Cluster(acme(FINALIZER))
    code, text = await cluster.uninstall()
    assert (code, cluster.scaled) == (1, [])
    assert f"TenantCachePolicy {NAMESPACE}/acme" in text
    assert cluster.objects[POLICY]["metadata"]["finalizers"] == [FINALIZER]


async def test_a_model_that_the_operator_has_to_end_keeps_the_release_too() -> None:
    made = model()
    made["metadata"]["finalizers"] = [model_deletion.FINALIZER]
    cluster = Cluster(made)
    code, text = await cluster.uninstall()
    assert (code, f"CachedModel {NAMESPACE}/{made['metadata']['name']}: deleting it ends its pods" in text) == (1, True)
    assert (await cluster.uninstall("--release-objects"))[0] == 0
    assert not cluster.objects["CachedModel", NAMESPACE, made["metadata"]["name"]]["metadata"].get("finalizers")


async def test_a_release_that_no_object_needs_goes_after_its_operator_has_ended() -> None:
    cluster = Cluster(acme("example.com/other"))
    code, _ = await cluster.uninstall()
    assert (code, cluster.scaled) == (0, [0])
    assert ("Pod", OPERATOR, "kvs-1") not in cluster.objects


async def test_a_finalizer_that_the_ending_operator_set_is_seen_and_the_operator_starts_again() -> None:
    class Late(Cluster):
        async def pod_ends(self, _: float) -> None:
            self.put(acme(FINALIZER))
            await super().pod_ends(_)

    cluster = Late()
    code, text = await cluster.uninstall()
    assert (code, cluster.scaled) == (1, [0, 2])
    assert f"TenantCachePolicy {NAMESPACE}/acme" in text


async def test_the_operator_starts_again_if_the_look_after_its_end_fails_or_it_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(Cluster):
        def list(self, resource: Any, *where: Any, **chosen: Any) -> Any:
            if ("Pod", OPERATOR, "kvs-1") not in self.objects:
                raise KubeError(500, "", "")
            return super().list(resource, *where, **chosen)

    class Lasting(Cluster):
        async def pod_ends(self, _: float) -> None:
            await asyncio.sleep(0)

    monkeypatch.setattr(uninstall, "STOP_S", 0.05)
    for cluster, error in ((Failing(), KubeError), (Lasting(), TimeoutError)):
        with pytest.raises(error):
            await cluster.uninstall("--release-objects")
        assert cluster.scaled == [0, 2]


async def test_the_operator_starts_again_if_the_time_of_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lasting(Cluster):
        async def scale(self, *chosen: Any) -> None:
            await super().scale(*chosen)
            if self.scaled == [0]:
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)

        async def close(self) -> None:
            pass

    async def connect() -> Lasting:
        return cluster

    cluster, before = Lasting(), signal.signal(signal.SIGTERM, lambda *_: None)
    monkeypatch.setattr(Kube, "connect", connect)
    try:
        done, _ = await asyncio.wait({asyncio.create_task(uninstall._main(cluster.options()))}, timeout=30)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [task.result() for task in done] == [1]
    assert cluster.scaled == [0, 2]


async def test_objects_are_released_only_after_the_operator_has_ended_and_finalizers_of_others_stay() -> None:
    cluster = Cluster(acme("example.com/other", FINALIZER))
    pods: list[bool] = []
    cluster.before_write = lambda verb, *_: pods.append(("Pod", OPERATOR, "kvs-1") in cluster.objects)
    code, text = await cluster.uninstall("--release-objects")
    assert (code, cluster.scaled, pods) == (0, [0], [False])
    assert cluster.objects[POLICY]["metadata"]["finalizers"] == ["example.com/other"]
    assert f"TenantCachePolicy {NAMESPACE}/acme: cached blocks are not erased" in text


async def test_claims_of_the_release_end_with_it_and_those_of_others_stay() -> None:
    claims = {"team": ("kvs", OPERATOR), "other-release": ("other", OPERATOR), "elsewhere": ("kvs", "ops")}
    cluster = Cluster()
    for where, (release, namespace) in claims.items():
        made = {**domain(), "status": {"servedBy": {"uid": "1", "release": release, "namespace": namespace}}}
        cluster.put({**made, "metadata": {"name": "default", "namespace": where}})
    assert (await cluster.uninstall())[0] == 0
    left = {where for where in claims if "servedBy" in cluster.objects["CacheDomain", where, "default"]["status"]}
    assert left == {"other-release", "elsewhere"}


@pytest.mark.parametrize("more", [(), ("--release-objects",)])
async def test_objects_of_a_namespace_that_another_installation_serves_hold_nothing_and_stay(more: tuple[str]) -> None:
    cluster = Cluster(acme(FINALIZER))
    cluster.put({**domain(), "status": {"servedBy": {"uid": "1", "release": "kvs", "namespace": "ops"}}})
    assert (await cluster.uninstall(*more))[0] == 0
    assert cluster.objects[POLICY]["metadata"]["finalizers"] == [FINALIZER]


@pytest.mark.parametrize("there_is_another", [False, True])
async def test_a_release_of_the_whole_cluster_leaves_objects_without_a_claim_to_another_one_and_names_them(
    there_is_another: bool,
) -> None:
    own, other = {"uid": "1", "release": "kvs", "namespace": OPERATOR}, {"uid": "2", "release": "b", "namespace": "b"}
    cluster = Cluster(acme(FINALIZER))
    for where, claim in (("served", own), ("of-another", other))[: 1 + there_is_another]:
        made = {**domain(), "status": {"servedBy": claim}}
        cluster.put({**made, "metadata": {"name": "default", "namespace": where}})
        cluster.put({**acme(FINALIZER), "metadata": {**acme(FINALIZER)["metadata"], "namespace": where}})
    assert (await cluster.uninstall("--watch-namespaces="))[0] == 1, "they hold a release that is not to release any"
    code, text = await cluster.uninstall("--watch-namespaces=", "--release-objects")
    left = {where for (kind, where, _), raw in cluster.objects.items() if raw["metadata"].get("finalizers")}
    assert (code, left) == (0, {NAMESPACE, "of-another"} if there_is_another else set())
    assert (f"keep their finalizers:\n  TenantCachePolicy {NAMESPACE}/acme" in text) is there_is_another
    assert "TenantCachePolicy served/acme: cached blocks are not erased" in text


@pytest.mark.parametrize(("holder", "left"), [("kvs", {"other": "1"}), ("another", {"other": "1", RELEASE: "another"})])
async def test_the_lease_of_the_release_is_free_for_another_afterwards(holder: str, left: dict[str, str]) -> None:
    cluster = Cluster()
    metadata = {"name": LEASE_NAME, "namespace": OPERATOR, "annotations": {"other": "1", RELEASE: holder}}
    cluster.put({"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": {}})
    assert (await cluster.uninstall())[0] == 0
    assert cluster.objects["Lease", OPERATOR, LEASE_NAME]["metadata"]["annotations"] == left


@pytest.mark.parametrize(("status", "code"), [(404, 0), (500, None)])
async def test_kinds_that_are_gone_hold_nothing_and_other_errors_do_not_pass(status: int, code: int | None) -> None:
    class Without(Cluster):
        def list(self, resource: Any, *where: Any, **chosen: Any) -> Any:
            if resource.kind != "Pod":
                raise KubeError(status, "", "")
            return super().list(resource, *where, **chosen)

    if code is None:
        with pytest.raises(KubeError):
            await Without().uninstall()
    else:
        assert (await Without().uninstall())[0] == code
