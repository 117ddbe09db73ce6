"""Keys of API objects."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_VERSION = "kvstrata.io/v1alpha1"
FIELD_MANAGER_PREFIX = "kvstrata"


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """An object to reconcile; of kind `Bundle`, the compiled policy of the CachedModel of that name."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


BUNDLE = "Bundle"
