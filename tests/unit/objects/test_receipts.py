"""Receipts as ConfigMaps: immutable, named by their place in the chain, whole or not there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kvstrata.contract.receipt.record import ReceiptError, read_link
from kvstrata.objects import labels, names
from kvstrata.objects.erasure.receipts import (
    MAX_PART_BYTES,
    PARTS_DATA_KEY,
    RECEIPT_DATA_KEY,
    build_public_keys,
    build_receipt,
    read_receipt_objects,
)
from tests.support.receipts import DOMAIN, erasure, issue, keys, pod, rotated_chain, subject

NAMESPACE = "kvstrata-system"
THOUSANDS = issue(
    keys(), None, erasure(pods=tuple(pod(f"pod-{n}") for n in range(4000)), subject=subject(reason="ä" * 999))
)


def by_name(*built: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in built}


def read(objects: dict[str, dict[str, Any]]) -> list[bytes]:
    return [found for _, found in read_receipt_objects(objects) if isinstance(found, bytes)]


def wrong(objects: dict[str, dict[str, Any]]) -> list[str]:
    return [str(found) for _, found in read_receipt_objects(objects) if isinstance(found, ReceiptError)]


def test_a_chain_is_read_back_from_its_objects_byte_for_byte() -> None:
    chain = rotated_chain()
    built = [one for data in chain for one in build_receipt(NAMESPACE, data)]
    assert read(by_name(*built)) == chain
    assert [one["metadata"]["name"] for one in built] == [names.receipt(DOMAIN, n) for n in (1, 2, 3, 4)]


def test_a_receipt_cannot_be_changed_and_goes_with_nobody() -> None:
    (built,) = build_receipt(NAMESPACE, rotated_chain()[0])
    assert built["kind"] == "ConfigMap"
    assert built["immutable"] is True
    assert "ownerReferences" not in built["metadata"]
    assert built["metadata"]["labels"][labels.DOMAIN] == DOMAIN
    assert built["metadata"]["namespace"] == NAMESPACE


def test_two_successors_of_one_receipt_would_have_one_name() -> None:
    first = issue(keys(), None, erasure("order-1"))
    one, other = issue(keys(), first, erasure("order-2")), issue(keys(), first, erasure("order-3"))
    assert by_name(*build_receipt(NAMESPACE, one)).keys() == by_name(*build_receipt(NAMESPACE, other)).keys()


def test_thousands_of_pods_are_cut_into_parts_that_fit_and_are_read_whole() -> None:
    built = build_receipt(NAMESPACE, THOUSANDS)
    assert len(built) > 2
    assert max(len(text.encode()) for one in built for text in one["data"].values()) <= MAX_PART_BYTES
    assert read(by_name(*built)) == [THOUSANDS]
    assert PARTS_DATA_KEY in built[-1]["data"]
    assert [name for name, _ in read_receipt_objects(by_name(*built))] == [names.receipt(DOMAIN, 1)]


def test_parts_are_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    data = issue(keys(), None, erasure(subject=subject(reason="ä€😀" * 300)))
    for bound in range(1000, 1010):
        monkeypatch.setattr("kvstrata.objects.erasure.receipts.MAX_PART_BYTES", bound)
        assert read(by_name(*build_receipt(NAMESPACE, data))) == [data]


def test_until_the_last_object_is_there_there_is_no_receipt() -> None:
    built = build_receipt(NAMESPACE, THOUSANDS)
    for count in range(len(built)):
        assert list(read_receipt_objects(by_name(*built[:count]))) == []


def test_parts_that_an_unfinished_attempt_left_are_in_nobodys_way() -> None:
    other = issue(keys(), None, erasure(pods=tuple(pod(f"other-{n}") for n in range(4000))))
    everything = by_name(*build_receipt(NAMESPACE, other)[:-1], *build_receipt(NAMESPACE, THOUSANDS))
    assert read(everything) == [THOUSANDS]


def test_a_part_that_is_missing_or_changed_is_told() -> None:
    built = build_receipt(NAMESPACE, THOUSANDS)
    assert "missing or was changed" in wrong(by_name(*built[1:]))[0]
    changed = deepcopy(built)
    text = changed[0]["data"][RECEIPT_DATA_KEY]
    changed[0]["data"][RECEIPT_DATA_KEY] = text.replace("chat", "chut", 1)
    assert "missing or was changed" in wrong(by_name(*changed))[0]
    assert read(by_name(*changed)) == []


def test_a_receipt_under_anothers_name_is_told() -> None:
    first, second = (build_receipt(NAMESPACE, data)[0] for data in rotated_chain()[:2])
    first["metadata"]["name"], second["metadata"]["name"] = second["metadata"]["name"], first["metadata"]["name"]
    assert len(wrong(by_name(first, second))) == 2


def test_objects_that_only_look_like_receipts_are_told_or_left_alone() -> None:
    name = names.receipt(DOMAIN, 1)
    for data in ({}, {RECEIPT_DATA_KEY: "{}"}, {PARTS_DATA_KEY: "[]"}, {PARTS_DATA_KEY: '{"parts":[{}]}'}):
        assert len(wrong({name: {"data": data}})) == 1
    assert list(read_receipt_objects({"kube-root-ca.crt": {"data": {}}})) == []


def test_public_keys_are_published_by_their_id() -> None:
    built = build_public_keys(NAMESPACE, keys(2, previous=1).public_pems())
    assert set(built["data"]) == {f"{keys(seed).current_id}.pem" for seed in (1, 2)}
    assert all("PUBLIC KEY" in pem for pem in built["data"].values())
    assert "immutable" not in built


def test_names_sort_as_the_chain_goes() -> None:
    sequence = [names.receipt(DOMAIN, number) for number in (1, 2, 10, 99, 1000)]
    assert sorted(sequence) == sequence
    assert len(names.receipt_part("f" * 32, read_link(THOUSANDS).digest, 99)) <= 253
