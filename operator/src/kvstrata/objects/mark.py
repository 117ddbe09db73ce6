"""Marks: proof that an object without owner reference is the operator's.

Backup tools drop owner references and managed fields, and anyone can write labels. A mark is an annotation with the
parent of an object and a MAC, under a key of the installation, over kind, namespace, name, parent and content.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from kvstrata.contract.wire import canonical_json

from .applied import part_of

MARK = "kvstrata.io/mark"
_NO_CONTENT = ("apiVersion", "kind", "metadata", "status")
Parent = tuple[str, str]
"""Kind and name."""


def derive_key(private_key: bytes) -> bytes:
    """Return the key of marks from the private key of the installation's authority."""
    return hmac.digest(private_key, b"kvstrata.io/mark", "sha256")


def marked(key: bytes, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body` with its mark. Without a key or an owner it has none."""
    metadata = dict(body["metadata"])
    owner = next(iter(metadata.get("ownerReferences") or ()), None)
    if key and owner is not None:
        parent = owner["kind"], owner["name"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), MARK: _mark(key, body, parent, body)}
    return {**body, "metadata": metadata}


def parent_of(live: Mapping[str, Any]) -> Parent | None:
    """Return the parent that the mark of an object names, whether or not it is valid."""
    kind, _, rest = (live["metadata"].get("annotations") or {}).get(MARK, "").partition("/")
    return (kind, rest.partition("/")[0]) if rest else None


def holds(key: bytes, live: Mapping[str, Any], parent: Parent, desired: Mapping[str, Any] | None = None) -> bool:
    """Whether the mark is this installation's, for `parent`, and of the present content. Content of others, defaults
    above all, does not count: of `live`, only the fields of `desired` are compared. Secrets need no `desired`."""
    if not key or parent_of(live) != parent or (desired is None and live["kind"] != "Secret"):
        return False
    content = live if desired is None or live["kind"] == "Secret" else part_of(_content(live), _content(desired))
    return hmac.compare_digest(
        live["metadata"]["annotations"][MARK].encode(), _mark(key, live, parent, content).encode()
    )


def _mark(key: bytes, body: Mapping[str, Any], parent: Parent, content: Any) -> str:
    metadata = body["metadata"]
    covered = [body["kind"], metadata["namespace"], metadata["name"], *parent, _without_empty(_content(content))]
    return "/".join((*parent, hmac.digest(key, canonical_json(covered), "sha256").hex()))


def _content(body: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in body.items() if field not in _NO_CONTENT}


def _without_empty(value: Any) -> Any:
    """Return a value without empty fields, which the API server may leave out or add."""
    if isinstance(value, Mapping):
        kept = {name: _without_empty(one) for name, one in value.items()}
        return {name: one for name, one in kept.items() if one not in (None, "", 0, False, [], {})}
    return [_without_empty(one) for one in value] if isinstance(value, list | tuple) else value
