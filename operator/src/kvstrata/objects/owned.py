"""Objects that have the name of the model or tier that owns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier

from . import labels, names
from .labels import metadata


def model_object(
    api_version: str, kind: str, model: CachedModel, annotations: Mapping[str, str] | None = None, **parts: Any
) -> dict[str, Any]:
    """Return an object that goes with the model."""
    name, own_labels = names.model_child(model.name), labels.of_model(model.name)
    own = metadata(name, model.namespace, own_labels, model.owner_reference(), annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": own, **parts}


def tier_object(api_version: str, kind: str, tier: CacheTier, **parts: Any) -> dict[str, Any]:
    """Return an object of a managed Redis tier, which goes with it."""
    own = metadata(names.redis(tier.name), tier.namespace, labels.of_tier(tier.name), tier.owner_reference())
    return {"apiVersion": api_version, "kind": kind, "metadata": own, **parts}
