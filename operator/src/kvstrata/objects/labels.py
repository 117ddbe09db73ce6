"""Labels and annotations of what the operator makes.

Selectors use `selector_of_model` and `selector_of_tier` only: a selector can never change, so it holds nothing that
a later version might want to say differently.
"""

from __future__ import annotations

from collections.abc import Mapping

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
"""Label of a deletion Job and of all that is made for it: the uid of what ordered it."""
DELETES_IN = "kvstrata.io/deletes-in"
DELETES_FROM = "kvstrata.io/deletes-from"
ACCEPT_LOST_KEY = "kvstrata.io/accept-lost-key"
"""Annotation of the ConfigMap of public keys: a person's word that the key that signs receipts is lost for good."""
ERASES = "kvstrata.io/erases"
"""Annotation of the CacheInvalidation: the uid of the policy whose deletion ordered it."""
SHARD = "kvstrata.io/shard"
STATEFULSET_REVISION = "controller-revision-hash"
READS_TIER_PREFIX = "tier.kvstrata.io/"

MANAGER = "kvstrata"
OWNED = {MANAGED_BY: MANAGER}
"""Label that every object of the operator has; listing by it finds what may be pruned."""
OWNED_SELECTOR = f"{MANAGED_BY}={MANAGER}"

TLS_REVISION = "kvstrata.io/tls-revision"

ROTATE_PASSWORDS = "kvstrata.io/rotate-passwords"
"""Annotation of a CacheTier: any new value asks for a rotation of its servers' passwords."""

MADE_AT = "kvstrata.io/made-at"
"""Annotation of a Secret with passwords: when they were drawn for the first time, or anew after they were lost."""
CHANGED_AT = "kvstrata.io/changed-at"
"""Annotation of a Secret with passwords or a certificate: when the operator last took it one step on."""
ROTATED_AT = "kvstrata.io/rotated-at"
"""Annotation of a Secret with passwords: since when the current ones are used."""
ROTATED_FOR = "kvstrata.io/rotated-for"
"""Annotation of a Secret with passwords or the key of receipts: the last wish to rotate them that was granted."""
ROTATE_RECEIPTS_KEY = "kvstrata.io/rotate-receipts-key"
"""Annotation of the ConfigMap of receipts' public keys: any new value asks for another key that signs."""

DRAWN_FOR = "kvstrata.io/drawn-for"
"""Annotation of Secrets with a domain's key or its data keys: the restore after which they were drawn."""


def selector_of_model(model: str) -> dict[str, str]:
    """Return the labels that select a CachedModel's pods."""
    return {MODEL: model}


def selector_of_tier(tier: str) -> dict[str, str]:
    """Return the labels that select a managed Redis tier's pods."""
    return {TIER: tier, COMPONENT: "redis"}


def of_model(model: str, component: str = "engine") -> dict[str, str]:
    """Return the labels of what belongs to a CachedModel."""
    return _labels("cached-model", model, component) | {MODEL: model}


def of_tier(tier: str, component: str = "redis") -> dict[str, str]:
    """Return the labels of what belongs to a CacheTier."""
    return _labels("cache-tier", tier, component) | {TIER: tier}


def selector_of_shard(tier: str, shard: int) -> dict[str, str]:
    """Return the labels that select the pods of one shard of a managed Redis Cluster."""
    return selector_of_tier(tier) | {SHARD: str(shard)}


def of_shard(tier: str, shard: int) -> dict[str, str]:
    """Return the labels of what belongs to one shard of a managed Redis Cluster."""
    return of_tier(tier) | {SHARD: str(shard)}


def of_domain(component: str) -> dict[str, str]:
    """Return the labels of what belongs to a whole namespace."""
    return _labels("cache-domain", "default", component)


def of_custody(component: str) -> dict[str, str]:
    """Return the labels of what the operator's namespace has about data keys of others."""
    return _labels("key-custody", "operator", component)


def of_receipts(component: str) -> dict[str, str]:
    """Return the labels of receipts and of what belongs to them."""
    return _labels("erasure-receipts", "receipts", component)


def reads_tier(tier: str) -> dict[str, str]:
    """Return the label of pods that use a tier; its NetworkPolicy admits them by it."""
    return {f"{READS_TIER_PREFIX}{tier}": "true"}


def of_deletion(erasure: str) -> dict[str, str]:
    """Return the labels of a deletion Job and of all that is made for it."""
    return _labels("tier-deletion", erasure, "deletion") | {ERASURE: erasure}


def deletes_from(namespace: str, tier: str) -> dict[str, str]:
    """Return the labels of pods that delete from a tier; its NetworkPolicy admits them by these."""
    return {COMPONENT: "deletion", DELETES_IN: namespace, DELETES_FROM: tier}


def merged(user: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the user's labels or annotations with the operator's over them, sorted by key."""
    return dict(sorted({**user, **own}.items()))


def _labels(name: str, instance: str, component: str) -> dict[str, str]:
    return {NAME: name, INSTANCE: instance, COMPONENT: component, PART_OF: "kvstrata", MANAGED_BY: MANAGER}
