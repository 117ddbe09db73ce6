"""Claims of objects under names that an object of the API needs: its own, foreign, or taken over; and of objects in
the operator's own namespace, which are never taken over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from kvstrata.api.reasons import SharedReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND

from .domain_store import DomainStore

log = logging.getLogger(__name__)


class NameConflictError(KubeError):
    def __init__(self, kind: str, name: str) -> None:
        super().__init__(HTTPStatus.CONFLICT, SharedReason.NAME_CONFLICT, f"{kind} {name} belongs to others")


def require_own(kind: str, found: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """Raise NameConflictError unless an object in the operator's namespace has the labels and owners of the metadata
    `built`: this or an earlier process created it."""
    there = found["metadata"]
    owners = [{one["uid"] for one in each.get("ownerReferences") or ()} for each in (there, built)]
    if owners[0] != owners[1] or not built["labels"].items() <= (there.get("labels") or {}).items():
        raise NameConflictError(kind, there["name"])


async def claimed(
    kube: Kube,
    domain: DomainStore,
    owner: Mapping[str, Any],
    found: Mapping[str, Any],
    desired: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """Return `found` if it belongs to the object of reference `owner`, None if it was a foreign one that is taken over:
    it was deleted, by its UID, because nothing of it must stay. Raises NameConflictError, and KubeError."""
    if domain.belongs_to(owner, found, desired):
        return found
    kind, name = slot = found["kind"], found["metadata"]["name"]
    if slot in domain.foreign:
        raise NameConflictError(kind, name)
    log.warning("a foreign object is taken over", extra={"child": f"{kind} {name}", "owner": owner["name"]})
    await kube.delete(BY_KIND[kind], domain.namespace, name, found["metadata"]["uid"])
    return None
