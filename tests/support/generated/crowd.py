"""A crowd of generated objects: sent to a real API server, and judged by their outcomes."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import yaml

from e2e.cluster.control_plane import ControlPlane
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.refs import GROUP_VERSION
from tests.support.generated.generator import PREFIX, Generator, Schema
from tests.support.generated.onlooker import Onlooker
from tools.generate.conditions import REASONS

Raw = dict[str, Any]
CONNECTIONS = 8
MUTANTS_OF_TWENTY = 5
FIELD = re.compile(r"\b(spec|metadata)(\.|\b)|unknown field")
DOMAIN_SETTLES_WITHIN_S = 120.0
CROWDED = "crowded"
TOO_LARGE = 413

WAITS = {
    "CachedModel": {"RollingOut", "PodsNotReady"},
    "CacheTier": {
        "NoSuchHost", "ConnectionRefused", "Timeout", "Unreachable", "Disconnected", "Error", "NotRedis",
        "SecretNotFound", "InvalidEndpoint",
    },
    "CacheDomain": {"InsufficientCapacity"},
    "PrefixPool": {"InsufficientCapacity"},
    "TenantCachePolicy": {"AwaitingKeys", "InsufficientCapacity"},
    "TenantGroup": {"InsufficientCapacity"},
    "CacheInvalidation": {"TierAway", "NotVerified", "NamingChunks"},
}  # fmt: skip
"""Why an object may wait although the operator has nothing left to do, where no pod runs: a model's pods do not come,
a tier has no room for a guarantee, the Redis of a tier does not answer, so that nothing can be erased there, and no key
management service draws keys. Everything else must be Ready or Stalled."""

WAITS_FOR_SERVERS = "slots wait for a server of shard"
"""Part of the message of a cluster whose pods do not come."""


@dataclass(slots=True)
class Tally:
    """Outcomes of the objects of one kind that were sent."""

    sent: int = 0
    accepted: int = 0
    mutants_accepted: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    stored: int = 0
    gone: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Crowd:
    """Sends `per_kind` objects of each kind into namespaces; one more of them, the crowded one, gets a tenth of all."""

    def __init__(
        self, plane: ControlPlane, schemas: Mapping[str, Schema], *, per_kind: int, namespaces: int, seed: int
    ) -> None:
        self._plane, self._schemas, self._per_kind, self._seed = plane, schemas, per_kind, seed
        self.namespaces = (*(f"crowd-{number:02d}" for number in range(namespaces)), CROWDED)
        self.tallies = {kind: Tally() for kind in schemas}
        self.used = set[str]()
        """Namespaces with an accepted object: each has a CacheDomain."""

    async def __aenter__(self) -> Self:
        tls = ssl.create_default_context(cafile=str(self._plane.pki.crt("ca")))
        tls.load_cert_chain(self._plane.pki.crt("admin"), self._plane.pki.key("admin"))
        cluster = yaml.safe_load(self._plane.kubeconfig.read_text())["clusters"][0]["cluster"]
        self._session = aiohttp.ClientSession(cluster["server"], connector=aiohttp.TCPConnector(ssl=tls, limit=0))
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._onlooker = await Onlooker(self._session, self._schemas, self.namespaces, unsettled).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._onlooker.__aexit__()
        await self._session.close()

    async def open(self) -> None:
        """Make the namespaces."""
        for namespace in self.namespaces:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
            status, answer = await self._call("POST", "/api/v1/namespaces", body)
            assert status == 201, answer

    async def send(self, kind: str) -> None:
        """Send all objects of a kind; remember the API server's answer to each."""
        await asyncio.gather(*(self._send(kind, *one) for one in self._objects(kind)))

    async def edit_domains(self) -> None:
        """Give each namespace's CacheDomain one spec after the other, each when the one before is settled.

        There is one such object a namespace, so its `per_kind` specs are edits.
        """
        await asyncio.gather(*(self._edit_domain(namespace) for namespace in self.namespaces))

    @property
    def left(self) -> dict[str, list[str]]:
        """Of each kind the objects that are not settled yet, with the reason, as the watches show."""
        return self._onlooker.left

    @property
    def events(self) -> int:
        """How many events the watches reported."""
        return self._onlooker.events

    async def judge(self) -> list[str]:
        """Read all objects again; count how they ended, and return those that are not settled, with the reason.

        `stored` counts no tier that the operator created for a model that names none.
        """
        left = []
        for kind, tally in self.tallies.items():
            objects = await self._list(kind)
            tally.ended = Counter(ending(obj) for obj in objects)
            sent = [obj for obj in objects if not obj["metadata"].get("ownerReferences")]
            tally.stored, tally.gone = len(sent), self._onlooker.gone[kind]
            for obj in objects:
                why = unsettled(kind, obj)
                if why:
                    left.append(f"{kind} {obj['metadata']['namespace']}/{obj['metadata']['name']}: {why}")
        return left

    async def _list(self, kind: str) -> list[Raw]:
        status, answer = await self._call("GET", BY_KIND[kind].path(None))
        assert status == 200, answer
        return [obj for obj in answer["items"] if obj["metadata"]["namespace"] in self.namespaces]

    def _share(self, namespace: str) -> int:
        """How many objects of a kind a namespace gets."""
        crowded = self._per_kind // 10
        ordinary = len(self.namespaces) - 1
        if namespace == CROWDED:
            return crowded + (self._per_kind - crowded) % ordinary
        return (self._per_kind - crowded) // ordinary

    def _objects(self, kind: str) -> Iterator[tuple[str, str, Raw, bool]]:
        for namespace in self.namespaces:
            share = self._share(namespace)
            generator = Generator(kind, self._schemas[kind], share, f"{self._seed}/{namespace}")
            for number in range(share):
                mutant = number % 20 < MUTANTS_OF_TWENTY
                spec = generator.mutant() if mutant else generator.spec()
                name = f"{PREFIX[kind]}-{number}" if kind in PREFIX else "default"
                yield namespace, generator.odd_name() if number % 40 == 39 else name, spec, mutant

    async def _send(self, kind: str, namespace: str, name: str, spec: Raw, mutant: bool) -> None:
        body = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        status, answer = await self._call("POST", BY_KIND[kind].path(namespace), body)
        self._note(kind, status, answer, body, mutant)
        if status < 300:
            self._onlooker.expect((kind, namespace, name), answer["metadata"]["generation"])

    async def _edit_domain(self, namespace: str) -> None:
        kind = "CacheDomain"
        for edit in (one for one in self._objects(kind) if one[0] == namespace):
            _, name, spec, mutant = edit
            body = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
            status, answer = await self._put(kind, namespace, name, body)
            self._note(kind, status, answer, body, mutant)
            if status < 300:
                slot, generation = (kind, namespace, name), answer["metadata"]["generation"]
                why = await self._onlooker.settled(slot, generation, DOMAIN_SETTLES_WITHIN_S)
                if why is not None:
                    self.tallies[kind].problems.append(f"{namespace}/{name} did not settle: {why}")

    async def _put(self, kind: str, namespace: str, name: str, body: Raw) -> tuple[int, Raw]:
        """Replace an object that others write, too, or create it."""
        while True:
            found, known = await self._call("GET", BY_KIND[kind].path(namespace, name))
            if found == 404:
                status, answer = await self._call("POST", BY_KIND[kind].path(namespace), body)
            else:
                version = {"resourceVersion": known["metadata"]["resourceVersion"]}
                current = {**body, "metadata": {**body["metadata"], **version}}
                status, answer = await self._call("PUT", BY_KIND[kind].path(namespace, name), current)
            if status != 409:
                return status, answer

    def _note(self, kind: str, status: int, answer: Raw, body: Raw, mutant: bool) -> None:
        tally = self.tallies[kind]
        tally.sent += 1
        if status < 300:
            tally.accepted += 1
            self.used.add(answer["metadata"]["namespace"])
            tally.mutants_accepted += mutant
            return
        tally.refused[status] += 1
        if status == TOO_LARGE:
            return  # It was not even read, so no field can be named.
        causes = (answer.get("details") or {}).get("causes") or ()
        texts = [cause.get("field") or "" for cause in causes] or [answer.get("message", "")]
        if status not in (400, 422) or not any(FIELD.search(text) for text in texts):
            tally.problems.append(f"{status} {answer.get('message', answer)!r:.300} for {json.dumps(body)[:300]}")

    async def _call(self, method: str, path: str, body: Raw | None = None) -> tuple[int, Raw]:
        query = {"fieldValidation": "Strict"} if body else {}
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        async with (
            self._free,
            self._session.request(method, path, params=query, data=data, headers=headers) as answer,
        ):
            return answer.status, await answer.json(content_type=None)


def unsettled(kind: str, obj: Raw) -> str | None:
    """Why an object is not settled: None if it is Ready, Stalled, or waits for one of `WAITS`, for its generation."""
    status = obj.get("status") or {}
    generation = obj["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        return f"generation {generation}, observed {status.get('observedGeneration')}"
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    for condition in conditions.values():
        if condition["reason"] not in {str(reason) for reason in REASONS[kind]}:
            return f"{condition['type']} has the undeclared reason {condition['reason']!r}"
        if condition.get("observedGeneration") != generation:
            return f"{condition['type']} is of generation {condition.get('observedGeneration')}"
    ready, stalled = conditions.get("Ready"), conditions.get("Stalled")
    if ready is None:
        return f"conditions are {sorted(conditions)}"
    if stalled is not None:
        if ready["status"] != "False" or stalled["status"] != "True":
            return f"Ready is {ready['status']} and Stalled {stalled['status']}"
        return None if stalled["message"] else "Stalled without a message"
    if ready["status"] == "True":
        return None
    if ready["reason"] in WAITS.get(kind, ()) and ready["message"]:
        return None
    if kind == "CacheTier" and WAITS_FOR_SERVERS in ready["message"]:
        return None
    return f"Ready is {ready['status']}/{ready['reason']}: {ready.get('message', '')}"


def ending(obj: Raw) -> str:
    """How an object ended, for people."""
    conditions = {c["type"]: c for c in (obj.get("status") or {}).get("conditions") or ()}
    if conditions.get("Stalled", {}).get("status") == "True":
        return f"Stalled/{conditions['Stalled']['reason']}"
    ready = conditions.get("Ready", {"status": "none", "reason": ""})
    return f"Ready={ready['status']}/{ready['reason']}"
