"""Marks: which objects without owner reference are the operator's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.objects import mark
from kvstrata.objects.context import BuildContext
from kvstrata.objects.pod import access, workload
from kvstrata.objects.secret import build_secret
from tests.support.objects import NAMESPACE, Raw, model

KEY, OTHER_KEY = mark.derive_key(b"one"), mark.derive_key(b"another")
PARENT = ("CachedModel", "tiny")
MODEL = CachedModel.parse(model() | {"metadata": {"name": "tiny", "namespace": NAMESPACE, "uid": "u-1"}})
SERVICE = workload.build_model_service(MODEL)
POLICY = access.build_model_networkpolicy(BuildContext(sidecar_image="s", redis_image="r"), MODEL)
SECRET = build_secret("kvs-tiny-bundle", NAMESPACE, {}, MODEL.owner_reference(), {"root": b"content"})


def restored(body: Raw) -> Raw:
    """An object as a backup tool creates it, with the defaults that the API server adds."""
    live = copy.deepcopy(body)
    del live["metadata"]["ownerReferences"]
    if live["kind"] == "Service":
        live["spec"] |= {"sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}
    return live


@pytest.mark.parametrize("body", [SERVICE, POLICY, SECRET], ids=lambda body: body["kind"])
def test_a_restored_object_has_a_mark_that_holds(body: Raw) -> None:
    live = restored(mark.marked(KEY, body))
    assert mark.holds(KEY, live, PARENT, body)
    assert mark.parent_of(live) == PARENT


@pytest.mark.parametrize("body", [SERVICE, POLICY, SECRET], ids=lambda body: body["kind"])
@pytest.mark.parametrize("field", ["kind", "namespace", "name", "parent", "content", "key", "mark"])
def test_a_mark_covers(body: Raw, field: str) -> None:
    live, parent, key = restored(mark.marked(KEY, body)), PARENT, KEY
    match field:
        case "kind":
            live["kind"] = "Secret" if live["kind"] == "ConfigMap" else "ConfigMap"
            live |= {"kind": "ConfigMap"}
        case "namespace" | "name":
            live["metadata"][field] = "other"
        case "parent":
            parent = ("CachedModel", "other")
            live["metadata"]["annotations"][mark.MARK] = live["metadata"]["annotations"][mark.MARK].replace(
                "tiny", "other"
            )
        case "content" if live["kind"] == "Secret":
            live["data"]["root"] = "Zm9yZ2Vk"
        case "content" if live["kind"] == "Service":
            live["spec"]["ports"][0]["port"] = 81
        case "content":
            live["spec"]["ingress"] = []
        case "key":
            key = OTHER_KEY
        case "mark":
            live["metadata"]["annotations"] = {mark.MARK: "CachedModel/tiny/" + "0" * 64}
    assert not mark.holds(key, live, parent, body)


def test_no_mark_without_a_key_or_an_owner() -> None:
    assert mark.marked(b"", SERVICE) == SERVICE
    without: dict[str, Any] = build_secret("kvstrata-ca", NAMESPACE, {}, None, {})
    assert mark.marked(KEY, without) == without
    assert not mark.holds(b"", mark.marked(KEY, SECRET), PARENT)


def test_content_of_another_spec_is_proven_by_the_fields_that_both_have() -> None:
    """An object that was applied before an edit or an upgrade: values differ, the fields are the same."""
    live = restored(mark.marked(KEY, SERVICE))
    edited = copy.deepcopy(SERVICE)
    edited["spec"]["ports"][0]["port"] = 8080
    assert mark.holds(KEY, live, PARENT, edited)
