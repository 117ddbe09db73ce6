"""The operator's client over an API server in memory, for thousands of worlds and a crash at any write.

`tests/apiserver` runs the same operator against a real server, and compares the two. No call suspends, so callers may
drive coroutines without an event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kvstrata.clients.kube import NO_VERSION, Kube, KubeError, TokenIdentity
from kvstrata.clients.resources import Resource
from tests.support.memory_api.merging import copied
from tests.support.memory_api.objects import Event, MemoryApi, Raw, Slot

CLIENT = "client"
"""The manager of requests that name none."""
Hook = Callable[[str, str, str], None]


def _nothing(verb: str, kind: str, name: str) -> None:
    pass


class MemoryKube(Kube):
    """A client of `api`. `before_write` may raise to refuse a write or to kill the writer, `after_write` to kill it.

    Of both the arguments are verb, kind and name. `writes` counts the accepted ones and `log` names them, also those
    that changed nothing.
    """

    def __init__(self, api: MemoryApi | None = None) -> None:
        self.api = api or MemoryApi()
        self.log: list[tuple[str, str, str]] = []
        self.before_write: Hook = _nothing
        self.after_write: Hook = _nothing
        self.tokens: dict[str, TokenIdentity] = {}
        self.logs: dict[str, bytes] = {}
        self.writes = 0
        self.may_write = lambda: True

    @property
    def objects(self) -> dict[Slot, Raw]:
        """The server's objects. Change them by requests only."""
        return self.api.objects

    @property
    def events(self) -> list[Event]:
        """The events that were not taken yet."""
        return self.api.events

    async def get(self, resource: Resource, namespace: str, name: str) -> Raw | None:
        """Return a copy, or None."""
        found: Raw | None = copied(self.objects.get((resource.kind, namespace, name)))
        return found

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> AsyncIterator[Raw]:
        """Yield copies; selectors are lists of equalities."""
        wanted, fields = (
            dict(part.split("=") for part in selector.split(",")) if selector else {}
            for selector in (label_selector, field_selector)
        )
        for (kind, where, _), found in sorted(self.objects.items(), key=lambda item: item[0]):
            labels = found["metadata"].get("labels") or {}
            fits = all(_field(found, path) == value for path, value in fields.items())
            if kind == resource.kind and namespace in (None, where) and wanted.items() <= labels.items() and fits:
                yield copied(found)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Raw:
        """Create, or refuse with 409."""
        slot = (resource.kind, namespace, body["metadata"]["name"])
        return self._write("create", slot, lambda: self.api.create(slot, _typed(resource, body), CLIENT))

    async def replace(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Raw:
        """Replace if the resourceVersion that `body` names is current."""
        slot = (resource.kind, namespace, body["metadata"]["name"])
        return self._write("replace", slot, lambda: self.api.replace(slot, _typed(resource, body), CLIENT))

    async def apply(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], field_manager: str, uid: str | None
    ) -> Raw:
        """Apply on the server's side over the object of this UID, or create one."""
        slot = (resource.kind, namespace, body["metadata"]["name"])
        condition = {"uid": uid} if uid else {"resourceVersion": NO_VERSION}
        wanted = _typed(resource, {**body, "metadata": {**body["metadata"], **condition}})
        return self._write("apply", slot, lambda: self.api.apply(slot, wanted, field_manager, force=True))

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any], resource_version: str
    ) -> Raw:
        """Merge into status, if the object is still at `resource_version`."""
        slot = (resource.kind, namespace, name)
        patch = {"metadata": {"resourceVersion": resource_version}, "status": status}
        return self._write("status", slot, lambda: self.api.patch_status(slot, patch, "kvstrata-status"))

    async def set_finalizers(
        self, resource: Resource, namespace: str, name: str, finalizers: Sequence[str], resource_version: str
    ) -> Raw:
        """Set the finalizers, if the object is still at `resource_version`."""
        slot = (resource.kind, namespace, name)
        patch = {"metadata": {"resourceVersion": resource_version, "finalizers": list(finalizers)}}
        return self._write("finalizers", slot, lambda: self.api.patch(slot, patch, "kvstrata-finalizer"))

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, version: str | None = None) -> None:
        """Delete the object of this uid, if it is there; with a version, refuse one that changed."""
        slot = (resource.kind, namespace, name)

        def leave() -> Raw:
            self.api.delete(slot, uid, version)
            return {}

        try:
            self._write("delete", slot, leave)
        except KubeError as error:
            if not (error.is_not_found or (error.is_conflict and version is None)):
                raise

    async def is_ending(self, namespace: str) -> bool:
        """Whether the test ends a namespace."""
        return namespace in self.api.ending

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        """Return the identity that the test gave this token."""
        return self.tokens.get(token)

    async def container_log(self, namespace: str, pod: str, container: str, limit_bytes: int) -> bytes:
        """Return the output that the test gave a pod; 404 for any other, as of a node that is away."""
        if pod not in self.logs:
            raise KubeError(404, "NotFound", "the kubelet does not answer")
        return self.logs[pod][:limit_bytes]

    def put(self, body: Mapping[str, Any], manager: str = "user") -> Raw:
        """Write an object as a user, the kubelet or a controller would: the object, and its status if it is given.

        A new object keeps the UID and the time of creation that it names, so that a test can decide on seniority.
        """
        slot = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])

        def write() -> Raw:
            if slot in self.objects:
                version = self.objects[slot]["metadata"]["resourceVersion"]
                current = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}
                written = self.api.replace(slot, current, manager)
            else:
                fresh = {name: value for name, value in body["metadata"].items() if name != "resourceVersion"}
                given = {name: fresh[name] for name in ("uid", "creationTimestamp") if name in fresh}
                written = self.api.create(slot, {**body, "metadata": fresh}, manager, given)
            if "status" in body and written.get("status") != body["status"]:
                written = self.api.replace_status(slot, body["status"], manager)
            return written

        return self._write("put", slot, write, hooked=False)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object as a user would."""
        self.api.delete((kind, namespace, name))

    def take_events(self) -> Sequence[Event]:
        """Return the events since the last call."""
        taken, self.api.events = self.api.events, []
        return [(verb, copied(raw)) for verb, raw in taken]

    def _write(self, verb: str, slot: Slot, act: Callable[[], Raw], *, hooked: bool = True) -> Raw:
        if hooked:
            self.require_lead()
            self.before_write(verb, slot[0], slot[2])
        written = act()
        self.writes += 1
        self.log.append((verb, slot[0], slot[2]))
        if hooked:
            self.after_write(verb, slot[0], slot[2])
        return written


def _typed(resource: Resource, body: Mapping[str, Any]) -> Raw:
    return {**body, "apiVersion": resource.api_version, "kind": resource.kind}


def _field(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = (found or {}).get(part)
    return found
