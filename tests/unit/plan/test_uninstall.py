"""A release that is uninstalled leaves no object and no namespace Terminating."""

from __future__ import annotations

from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.plan.uninstall import held_objects, refusal, released
from tests.support.objects import Raw, own

HELD = [FINALIZER]


def stored(kind: str, namespace: str, name: str, finalizers: list[str], **metadata: str) -> Raw:
    made = own(kind, name, {}, resourceVersion="7", finalizers=finalizers, **metadata)
    made["metadata"]["namespace"] = namespace
    return made


OBJECTS = (
    stored("TenantCachePolicy", "team-b", "globex", ["example.com/other", FINALIZER], deletionTimestamp="now"),
    stored("TenantCachePolicy", "team-a", "acme", HELD),
    stored("CacheInvalidation", "team-a", "erase-x", HELD),
    stored("TenantCachePolicy", "team-a", "shares-all", ["example.com/other"]),
    stored("TenantCachePolicy", "elsewhere", "other", HELD),
)


def test_only_objects_with_our_finalizer_in_served_namespaces_hold_a_release() -> None:
    assert [str(one) for one in held_objects(OBJECTS, {"team-a", "team-b"})] == [
        "CacheInvalidation team-a/erase-x",
        "TenantCachePolicy team-a/acme",
        "TenantCachePolicy team-b/globex",
    ]
    assert len(held_objects(OBJECTS, ())) == 4, "a release of the whole cluster serves every namespace"
    (globex,) = held_objects(OBJECTS, {"team-b"})
    assert globex.others == ("example.com/other",), "finalizers of others stay"


def test_a_refusal_names_each_object_and_each_way_out() -> None:
    lines = refusal(held_objects(OBJECTS, {"team-a", "team-b"}), "kvs", "ops", "3").splitlines()
    assert lines[0].startswith("Release kvs is not uninstalled")
    assert lines[1:4] == [
        "  CacheInvalidation team-a/erase-x: its erasure is running: wait until it is complete",
        "  TenantCachePolicy team-a/acme: deleting it erases its cached blocks",
        "  TenantCachePolicy team-b/globex: it is being erased: wait until it is gone",
    ]
    commands = [line.strip() for line in lines if line.startswith(("  kubectl", "  helm"))]
    assert commands == [
        "kubectl delete tenantcachepolicies --all --namespace team-a",
        "kubectl delete tenantcachepolicies --all --namespace team-b",
        "helm --namespace ops rollback kvs 3",
        "helm --namespace ops upgrade kvs charts/kvstrata --reuse-values --set uninstall.releaseObjects=true",
        "helm --namespace ops uninstall kvs",
    ]


def test_a_release_of_objects_names_each_erasure_that_is_not_proven() -> None:
    lines = released(held_objects(OBJECTS, {"team-a"})).splitlines()
    assert lines[1:] == [
        "  CacheInvalidation team-a/erase-x: its erasure is not complete: the remainder is not erased, and no "
        "receipt is written",
        "  TenantCachePolicy team-a/acme: cached blocks are not erased, and deleting it writes no receipt",
    ]
