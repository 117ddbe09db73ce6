"""The API server in memory against the real one: the same requests get the same answers, objects and field owners.

What the real server adds by default is not compared; everything that a request wrote is, and so is whether it still
is there, who owns it, and whether the request counted as a change.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND, Resource
from tests.apiserver.merge_cases import CASES, DEPLOYMENT, POLICY, Step, random_deployment, random_policy
from tests.apiserver.operator_process import Operators
from tests.apiserver.server import Server
from tests.support.amounts import seeds
from tests.support.memory_api import schemas
from tests.support.memory_api.fieldsets import Path, leaves
from tests.support.memory_api.objects import MemoryApi, Slot
from tests.support.memory_api.schemas import is_own, schema_of

pytestmark = pytest.mark.claim(
    "the API server in memory, at whose every write the operator dies, answers as the real one"
)

NAMESPACE = "merging"
PUBLISHED_WITHIN_S = 60.0
Raw = dict[str, Any]
_SERVER_SET = ("uid", "creationTimestamp", "resourceVersion", "managedFields", "deletionTimestamp")


class RealApi:
    """The real server, asked as the operator asks it."""

    def __init__(self, kubeconfig: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._kubeconfig = kubeconfig
        self._kube = self._run(self._connect())

    async def _connect(self) -> Kube:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", self._kubeconfig)
            return await Kube.connect()

    def _run(self, asked: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asked)

    def close(self) -> None:
        """Close connections."""
        self._run(self._kube.close())
        self._loop.close()

    def document(self, path: str) -> Raw:
        """Return a document of the server itself, which publishes some of them after it is ready."""
        ends = time.monotonic() + PUBLISHED_WITHIN_S
        while True:
            try:
                found: Raw = self._run(self._kube.request("GET", path))
            except KubeError as error:
                if not error.is_not_found or time.monotonic() > ends:
                    raise
                time.sleep(0.2)
            else:
                return found

    def get(self, slot: Slot) -> Raw | None:
        """Return an object."""
        found: Raw | None = self._run(self._kube.get(_resource(slot), slot[1], slot[2]))
        return found

    def act(self, step: Step) -> None:
        """Send the request. Raises KubeError."""
        slot, resource = step.slot, _resource(step.slot)
        query = {"fieldManager": step.manager, **({"force": "true"} if step.force else {})}
        path = resource.path(slot[1], slot[2], "status" if step.verb == "status" else None)
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **step.body}
        match step.verb:
            case "apply":
                self._send("PATCH", path, query, body, "application/apply-patch+yaml")
            case "create":
                self._send("POST", resource.path(slot[1]), {"fieldManager": step.manager}, body)
            case "replace":
                stored = self.get(slot) or {"metadata": {}}
                self._send("PUT", path, {"fieldManager": step.manager}, _replacement(stored, body))
            case "patch" | "status":
                self._send("PATCH", path, {"fieldManager": step.manager}, step.body, "application/merge-patch+json")
            case _:
                stored = self.get(slot) or {"metadata": {}}
                uid = step.body.get("uid") or stored["metadata"].get("uid", "none")
                self._send("DELETE", path, {}, {"preconditions": {"uid": uid}})

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Any, content: str = "application/json"
    ) -> None:
        self._run(self._kube.request(method, path, query=query, body=body, content_type=content))

    def managed_fields(self, slot: Slot) -> dict[tuple[str, str, str], Raw]:
        """Return the fields of each manager."""
        entries = ((self.get(slot) or {}).get("metadata") or {}).get("managedFields") or ()
        return {(e["manager"], e["operation"], e.get("subresource", "")): e["fieldsV1"] for e in entries}


def act_in_memory(api: MemoryApi, step: Step) -> None:
    """Send the request to the server in memory. Raises KubeError."""
    slot, resource = step.slot, _resource(step.slot)
    body = {"apiVersion": resource.api_version, "kind": resource.kind, **step.body}
    match step.verb:
        case "apply":
            api.apply(slot, body, step.manager, force=step.force)
        case "create":
            api.create(slot, body, step.manager)
        case "replace":
            api.replace(slot, _replacement(api.objects.get(slot, {"metadata": {}}), body), step.manager)
        case "patch":
            api.patch(slot, step.body, step.manager)
        case "status":
            api.patch_status(slot, step.body, step.manager)
        case _:
            stored = api.objects.get(slot, {"metadata": {}})
            api.delete(slot, step.body.get("uid") or stored["metadata"].get("uid", "none"))


class Pair:
    """Both servers, and every path that was ever seen in memory: where it is in one, it is in the other."""

    def __init__(self, real: RealApi) -> None:
        self.real, self.memory = real, MemoryApi(collects=False)
        self._seen: dict[Slot, set[Path]] = {}

    def play(self, step: Step) -> int:
        """Send a request to both and compare; return the status of the answer, 200 for any success."""
        before = MemoryApi()
        before.take_over(self.memory)
        versions = self._versions(step.slot)
        told = _status(lambda: self.real.act(step))
        ours = _status(lambda: act_in_memory(self.memory, step))
        if told == 422:
            # Schemas and rules of validation are not what this one knows.
            self.memory.take_over(before)
            return told
        assert ours == told, step
        after = self._versions(step.slot)
        changed = [old != new for old, new in zip(versions, after, strict=True)]
        assert changed[0] == changed[1], f"counts as a change in one only: {step}"
        self.compare(step.slot)
        return told

    def compare(self, slot: Slot) -> None:
        """Compare one object."""
        real, memory = self.real.get(slot), self.memory.objects.get(slot)
        assert (real is None) == (memory is None)
        if real is None or memory is None:
            return
        schema = schema_of(slot[0])
        ours, theirs = leaves(schema, _without_server_set(memory)), leaves(schema, _without_server_set(real))
        known = self._seen.setdefault(slot, set())
        known |= ours.keys()
        assert {path: value for path, value in theirs.items() if path in known} == ours
        for name in ("generation", "finalizers"):
            if name in memory["metadata"] or name == "finalizers":
                assert memory["metadata"].get(name) == real["metadata"].get(name), name
        assert ("deletionTimestamp" in memory["metadata"]) == ("deletionTimestamp" in real["metadata"])
        ours_owned, owned = self.memory.managed_fields(slot), self.real.managed_fields(slot)
        if not is_own(slot[0]):
            # Defaults belong to whoever wrote first without applying.
            ours_owned = {who: fields for who, fields in ours_owned.items() if who[1] == "Apply"}
            owned = {who: fields for who, fields in owned.items() if who[1] == "Apply"}
        assert _flat(ours_owned) - _flat(owned) == set(), "owned in memory only"
        assert _flat(owned) - _flat(ours_owned) == set(), "owned in the real server only"
        for path in known:
            if path[-1].startswith("k:"):
                assert _order(schema, memory, path[:-1]) == _order(schema, real, path[:-1])

    def _versions(self, slot: Slot) -> tuple[str, str]:
        nothing: Raw = {"metadata": {}}
        real, memory = self.real.get(slot) or nothing, self.memory.objects.get(slot, nothing)
        return real["metadata"].get("resourceVersion", ""), memory["metadata"].get("resourceVersion", "")


def _flat(managers: Mapping[tuple[str, str, str], Raw]) -> set[tuple[str, ...]]:
    """Return every owned path, with its manager before it."""
    flat: set[tuple[str, ...]] = set()

    def descend(tree: Raw, path: tuple[str, ...]) -> None:
        if not tree:
            flat.add(path)
        for step, below in tree.items():
            descend(below, (*path, step))

    for who, fields in managers.items():
        descend(fields, who)
    return flat


def _status(act: Callable[[], None]) -> int:
    try:
        act()
    except KubeError as error:
        return error.status
    return 200


def _resource(slot: Slot) -> Resource:
    return BY_KIND[slot[0]]


def _replacement(stored: Mapping[str, Any], body: Mapping[str, Any]) -> Raw:
    """Return `body` as an update of what is stored, unless it names a version itself."""
    version = {"resourceVersion": stored["metadata"].get("resourceVersion", "1")}
    return {**body, "metadata": {**version, **body["metadata"]}}


def _without_server_set(raw: Mapping[str, Any]) -> Raw:
    metadata = {name: value for name, value in raw["metadata"].items() if name not in _SERVER_SET}
    metadata = {name: value for name, value in metadata.items() if name not in ("generation", "finalizers")}
    return {**raw, "metadata": metadata}


def _order(schema: Mapping[str, Any], raw: Any, path: Path) -> list[str]:
    """Return the keys of the list at `path`, in their order."""
    here, known = raw, schema
    for step in path:
        if step.startswith("f:"):
            here, known = (here or {}).get(step[2:]), schemas.child(known, step[2:])
        else:
            item = schemas.item_of(known)
            here = next((i for i in here or () if schemas.element(known, i) == step), None)
            known = item
    return [schemas.element(known, item) for item in here or ()]


@pytest.fixture(scope="module")
def real(server: Server, operators: Operators) -> Iterator[RealApi]:
    assert not operators.running(), "an operator writes statuses of what is compared here: its tests have to come later"
    server.kubectl("create", "namespace", NAMESPACE)
    api = RealApi(str(server.kubeconfig))
    yield api
    api.close()


def test_what_is_known_of_the_built_in_kinds_is_what_the_server_says(real: RealApi) -> None:
    """`KVSTRATA_UPDATE_GOLDEN=1` takes a newer server's document over."""
    text = schemas.written(schemas.cut_down(real.document(f"/openapi/v3/{path}") for path in schemas.GROUP_VERSIONS))
    if os.environ.get("KVSTRATA_UPDATE_GOLDEN"):
        schemas.KUBERNETES.write_text(text)
    assert json.loads(text) == json.loads(schemas.KUBERNETES.read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_of_requests_has_the_same_effect_in_memory(real: RealApi, name: str) -> None:
    pair = Pair(real)
    for number, step in enumerate(CASES[name]):
        assert pair.play(step) == step.status, f"step {number}: {step}"


@pytest.mark.parametrize("seed", seeds(3, claims=1))
def test_random_applies_of_three_managers_have_the_same_effect_in_memory(real: RealApi, seed: int) -> None:
    pair, chance = Pair(real), random.Random(seed)
    taken = 0
    for number in range(40):
        for config, kind, name in (
            (random_deployment(chance), DEPLOYMENT, f"random-{seed}"),
            (random_policy(chance), POLICY, f"random-{seed}"),
        ):
            manager, force = chance.choice(["alice", "bob", "carol"]), chance.random() < 0.5
            body = {**config, "metadata": {**config.get("metadata", {}), "name": name, "namespace": NAMESPACE}}
            taken += pair.play(Step("apply", kind, name, body, manager, force=force or number == 0)) == 200
    assert taken > 40
