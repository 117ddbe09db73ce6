"""The PodDisruptionBudget of a CachedModel."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel

from . import labels, names
from .meta import metadata


def build_pdb(model: CachedModel) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time; None below two replicas.

    With a single replica a budget either protects nothing or keeps nodes from being drained for ever. Pods that are
    not ready may always be evicted, so a crash loop does not block a drain.
    """
    if model.spec.engine.replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(
            names.model_child(model.name), model.namespace, labels.of_model(model.name), model.owner_reference()
        ),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": labels.selector_of_model(model.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
