"""The watches, by kopf.

kopf lists and watches every resource below and calls the handler for each event. `on.event` alone is used: it writes no
annotation, no finalizer and no status, and whatever it misses the list-and-diff pass finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import kopf

from kvstrata.adapters.resources import OWN_RESOURCES, SECRET, child_resources
from kvstrata.model.refs import Key
from kvstrata.objects import labels
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.store import Store

from .nothing_stored import NoDiffBase, NoProgress

WATCHER_TASK_PREFIX = "watcher for "
"""kopf's name for the tasks that watch; there is one for each resource and namespace while they live."""


def build_registry(
    store: Store,
    secrets: SecretWatch,
    enqueue: Callable[[Key], None],
    service_monitors: bool,
    listed: Callable[[], None],
) -> kopf.OperatorRegistry:
    """Return a registry whose handlers feed `store` and `secrets`, and `enqueue` the keys that an event concerns.

    `listed` is called for each object that comes from a list: once at the start, and later when a watch had lost its
    place, so that what was deleted meanwhile is in no event.
    """
    registry = kopf.OperatorRegistry()

    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    kopf.on.login(registry=registry)(login)

    async def observe(event: kopf.RawEvent, **_: Any) -> None:
        raw: dict[str, Any] = dict(event["object"])
        metadata = raw["metadata"]
        if event["type"] is None:
            listed()
        if event["type"] == "DELETED":
            keys = store.forget(raw["kind"], metadata["namespace"], metadata["name"], raw)
        else:
            keys = store.observe(raw)
        for key in keys:
            enqueue(key)

    async def observe_secret(event: kopf.RawEvent, **_: Any) -> None:
        raw: dict[str, Any] = dict(event["object"])
        if event["type"] is None:
            listed()
        for key in secrets.forget(raw) if event["type"] == "DELETED" else secrets.observe(raw):
            enqueue(key)

    for resource in OWN_RESOURCES:
        kopf.on.event(resource.api_version, resource.plural, registry=registry)(observe)
    owned = dict(labels.OWNED)
    for resource in child_resources(service_monitors):
        kopf.on.event(resource.api_version, resource.plural, labels=owned, registry=registry)(observe)
    kopf.on.event(SECRET.api_version, SECRET.plural, labels=owned, registry=registry)(observe_secret)
    return registry


def build_settings(silence_s: float) -> kopf.OperatorSettings:
    """Return kopf's settings: no events posted, watches renewed often, and no giving up on an absent API server.

    A watch that says nothing for `silence_s` seconds is taken for dead and taken up again where it stopped. An API
    server sends a bookmark each minute, so below that quiet watches are renewed for nothing, which is harmless.
    """
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    # The API server selects: Secrets that are not the operator's are never sent to it.
    settings.watching.label_selectors[SECRET.api_version, SECRET.plural] = labels.OWNED_SELECTOR
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
