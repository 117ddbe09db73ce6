"""Names of objects."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_VERSION = "kvstrata.io/v1alpha1"
FIELD_MANAGER_PREFIX = "kvstrata"


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One unit of work: an object of a kind that a controller reconciles.

    `Bundle` is the one kind that is no object of the API: the compiled policy of the CachedModel of that name.
    """

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


BUNDLE = "Bundle"
