"""List and diff, before the first plan and then every ten minutes: resumed watches miss deletions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import ENDPOINT_SLICE, OWN_RESOURCES, SECRET, Resource, child_resources
from kvstrata.contract import MALFORMED
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.refs import Key
from kvstrata.objects import labels

from . import metrics
from .bundles import assemble, bundle_of, take
from .secrets import SecretStore
from .store import Store

log = logging.getLogger(__name__)


class Resync:
    """Compares the store with complete lists. `namespaces` is empty for the whole cluster."""

    def __init__(
        self, kube: Kube, store: Store, secret_store: SecretStore, namespaces: Sequence[str], service_monitors: bool
    ) -> None:
        self._kube, self._store, self._secret_store = kube, store, secret_store
        self._children = child_resources(service_monitors)
        self._scopes: tuple[str | None, ...] = tuple(namespaces) or (None,)

    async def objects(self, report: Callable[[Key], None]) -> None:
        """Update the store; `report` gets every key affected by a missed change."""
        namespaces = [namespace for scope in self._scopes for namespace in self._namespaces(scope)]
        keys = {namespace: frozenset(self._store.domain(namespace).data_keys) for namespace in namespaces}
        for scope in self._scopes:
            for resource in OWN_RESOURCES:
                await self._where_it_may(scope, self._diff(resource, scope, None, report))
            for resource in self._children:
                await self._where_it_may(scope, self._diff(resource, scope, labels.OWNED_SELECTOR, report))
        for namespace, epochs in keys.items():
            domain = self._store.domain(namespace)
            domain.judged_epochs |= epochs & domain.data_keys.keys()
        metrics.RESYNCS.inc()

    async def api_server(self, allowed: AllowedServers) -> None:
        """Allow these external servers, but for the addresses and ports at which the API server listens."""
        try:
            found = await self._kube.get(ENDPOINT_SLICE, "default", "kubernetes") or {}
        except KubeError as error:
            log.warning("tiers may name addresses of the API server, which cannot be read", extra={"error": str(error)})
            return
        ips = [ip for one in found.get("endpoints") or () for ip in one["addresses"]]
        ports = [one["port"] for one in found.get("ports") or () if "port" in one]
        places = {f"[{ip}]:{port}" for ip in ips for port in ports}
        self._store.allowed_servers = replace(allowed, reserved=(*allowed.reserved, *sorted(places)))

    async def secrets(self) -> None:
        for scope in self._scopes:
            await self._where_it_may(scope, self._read_secrets(scope))

    async def _where_it_may(self, scope: str | None, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; a refusal is ignored if the namespace is being deleted or gone, and with it the right to read."""
        try:
            await work
        except KubeError as error:
            if scope is None or not error.is_refusal or not await self._kube.is_ending(scope):
                raise
            log.info("a namespace that goes cannot be looked at any more", extra={"namespace": scope})

    async def _read_secrets(self, scope: str | None) -> None:
        domains = [self._store.domain(namespace) for namespace in self._namespaces(scope)]
        known = [(domain, name, facts) for domain in domains for name, facts in domain.secrets.items()]
        models = ((domain, model) for domain in domains for model in domain.models)
        committed = [(domain, model, domain.bundles.get(model)) for domain, model in models]
        seen: dict[str, set[str]] = {}
        bundles: dict[str, dict[str, Any]] = {}
        async for raw in self._kube.list(SECRET, scope, labels.OWNED_SELECTOR):
            namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
            seen.setdefault(namespace, set()).add(name)
            self._secret_store.observe(self._store.domain(namespace), raw)
            if bundle_of(raw) is not None and name in self._store.domain(namespace).secrets:
                bundles.setdefault(namespace, {})[name] = raw
        for domain, name, facts in known:
            # A Secret written during the list is not in it.
            if name not in seen.get(domain.namespace, set()) and domain.secrets.get(name) is facts:
                self._secret_store.forget(domain, name)
        for domain, model, before in committed:
            if domain.bundles.get(model) is before:
                # Otherwise a commit was made meanwhile.
                take(domain, model, assemble(model, bundles.get(domain.namespace, {})))

    async def _diff(
        self, resource: Resource, scope: str | None, selector: str | None, report: Callable[[Key], None]
    ) -> None:
        known = {namespace: self._versions(resource.kind, namespace) for namespace in self._namespaces(scope)}
        seen: dict[str, set[str]] = {}
        async for raw in self._kube.list(resource, scope, selector):
            metadata: Mapping[str, Any] = raw["metadata"]
            seen.setdefault(metadata["namespace"], set()).add(metadata["name"])
            try:
                self._report(resource.kind, self._store.observe(raw), report)
            except MALFORMED:
                log.exception(
                    "an object of a list cannot be read", extra={"kind": resource.kind, "object": metadata["name"]}
                )
        for namespace, before in known.items():
            now = self._versions(resource.kind, namespace)
            for gone in before.keys() - seen.get(namespace, set()):
                # An object created again during the list is not in it.
                if now.get(gone) == before[gone]:
                    self._report(resource.kind, self._store.forget(resource.kind, namespace, gone), report)

    def _versions(self, kind: str, namespace: str) -> dict[str, int]:
        versions = self._store.domain(namespace).versions
        return {name: versions.of((kind, name)) for name in self._store.names(kind, namespace)}

    def _namespaces(self, scope: str | None) -> tuple[str, ...]:
        return self._store.namespaces if scope is None else (scope,)

    def _report(self, kind: str, keys: frozenset[Key], report: Callable[[Key], None]) -> None:
        if keys:
            metrics.MISSED.labels(kind).inc()
        for key in keys:
            report(key)
