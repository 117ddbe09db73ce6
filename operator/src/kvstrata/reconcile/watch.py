"""The watches, by kopf.

kopf lists and watches every resource below and calls the handler for each event. `on.event` alone is used: it writes no
annotation, no finalizer and no status, and whatever it misses the list-and-diff pass finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import kopf

from kvstrata.clients.resources import OWN_RESOURCES, SECRET, child_resources
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import labels
from kvstrata.reconcile.lists import Lists
from kvstrata.reconcile.nothing_stored import NoDiffBase, NoProgress
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.store import Store

WATCHER_TASK_PREFIX = "watcher for "
"""kopf's name for the tasks that watch; there is one for each resource and namespace while they live."""


class Watches:
    """What the watches do with what they see: it goes into `store` and `secrets`, the keys concerned to `enqueue`.

    `listed_anew` is called when a watch had lost its place and begins with a list again.
    """

    def __init__(
        self,
        store: Store,
        secrets: SecretWatch,
        enqueue: Callable[[Key], None],
        service_monitors: bool,
        listed_anew: Callable[[], None],
        namespaces: Collection[str],
    ) -> None:
        self._store, self._secrets, self._enqueue = store, secrets, enqueue
        self._service_monitors = service_monitors
        watched = (*OWN_RESOURCES, *child_resources(service_monitors), SECRET)
        self.lists = Lists(watched, namespaces, self._take, listed_anew)

    def _take(self, raw: dict[str, Any]) -> None:
        self._add(self._secrets.observe(raw) if raw["kind"] == SECRET.kind else self._store.observe(raw))

    def _forget(self, raw: dict[str, Any]) -> None:
        metadata = raw["metadata"]
        if raw["kind"] == SECRET.kind:
            gone = self._secrets.forget(raw)
        else:
            gone = self._store.forget(raw["kind"], metadata["namespace"], metadata["name"], raw)
        self._add(gone)

    def _add(self, keys: Collection[Key]) -> None:
        """Queue what an event concerns; bundles first, because pods wait for them, and statuses come after anyway."""
        for key in sorted(keys, key=lambda key: key.kind != BUNDLE):
            self._enqueue(key)

    def registry(self) -> kopf.OperatorRegistry:
        """Return the registry of kopf's handlers."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self.lists.login())

        async def observe(event: kopf.RawEvent, **_: Any) -> None:
            raw: dict[str, Any] = dict(event["object"])
            (self._forget if event["type"] == "DELETED" else self._take)(raw)

        for resource in OWN_RESOURCES:
            kopf.on.event(resource.api_version, resource.plural, registry=registry)(observe)
        owned = dict(labels.OWNED)
        for resource in (*child_resources(self._service_monitors), SECRET):
            kopf.on.event(resource.api_version, resource.plural, labels=owned, registry=registry)(observe)
        return registry


def build_settings(silence_s: float, namespaces: Collection[str]) -> kopf.OperatorSettings:
    """Return kopf's settings: no events posted, watches renewed often, and no giving up on an absent API server.

    A watch that says nothing for `silence_s` seconds is taken for dead and taken up again where it stopped. An API
    server sends a bookmark each minute, so below that quiet watches are renewed for nothing, which is harmless.
    `namespaces` that are named are watched to their end: kopf would leave one as soon as it is being deleted, and what
    its policies wait for then would never be seen.
    """
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = bool(namespaces)
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    # The API server selects: objects that are not the operator's, Secrets above all, are never sent to it.
    for resource in (*child_resources(service_monitors=True), SECRET):
        settings.watching.label_selectors[resource.api_version, resource.plural] = labels.OWNED_SELECTOR
    settings.watching.inactivity_timeout = silence_s
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, *([10] * 360))
    return settings


def live_watchers() -> int:
    """Return how many of kopf's watches run in the current event loop."""
    return sum(1 for task in asyncio.all_tasks() if task.get_name().startswith(WATCHER_TASK_PREFIX))


def expected_watchers(namespaces: int, service_monitors: bool) -> int:
    """Return how many watches there should be; `namespaces` is 0 for one cluster-wide watch a resource."""
    resources = (*OWN_RESOURCES, *child_resources(service_monitors), SECRET)
    return len(resources) * max(1, namespaces)
