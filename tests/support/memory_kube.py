"""An API server in memory, with what the operator's writer depends on: resourceVersions, conflicts, merges, events.

It stands in for the real one where a test needs thousands of worlds or a crash after the n-th write; `tests/apiserver`
runs the same operator against the real one. No call suspends, so callers may drive coroutines without an event loop.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kvstrata.adapters.kube import Kube, KubeError, TokenIdentity
from kvstrata.adapters.resources import Resource

Slot = tuple[str, str, str]
Event = tuple[str, dict[str, Any]]


class MemoryKube(Kube):
    """Objects by (kind, namespace, name). `before_write` may raise to refuse a write or to kill the writer."""

    def __init__(self) -> None:
        self.objects: dict[Slot, dict[str, Any]] = {}
        self.events: list[Event] = []
        self.log: list[tuple[str, str, str]] = []
        self.before_write: Callable[[str, str, str], None] = lambda verb, kind, name: None
        self.after_write: Callable[[str, str, str], None] = lambda verb, kind, name: None
        self.tokens: dict[str, TokenIdentity] = {}
        self.created_at = "2026-01-01T00:00:00Z"
        self.writes = 0
        self._version = 100
        self._uid = 0

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a copy, or None."""
        found = self.objects.get((resource.kind, namespace, name))
        return copy.deepcopy(found)

    async def list(
        self, resource: Resource, namespace: str | None, label_selector: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield copies; the selector is a list of equalities."""
        wanted = dict(part.split("=") for part in label_selector.split(",")) if label_selector else {}
        for (kind, where, _), found in sorted(self.objects.items()):
            labels = found["metadata"].get("labels") or {}
            if kind == resource.kind and namespace in (None, where) and wanted.items() <= labels.items():
                yield copy.deepcopy(found)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create, or refuse with 409."""
        slot = (resource.kind, namespace, body["metadata"]["name"])
        self._begin("create", slot)
        if slot in self.objects:
            raise KubeError(409, "AlreadyExists", str(slot))
        return self._store("create", slot, resource, body)

    async def replace(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace if the resourceVersion that `body` names is current."""
        slot = (resource.kind, namespace, body["metadata"]["name"])
        self._begin("replace", slot)
        self._expect(slot, body["metadata"].get("resourceVersion"))
        return self._store("replace", slot, resource, body)

    async def apply(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], field_manager: str
    ) -> dict[str, Any]:
        """Apply as the only manager: what is in `body` is what there is."""
        slot = (resource.kind, namespace, body["metadata"]["name"])
        self._begin("apply", slot)
        return self._store("apply", slot, resource, body)

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any], resource_version: str
    ) -> dict[str, Any]:
        """Merge into status, one level deep as a merge patch does for what the operator sends."""
        slot = (resource.kind, namespace, name)
        self._begin("status", slot)
        self._expect(slot, resource_version)
        merged = copy.deepcopy(self.objects[slot])
        merged["status"] = _merged(merged.get("status") or {}, status)
        return self._changed("status", slot, merged)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Delete the object of this uid, if it is there."""
        slot = (resource.kind, namespace, name)
        self._begin("delete", slot)
        found = self.objects.get(slot)
        if found is None or found["metadata"]["uid"] != uid:
            return
        self.remove(*slot)
        self.after_write("delete", slot[0], slot[2])

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        """Return whose token the test said that this is."""
        return self.tokens.get(token)

    def put(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write an object as a user, the kubelet or a controller of Kubernetes would; its status stays unless given."""
        slot = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        known = self.objects.get(slot)
        merged = copy.deepcopy(dict(body))
        if known and "status" not in body and "status" in known:
            merged["status"] = known["status"]
        self._stamp(merged, known)
        return self._changed("put", slot, merged)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object as a user would."""
        gone = copy.deepcopy(self.objects.pop((kind, namespace, name)))
        self._version += 1
        gone["metadata"]["resourceVersion"] = str(self._version)
        self.events.append(("DELETED", gone))

    def take_events(self) -> Sequence[Event]:
        """Return the events since the last call."""
        taken, self.events = self.events, []
        return taken

    def _begin(self, verb: str, slot: Slot) -> None:
        self.before_write(verb, slot[0], slot[2])

    def _expect(self, slot: Slot, version: str | None) -> None:
        if slot not in self.objects:
            raise KubeError(404, "NotFound", str(slot))
        if version and version != self.objects[slot]["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", str(slot))

    def _store(self, verb: str, slot: Slot, resource: Resource, body: Mapping[str, Any]) -> dict[str, Any]:
        known = self.objects.get(slot)
        stored = copy.deepcopy(dict(body)) | {"apiVersion": resource.api_version, "kind": resource.kind}
        stored["metadata"]["namespace"] = slot[1]
        if known and "status" in known:
            stored["status"] = known["status"]
        self._stamp(stored, known)
        return self._changed(verb, slot, stored)

    def _stamp(self, body: dict[str, Any], known: Mapping[str, Any] | None) -> None:
        metadata = body["metadata"] = dict(body["metadata"])
        if known is None:
            self._uid += 1
            metadata.setdefault("uid", f"uid-{self._uid:04d}")
            metadata.setdefault("creationTimestamp", self.created_at)
            metadata["generation"] = 1
            return
        before = known["metadata"]
        metadata |= {name: before[name] for name in ("uid", "creationTimestamp")}
        metadata["generation"] = before["generation"] + (body.get("spec") != known.get("spec"))

    def _changed(self, verb: str, slot: Slot, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        self.writes += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        known = self.objects.get(slot)
        self.objects[slot] = body
        self.log.append((verb, slot[0], slot[2]))
        self.events.append(("ADDED" if known is None else "MODIFIED", copy.deepcopy(body)))
        self.after_write(verb, slot[0], slot[2])
        return copy.deepcopy(body)


def _merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what RFC 7386 makes of `before` and `patch`."""
    result = dict(before)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            nested = result.get(name)
            result[name] = _merged(nested if isinstance(nested, Mapping) else {}, value)
        else:
            result[name] = copy.deepcopy(value)
    return result
