"""Claims of objects under names that an object of the API needs: its own, foreign, or taken over by its user; and of
objects in the operator's own namespace, which are never taken over."""

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

IN_PLACE = ("Deployment", "StatefulSet")
"""Kinds that are taken over with their pods."""


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
    """Return `found` if the object of reference `owner` may write it, None if it was deleted to be made again: a
    foreign one that is taken over, of which fields and Secrets' contents must not stay. Raises NameConflictError, and
    KubeError."""
    if domain.belongs_to(owner, found, desired):
        return found
    kind, name = slot = found["kind"], found["metadata"]["name"]
    if not domain.takes_over(owner, (*slot, found["metadata"]["uid"])):
        raise NameConflictError(kind, name)
    domain.foreign.pop(slot)
    log.warning("a foreign object is taken over", extra={"child": f"{kind} {name}", "owner": owner["name"]})
    if kind in IN_PLACE:
        return found
    await kube.delete(BY_KIND[kind], domain.namespace, name, found["metadata"]["uid"])
    return None
