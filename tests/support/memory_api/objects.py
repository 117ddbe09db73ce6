"""The server: objects by kind, namespace and name, their versions, owners, events and lifetimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvstrata.clients.kube import KubeError

from .fieldsets import NOTHING, Fields, to_fields_v1
from .merging import copied, patched, without_empty
from .ownership import FieldConflictError, Manager, apply, update
from .schemas import child, is_own, pruned, schema_of

Slot = tuple[str, str, str]
"""Kind, namespace and name."""
Raw = dict[str, Any]
Event = tuple[str, Raw]

WITH_GENERATION = frozenset({"Deployment", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"})
WITH_STATUS = frozenset({"Deployment", "StatefulSet", "PodDisruptionBudget", "Service", "Pod"})
_KEPT = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")
_STAMPED = (*_KEPT, "resourceVersion", "managedFields", "selfLink")


class MemoryApi:
    """Objects, the events that were not taken yet, and all events in `history`.

    Values are never changed in place, so a copy of `objects` is a snapshot. managedFields are not put into the objects,
    where no code here reads them: `managed_fields` returns them. With `collects`, a deletion collects objects without
    a remaining owner at once, where the real server leaves that to a controller. `now` is the time in the API's form.
    In namespaces that are `ending` nothing is created any more.
    """

    def __init__(self, now: Callable[[], str] = lambda: "2026-01-01T00:00:00Z", *, collects: bool = True) -> None:
        self.objects: dict[Slot, Raw] = {}
        self.owners: dict[Slot, dict[Manager, Fields]] = {}
        self.events: list[Event] = []
        self.history: list[Event] = []
        self.ending: set[str] = set()
        self._now, self._collects = now, collects
        self._version = 100
        self._uid = 0

    def take_over(self, other: MemoryApi) -> None:
        """Take the objects of `other`, with the same versions and no events."""
        self.objects, self.owners = dict(other.objects), dict(other.owners)
        self.events, self.history = [], []
        self._version, self._uid = other._version, other._uid
        self.ending = set(other.ending)

    # requests

    def managed_fields(self, slot: Slot) -> dict[tuple[str, str, str], Raw]:
        """Return the fields of each manager, in the form of the API, by manager, operation and subresource."""
        return {
            (manager.name, manager.operation, manager.subresource): to_fields_v1(fields)
            for manager, fields in self.owners.get(slot, {}).items()
        }

    def create(
        self, slot: Slot, body: Mapping[str, Any], manager: str, given: Mapping[str, Any] = MappingProxyType({})
    ) -> Raw:
        """Create an object, as POST does. `given` is metadata that a test sets where a server would."""
        self._admit(slot)
        if slot in self.objects:
            raise KubeError(409, "AlreadyExists", f'{slot[0].lower()}s "{slot[2]}" already exists')
        if body["metadata"].get("resourceVersion"):
            raise KubeError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        fresh = self._of_user(slot, body, None)
        fresh["metadata"] |= given
        owners = update(schema_of(slot[0]), None, fresh, {}, Manager(manager, "Update"))
        return self._stored(slot, fresh, owners)

    def replace(self, slot: Slot, body: Mapping[str, Any], manager: str) -> Raw:
        """Replace an object but for its status, as PUT does; conditional if `body` carries a resourceVersion."""
        known = self._known(slot, body["metadata"])
        if is_own(slot[0]) and not body["metadata"].get("resourceVersion"):
            raise KubeError(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
        return self._written(slot, known, self._of_user(slot, body, known), Manager(manager, "Update"))

    def patch(self, slot: Slot, patch: Mapping[str, Any], manager: str) -> Raw:
        """Merge into an object but for its status."""
        known = self._known(slot, patch.get("metadata") or {})
        return self._written(slot, known, self._of_user(slot, patched(known, patch), known), Manager(manager, "Update"))

    def patch_status(self, slot: Slot, patch: Mapping[str, Any], manager: str) -> Raw:
        """Merge into the status of an object, and into nothing else of it."""
        known = self._known(slot, patch.get("metadata") or {})
        status = patched(known, patch).get("status")
        result = {name: value for name, value in known.items() if name != "status"}
        result |= {"status": status} if status is not None else {}
        return self._written(slot, known, self._clean(slot, result), _of_status(manager))

    def replace_status(self, slot: Slot, status: Mapping[str, Any], manager: str) -> Raw:
        """Replace the status of an object and nothing else, as PUT of the subresource does."""
        known = self._known(slot, {})
        return self._written(slot, known, self._clean(slot, {**known, "status": status}), _of_status(manager))

    def apply(self, slot: Slot, config: Mapping[str, Any], manager: str, *, force: bool) -> Raw:
        """Apply on the server's side; a 409 names fields of others unless `force`."""
        self._admit(slot)
        metadata = config["metadata"]
        if metadata.get("managedFields"):
            raise KubeError(400, "BadRequest", "metadata.managedFields must be nil")
        known = self._known(slot, metadata) if slot in self.objects else None
        if known is None and metadata.get("uid"):
            raise KubeError(409, "Conflict", "the object does not exist")
        kept = {name: value for name, value in metadata.items() if name not in ("uid", "resourceVersion")}
        wanted = self._clean(slot, self._without_status(slot, {**config, "metadata": kept}))
        try:
            result, owners = apply(schema_of(slot[0]), known, wanted, self.owners.get(slot, {}), manager, force=force)
        except FieldConflictError as conflict:
            raise KubeError(409, "Conflict", str(conflict)) from conflict
        return self._stored(slot, self._of_user(slot, result, known), owners)

    def _admit(self, slot: Slot) -> None:
        """Refuse new objects in a namespace that is being deleted."""
        if slot[1] in self.ending and slot not in self.objects:
            message = f"unable to create new content in namespace {slot[1]} because it is being terminated"
            raise KubeError(403, "Forbidden", message, causes=frozenset({"NamespaceTerminating"}))

    def delete(self, slot: Slot, uid: str | None = None, version: str | None = None) -> None:
        """Delete an object, or mark it as going while it has finalizers; with `uid` and `version` only that one."""
        known = self._known(slot, {"uid": uid, "resourceVersion": version} if uid else {})
        metadata = known["metadata"]
        if not metadata.get("finalizers"):
            self._gone(slot)
        elif not metadata.get("deletionTimestamp"):
            going = {**metadata, "deletionTimestamp": self._now(), "deletionGracePeriodSeconds": 0}
            if "generation" in going:
                going["generation"] += 1
            self._stored(slot, {**known, "metadata": going}, self.owners[slot])

    # how it is kept

    def _known(self, slot: Slot, metadata: Mapping[str, Any]) -> Raw:
        known = self.objects.get(slot)
        if known is None:
            raise KubeError(404, "NotFound", f'{slot[0].lower()}s "{slot[2]}" not found')
        for name in ("resourceVersion", "uid"):
            if metadata.get(name) and metadata[name] != known["metadata"][name]:
                raise KubeError(409, "Conflict", f"{slot}: {name} is not {metadata[name]}")
        return known

    def _clean(self, slot: Slot, body: Mapping[str, Any]) -> Raw:
        cleaned: Raw = _without_nulls(copied(body))
        if is_own(slot[0]):
            schema = schema_of(slot[0])
            for part in ("spec", "status"):
                if part in cleaned:
                    cleaned[part] = pruned(schema["properties"].get(part, {}), cleaned[part])
        return cleaned

    def _without_status(self, slot: Slot, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if not (is_own(slot[0]) or slot[0] in WITH_STATUS):
            return body
        return {name: value for name, value in body.items() if name != "status"}

    def _of_user(self, slot: Slot, body: Mapping[str, Any], known: Raw | None) -> Raw:
        """Return the object after a write of it: status and the fields that the server sets are unchanged."""
        result = self._clean(slot, self._without_status(slot, body))
        schema = schema_of(slot[0])
        if is_own(slot[0]):
            result["metadata"] = without_empty(child(schema, "metadata"), result["metadata"])
        else:
            result = without_empty(schema, result)
        _default(result)
        metadata = {name: value for name, value in result["metadata"].items() if name not in _STAMPED}
        metadata["namespace"] = slot[1]
        if known is None:
            self._uid += 1
            metadata |= {"uid": f"uid-{self._uid:04d}", "creationTimestamp": self._now()}
            if is_own(slot[0]) or slot[0] in WITH_GENERATION:
                metadata["generation"] = 1
        else:
            metadata |= {name: known["metadata"][name] for name in _KEPT if name in known["metadata"]}
            if "status" in known and "status" not in result:
                result["status"] = known["status"]
            if "generation" in metadata and _content(result) != _content(known):
                metadata["generation"] += 1
        result["metadata"] = metadata
        return result

    def _written(self, slot: Slot, known: Raw, result: Raw, manager: Manager) -> Raw:
        owners = update(schema_of(slot[0]), known, result, self.owners.get(slot, {}), manager)
        return self._stored(slot, result, owners)

    def _stored(self, slot: Slot, body: Raw, owners: dict[Manager, Fields]) -> Raw:
        known = self.objects.get(slot)
        metadata = body["metadata"]
        if known is not None:
            metadata["resourceVersion"] = known["metadata"]["resourceVersion"]
            if body == known and owners == self.owners.get(slot):
                return copied(known)  # type: ignore[no-any-return]
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[slot], self.owners[slot] = body, owners
        self._emit("ADDED" if known is None else "MODIFIED", body)
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._gone(slot)
        else:
            self._collect([slot])
        return copied(body)  # type: ignore[no-any-return]

    def _gone(self, slot: Slot) -> None:
        last = self.objects.pop(slot)
        self.owners.pop(slot, None)
        self._version += 1
        self._emit("DELETED", {**last, "metadata": {**last["metadata"], "resourceVersion": str(self._version)}})
        uid = last["metadata"]["uid"]
        self._collect([found for found, raw in self.objects.items() if uid in _owner_uids(raw)])

    def _emit(self, verb: str, raw: Raw) -> None:
        self.events.append((verb, raw))
        self.history.append((verb, raw))

    def _collect(self, slots: list[Slot]) -> None:
        """Delete those of `slots` whose owners are all gone."""
        for slot in slots if self._collects else ():
            raw = self.objects.get(slot)
            wanted = _owner_uids(raw) if raw else NOTHING
            if wanted and not any(
                other["metadata"]["uid"] in wanted for found, other in self.objects.items() if found[1] == slot[1]
            ):
                self.delete(slot)


def _of_status(manager: str) -> Manager:
    return Manager(manager, "Update", "status")


def _owner_uids(raw: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(owner["uid"] for owner in raw["metadata"].get("ownerReferences") or ())


def _content(raw: Mapping[str, Any]) -> Raw:
    return {name: value for name, value in raw.items() if name not in ("metadata", "status")}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _default(body: Raw) -> None:
    """Set the defaults that matter here: a port's protocol, which is part of a key, and the number of replicas."""
    spec = body.get("spec")
    if not isinstance(spec, dict):
        return
    if body["kind"] in ("Deployment", "StatefulSet"):
        spec.setdefault("replicas", 1)
    template = spec.get("template")
    pod = template.get("spec") if isinstance(template, dict) else spec
    containers = [c for part in ("initContainers", "containers") for c in (pod or {}).get(part) or ()]
    for holder in (spec, *containers):
        for port in holder.get("ports") or () if isinstance(holder, dict) else ():
            if isinstance(port, dict):
                port.setdefault("protocol", "TCP")
