"""Metadata of the operator's objects: labels, annotations, owners.

Selectors are immutable, so only `selector_of_model` and `selector_of_tier` serve as selectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
MODEL = "kvstrata.io/model"
TIER = "kvstrata.io/tier"
IDENTITY = "kvstrata.io/identity"
RENDER = "kvstrata.io/render"
DOMAIN = "kvstrata.io/domain"
RECEIPT_SEQUENCE = "kvstrata.io/receipt-sequence"
RECEIPT = "receipt"
RECEIPT_PART = "receipt-part"
ERASURE = "kvstrata.io/erasure"
"""Label of a deletion Job and its objects: the uid of the ordering object."""
DELETES_IN = "kvstrata.io/deletes-in"
DELETES_FROM = "kvstrata.io/deletes-from"
ACCEPT_LOST_KEY = "kvstrata.io/accept-lost-key"
"""Annotation of the ConfigMap of public keys: a person confirms that the signing key is lost."""
ERASES = "kvstrata.io/erases"
"""Annotation of a CacheInvalidation: the uid of the deleted policy that ordered it."""
SHARD = "kvstrata.io/shard"
STATEFULSET_REVISION = "controller-revision-hash"

MANAGER = "kvstrata"
OWNED = {MANAGED_BY: MANAGER}
"""Label of every object of the operator; pruning lists by it."""
OWNED_SELECTOR = f"{MANAGED_BY}={MANAGER}"

TLS_REVISION = "kvstrata.io/tls-revision"

ROTATE_PASSWORDS = "kvstrata.io/rotate-passwords"
"""Annotation of a CacheTier: a new value requests a password rotation."""

MADE_AT = "kvstrata.io/made-at"
"""Annotation of a Secret with passwords: when they were first drawn, or redrawn after a loss."""
CHANGED_AT = "kvstrata.io/changed-at"
"""Annotation of a Secret with passwords or a certificate: when the operator last changed its stage."""
ROTATED_AT = "kvstrata.io/rotated-at"
"""Annotation of a Secret with passwords: since when the current ones are used."""
ROTATED_FOR = "kvstrata.io/rotated-for"
"""Annotation of a Secret with passwords or the receipts' key: the last rotation request that was granted."""
ROTATE_RECEIPTS_KEY = "kvstrata.io/rotate-receipts-key"
"""Annotation of the ConfigMap of receipts' public keys: a new value requests another signing key."""

INSTALLATION = "kvstrata.io/installation"
"""Annotation of the Secret with the operator's authority: a random value that identifies the installation."""

DRAWN_FOR = "kvstrata.io/drawn-for"
"""Annotation of Secrets with a domain's key or its data keys: the restore after which they were drawn."""


def metadata(
    name: str,
    namespace: str,
    own_labels: Mapping[str, str],
    owner: Mapping[str, Any] | None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return metadata; deleting `owner` deletes the object, None is for objects that outlive all others."""
    built: dict[str, Any] = {"name": name, "namespace": namespace, "labels": dict(own_labels)}
    if owner is not None:
        built["ownerReferences"] = [dict(owner)]
    if annotations:
        built["annotations"] = dict(annotations)
    return built


def _labels(name: str, instance: str, component: str) -> dict[str, str]:
    return {NAME: name, INSTANCE: instance, COMPONENT: component, PART_OF: "kvstrata", MANAGED_BY: MANAGER}


of_domain = partial(_labels, "cache-domain", "default")
of_custody = partial(_labels, "key-custody", "operator")
of_receipts = partial(_labels, "erasure-receipts", "receipts")


def selector_of_model(model: str) -> dict[str, str]:
    return {MODEL: model}


def selector_of_tier(tier: str) -> dict[str, str]:
    return {TIER: tier, COMPONENT: "redis"}


def of_model(model: str, component: str = "engine") -> dict[str, str]:
    return _labels("cached-model", model, component) | {MODEL: model}


def of_tier(tier: str, component: str = "redis") -> dict[str, str]:
    return _labels("cache-tier", tier, component) | {TIER: tier}


def selector_of_shard(tier: str, shard: int) -> dict[str, str]:
    return selector_of_tier(tier) | {SHARD: str(shard)}


def of_shard(tier: str, shard: int) -> dict[str, str]:
    return of_tier(tier) | {SHARD: str(shard)}


def of_deletion(erasure: str) -> dict[str, str]:
    return _labels("tier-deletion", erasure, "deletion") | {ERASURE: erasure}


def deletes_from(namespace: str, tier: str) -> dict[str, str]:
    """Return the labels by which a tier's NetworkPolicy admits deletion pods."""
    return {COMPONENT: "deletion", DELETES_IN: namespace, DELETES_FROM: tier}


def merged(user: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted({**user, **own}.items()))
