"""Receipts as immutable ConfigMaps in the operator's namespace.

They are no Secrets, so that reading evidence does not require access to the signing key. The name holds domain and
number, so the API server admits one successor per record. They have no owner and outlive their subject. The parts of a
large receipt are named by its digest and written before the object that lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvstrata.contract import MALFORMED
from kvstrata.contract.receipt.record import Fault, Link, ReceiptError, read_link
from kvstrata.contract.wire import canonical_json, digest_bytes
from kvstrata.objects import labels, names

MAX_PART_BYTES = 900 * 1024
"""Limit of receipt bytes per object; a ConfigMap holds 1 MiB."""

RECEIPT_DATA_KEY = "receipt.json"
PARTS_DATA_KEY = "parts.json"


def build_receipt(operator_namespace: str, receipt: bytes) -> tuple[dict[str, Any], ...]:
    """Return the objects of a receipt in creation order; the last one makes it valid. Raises ReceiptError for bytes
    that are no receipt."""
    link = read_link(receipt)
    name = names.receipt(link.head.domain, link.head.sequence)
    if len(receipt) <= MAX_PART_BYTES:
        return (_part(operator_namespace, name, link, {RECEIPT_DATA_KEY: receipt.decode()}),)
    parts, listed = [], []
    for index, piece in enumerate(_pieces(receipt)):
        part, data = names.receipt_part(link.head.domain, link.digest, index), {RECEIPT_DATA_KEY: piece.decode()}
        parts.append(_part(operator_namespace, part, link, data, labels.RECEIPT_PART))
        listed.append({"name": part, "digest": digest_bytes(piece)})
    contents = canonical_json({"digest": digest_bytes(receipt), "parts": listed}).decode()
    return (*parts, _part(operator_namespace, name, link, {PARTS_DATA_KEY: contents}))


def read_receipt_objects(objects: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, bytes | ReceiptError]]:
    """Yield the object name of each receipt, with its bytes or its fault. Labels are ignored: they can be edited,
    immutable data cannot. Parts that no receipt lists are leftovers."""
    for name, config_map in sorted(objects.items()):
        data = config_map.get("data") or {}
        if not name.startswith(names.RECEIPT_PREFIX):
            continue
        try:
            receipt = _whole(data, objects)
            head = read_link(receipt).head
            if names.receipt(head.domain, head.sequence) != name:
                raise ReceiptError(Fault.MALFORMED, f"{name} holds number {head.sequence} of domain {head.domain}")
        except ReceiptError as error:
            yield name, error
        except MALFORMED as error:
            yield name, ReceiptError(Fault.MALFORMED, f"{name}: {type(error).__name__}")
        else:
            yield name, receipt


def build_public_keys(operator_namespace: str, pems: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the ConfigMap of public keys by key id. Former keys stay, because their receipts must remain
    verifiable."""
    data = {f"{identifier}.pem": pem.decode("ascii") for identifier, pem in sorted(pems.items())}
    return _config_map(names.RECEIPT_PUBLIC_KEYS, operator_namespace, labels.of_receipts("keys"), data)


def _whole(data: Mapping[str, str], objects: Mapping[str, Mapping[str, Any]]) -> bytes:
    if RECEIPT_DATA_KEY in data:
        return data[RECEIPT_DATA_KEY].encode()
    contents = json.loads(data[PARTS_DATA_KEY])
    pieces = []
    for part in contents["parts"]:
        found = objects.get(part["name"])
        piece = ((found or {}).get("data") or {}).get(RECEIPT_DATA_KEY, "").encode()
        if digest_bytes(piece) != part["digest"]:
            raise ReceiptError(Fault.MALFORMED, f"part {part['name']} is missing or was changed")
        pieces.append(piece)
    receipt = b"".join(pieces)
    if digest_bytes(receipt) != contents["digest"]:
        raise ReceiptError(Fault.MALFORMED, "its parts are not the whole of it")
    return receipt


def _pieces(receipt: bytes) -> Iterator[bytes]:
    """Yield pieces that end at character boundaries, because a ConfigMap holds text."""
    start = 0
    while start < len(receipt):
        end = min(start + MAX_PART_BYTES, len(receipt))
        while end < len(receipt) and receipt[end] & 0xC0 == 0x80:
            end -= 1
        yield receipt[start:end]
        start = end


def _part(
    namespace: str, name: str, link: Link, data: Mapping[str, str], component: str = labels.RECEIPT
) -> dict[str, Any]:
    place = {labels.DOMAIN: link.head.domain, labels.RECEIPT_SEQUENCE: str(link.head.sequence)}
    return _config_map(name, namespace, labels.of_receipts(component) | place, data) | {"immutable": True}


def _config_map(name: str, namespace: str, own_labels: Mapping[str, str], data: Mapping[str, str]) -> dict[str, Any]:
    about = labels.metadata(name, namespace, own_labels, None)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": dict(data)}
