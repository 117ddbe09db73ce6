"""The watches, by kopf, and the parts of kopf that are replaced.

kopf lists and watches every resource below, resumes broken watches, and calls the handler for each event. Only
`on.event` is used: it writes no annotation, finalizer or status, and the list-and-diff pass finds missed changes.

- `Lists`: kopf creates a task for every item of its first list, most of the cost of a start with thousands of objects.
  Our session passes whole pages to the store and shows kopf empty lists.
- `Lists.watch`: kopf ends a watch that it cannot read, and with it the process, which serves other namespaces too. Ours
  reports the failure and lists again after a pause. The process still ends by a kind that is not served any more (404:
  kinds are looked up at its start), without valid credentials, and by an error of kopf outside its streams.
- `NoDiffBase`: kopf's storages copy every object of every event for change handlers. We have none, and empty storages
  save a third of an event's cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import aclosing
from http import HTTPStatus
from itertools import chain, repeat
from typing import Any

import aiohttp
import kopf
import orjson
from kopf._cogs.clients import errors, watching

from kvstrata.clients.kube_auth import authorization, find_api
from kvstrata.clients.resources import OWN_RESOURCES, SECRET, Resource, child_resources
from kvstrata.contract import MALFORMED
from kvstrata.model.refs import Key
from kvstrata.objects import labels
from kvstrata.reconcile import metrics
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

_EXPECTED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.GONE)

Take = Callable[[dict[str, Any]], None]
KOPFS_WATCH: Any = watching.infinite_watch
WATCHER_TASK_PREFIX = "watcher for "
"""kopf's name for watching tasks, one for each resource and namespace."""


class Watches:
    """Watch handlers: objects go into `store` and `secrets`, affected keys to `enqueue`. `relisted` is called when a
    watch lost its place and lists again."""

    def __init__(
        self,
        store: Store,
        secrets: SecretWatch,
        enqueue: Callable[[Iterable[Key]], None],
        service_monitors: bool,
        relisted: Callable[[], None],
        namespaces: Collection[str],
    ) -> None:
        self._store, self._secrets, self._enqueue = store, secrets, enqueue
        self._watched = watched(service_monitors)
        self.lists = Lists(self._watched, namespaces, self._take, relisted)

    def _take(self, raw: dict[str, Any]) -> None:
        self._enqueue(self._secrets.observe(raw) if raw["kind"] == SECRET.kind else self._store.observe(raw))

    def _forget(self, raw: dict[str, Any]) -> None:
        metadata = raw["metadata"]
        if raw["kind"] == SECRET.kind:
            self._enqueue(self._secrets.forget(raw))
        else:
            self._enqueue(self._store.forget(raw["kind"], metadata["namespace"], metadata["name"], raw))

    def registry(self) -> kopf.OperatorRegistry:
        watching.infinite_watch = self.lists.watch
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self.lists.login())

        async def observe(event: kopf.RawEvent, **_: Any) -> None:
            raw: dict[str, Any] = dict(event["object"])
            (self._forget if event["type"] == "DELETED" else self._take)(raw)

        for resource in self._watched:
            selected = None if resource in OWN_RESOURCES else dict(labels.OWNED)
            kopf.on.event(resource.api_version, resource.plural, labels=selected, registry=registry)(observe)
        return registry


def build_settings(silence_s: float, namespaces: Collection[str]) -> kopf.OperatorSettings:
    """kopf's settings: no events posted, watches renewed often, and no giving up on an absent API server.

    A watch that is silent for `silence_s` seconds is resumed; an API server sends a bookmark each minute. Named
    `namespaces` are watched to their end: kopf would leave one that is being deleted, and deletions would be missed.
    """
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = bool(namespaces)
    settings.persistence.diffbase_storage = NoDiffBase(())
    settings.persistence.progress_storage = kopf.MultiProgressStorage(())
    # The API server filters: objects that are not the operator's, Secrets above all, are never sent.
    for resource in (*child_resources(service_monitors=True), SECRET):
        settings.watching.label_selectors[resource.api_version, resource.plural] = labels.OWNED_SELECTOR
    settings.watching.inactivity_timeout = silence_s
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    return settings


class Backoffs:
    """Pauses between requests that fail, without an end: after the last one kopf would end a watch, and a missing watch
    ends this process, which serves other namespaces too."""

    def __iter__(self) -> Iterator[float]:
        return chain((1, 1, 2, 3, 5, 8), repeat(10))


def live_watchers() -> int:
    return sum(1 for task in asyncio.all_tasks() if task.get_name().startswith(WATCHER_TASK_PREFIX))


def expected_watchers(namespaces: int, service_monitors: bool) -> int:
    """`namespaces` is 0 for one cluster-wide watch per resource."""
    return len(watched(service_monitors)) * max(1, namespaces)


def watched(service_monitors: bool) -> tuple[Resource, ...]:
    return (*OWN_RESOURCES, *child_resources(service_monitors), SECRET)


class Lists:
    """Passes the lists of `resources` in each of `namespaces` (none: cluster-wide) from kopf's answers to `take`.
    `relisted` is called when a list starts again: deletions meanwhile are in no event. `complete` is set when all lists
    ended once."""

    def __init__(
        self, resources: Collection[Resource], namespaces: Collection[str], take: Take, relisted: Callable[[], None]
    ) -> None:
        self._resources = {resource.path(scope): resource for resource in resources for scope in namespaces or (None,)}
        self._take, self._relisted = take, relisted
        self._begun: set[str] = set()
        self._failures: dict[str, str] = {}
        self._left = set(self._resources)
        self.complete = asyncio.Event()

    def page(self, url_path: str, first: bool, body: dict[str, Any]) -> None:
        """Move a page's objects out of `body`; unreadable ones are logged."""
        resource = self._resources.get(url_path)
        items = body.get("items")
        if resource is None or not (items is None or isinstance(items, list)):
            return
        if first and url_path in self._begun:
            self._relisted()
        self._begun.add(url_path)
        for item in items or ():
            self._take_item(resource, item)
        body["items"] = []
        if not (body.get("metadata") or {}).get("continue"):
            self._left.discard(url_path)
            if not self._left:
                self.complete.set()

    async def note_failures(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Show a list or watch that fails as metric and log, until an answer. A new login (401) or list (410) follows
        by itself."""
        try:
            answer = await send(request)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            self._note(request.url.path, type(error).__name__)
            raise
        failed = answer.status >= HTTPStatus.BAD_REQUEST and answer.status not in _EXPECTED
        self._note(request.url.path, str(answer.status) if failed else "")
        return answer

    def _note(self, path: str, failure: str) -> None:
        resource = self._resources.get(path)
        if resource is None or failure == self._failures.get(path, ""):
            return
        self._failures[path] = failure
        namespace = path.partition("/namespaces/")[2].partition("/")[0]
        metrics.WATCH_FAILING.labels(namespace, resource.plural).set(bool(failure))
        about = {"namespace": namespace, "resource": resource.plural, "failure": failure}
        log.log(
            logging.WARNING if failure else logging.INFO, "a watch fails" if failure else "a watch works", extra=about
        )

    def _take_item(self, resource: Resource, item: Any) -> None:
        try:
            item["apiVersion"], item["kind"] = resource.api_version, resource.kind
            self._take(item)
        except MALFORMED:
            log.exception("an object of a list cannot be read", extra={"kind": resource.kind, "object": name_of(item)})

    async def watch(
        self, *, resource: kopf.Resource, namespace: Any, **others: Any
    ) -> AsyncIterator[watching.Bookmark | kopf.RawEvent]:
        """Yield kopf's events of a resource, from new lists after those that cannot be read."""
        pauses = iter(Backoffs())
        while True:
            try:
                async with aclosing(KOPFS_WATCH(resource=resource, namespace=namespace, **others)) as events:
                    async for event in events:
                        if not isinstance(event, watching.Bookmark):
                            if event["type"] != "BOOKMARK":
                                hash(event["object"]["metadata"]["uid"])  # kopf's key, or an error
                            pauses = iter(Backoffs())
                        yield event
            except (errors.APINotFoundError, kopf.LoginError):
                raise
            except Exception as error:
                self._note(resource.get_url(namespace=namespace), type(error).__name__)
                log.exception("a watch of %s in namespace %s cannot be read, and lists again", resource, namespace)
                await asyncio.sleep(next(pauses))

    def response_class(self) -> type[aiohttp.ClientResponse]:
        """Return the response class that passes lists to `page`."""
        lists = self

        class Response(aiohttp.ClientResponse):
            async def json(self, **_: Any) -> Any:
                decoded = await super().json(encoding="utf-8", loads=orjson.loads)
                if self.status == 200 and isinstance(decoded, dict):
                    lists.page(self.url.path, "continue" not in self.url.query, decoded)
                return decoded

        return Response

    def login(self) -> Callable[..., Awaitable[kopf.AiohttpSession | None]]:
        """Return kopf's login handler; it returns None while only the refused credentials are available."""
        offered: list[tuple[str, dict[str, str]]] = []

        async def login(**_: Any) -> kopf.AiohttpSession | None:
            api = await find_api(connections=0, response_class=self.response_class())
            server, headers = api.configuration.host, await authorization(api.configuration)
            if (server, headers) in offered[-1:]:
                return None
            offered.append((server, headers))
            session = api.configuration.client_session_kwargs
            session["headers"] |= headers
            session["middlewares"] = (self.note_failures, *session["middlewares"])
            return kopf.AiohttpSession(server=server, aiohttp_session=api.rest_client._create_pool_manager())

        return login


class NoDiffBase(kopf.MultiDiffBaseStorage):
    """Remembers no earlier form of an object, and copies none."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()


def name_of(raw: Any) -> str:
    """Return namespace and name of an object for the log; empty for a malformed one."""
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    return f"{metadata.get('namespace')}/{metadata.get('name')}" if isinstance(metadata, dict) else ""
