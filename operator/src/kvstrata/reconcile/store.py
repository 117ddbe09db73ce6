"""The store: all that the operator knows, by namespace, and the keys that a change affects.

Events and lists may arrive late, twice or out of order: only a newer resourceVersion replaces an object. Answers to the
operator's own writes go into the store, so their events change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from kvstrata.api.cachedomain import DOMAIN_NAME, Installation
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.pods import Departure, Pod, VerifiedState
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import OBJECTS, World
from kvstrata.plan.claim import served_by_another
from kvstrata.plan.keys.data_keys import HOLDERS
from kvstrata.plan.ownership import controllers
from kvstrata.reconcile.affected import affected_by_object, affected_by_pod, affected_by_state

from .background import Clock
from .domain_store import DomainStore, Versions
from .parse import OWN_KINDS, owners, parse_pod, parse_server_pod, resource_version

MAX_DEPARTURES = 1000
"""Departed pods remembered for each model; forgotten ones count as unaccounted for."""


class Store:
    """`entropy` returns 64 random bytes a call. Each World has `allowed_servers` and `allowed_folders`."""

    def __init__(self, entropy: Callable[[], bytes], now: Clock) -> None:
        self._entropy, self._now = entropy, now
        self._domains: dict[str, DomainStore] = {}
        self.term, self._mark_key = 0, b""
        self.installation: Installation | None = None
        self.allowed_servers: AllowedServers | None = None
        self.allowed_folders: tuple[str, ...] | None = None

    def domain(self, namespace: str) -> DomainStore:
        found = self._domains.get(namespace)
        if found is None:
            # Not setdefault, which would build a store of thirty containers at each of millions of calls.
            versions = Versions(self._now)
            found = DomainStore(namespace, self.term, b"", versions=versions, mark_key=self._mark_key)
            self._domains[namespace] = found
        return found

    def take_mark_key(self, key: bytes) -> None:
        """Set the installation's key of marks, before Secrets are observed."""
        self._mark_key = key
        for d in self._domains.values():
            d.mark_key = key

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(sorted(self._domains))

    def world(self, namespace: str) -> World:
        """Return the world for one plan; valid until the next await."""
        d = self.domain(namespace)
        d.term, d.entropy, d.installation = self.term, self._entropy(), self.installation
        d.allowed_servers, d.allowed_folders = self.allowed_servers, self.allowed_folders
        return d

    def is_anothers(self, namespace: str) -> bool:
        """Whether another installation serves the namespace."""
        return bool(served_by_another(self.world(namespace)))

    def observe(self, raw: Mapping[str, Any]) -> frozenset[Key]:
        """Store an object from the server; return the affected keys (none for an old version)."""
        kind, metadata = raw["kind"], raw["metadata"]
        d = self.domain(metadata["namespace"])
        version, slot = resource_version(raw), (kind, metadata["name"])
        if version and version <= d.versions.of(slot):
            return frozenset()
        d.versions.seen(slot, version)
        if kind in OWN_KINDS:
            key = Key(kind, d.namespace, metadata["name"])
            change = d.observe(key, raw)
            return affected_by_object(self.world(d.namespace), key, *change) if change else frozenset({key})
        if kind == "Pod":
            return self._observe_pod(d, raw)
        self._disown(d, slot)
        before, waiting, d.children[slot] = d.children.get(slot), d.waiting(slot), raw
        d.foreign.pop(slot, None)
        for uid in controllers(raw):
            d.owned[uid].add(slot)
        return owners(raw) | waiting | (owners(before) if before else frozenset())

    def forget(self, kind: str, namespace: str, name: str, last: Mapping[str, Any] | None = None) -> frozenset[Key]:
        """Record that an object is gone; `last` is its final state if known."""
        d = self.domain(namespace)
        version = resource_version(last) if last else 0
        if version and version < d.versions.of((kind, name)):
            return frozenset()
        # An answer to an own write, and a page of a list, may arrive after the deletion: none brings the object back.
        d.versions.gone((kind, name), version)
        if kind in OWN_KINDS:
            d.memo.forget(name)
            key = Key(kind, namespace, name)
            before = d.replace(key, None)
            affected = affected_by_object(self.world(namespace), key, before, None)
            d.forget_ending()
            return affected
        if kind == "Pod":
            ended = last is not None and (server := parse_server_pod(last)[1]) is not None and server.ended
            return self._forget_pod(d, name, parse_pod(last) if last else None, ended=ended)
        self._disown(d, (kind, name))
        child, waiting = d.children.pop((kind, name), None), d.waiting((kind, name))
        d.foreign.pop((kind, name), None)
        d.memo.forget(name)
        return waiting | owners(child) if child else waiting

    def names(self, kind: str, namespace: str) -> frozenset[str]:
        d = self.domain(namespace)
        if kind in OWN_KINDS:
            return frozenset(d.objects(kind)) | {key.name for key in d.unreadable if key.kind == kind}
        if kind == "Pod":
            return frozenset[str]().union(*d.pods.values(), *d.servers.values())
        return frozenset(name for child_kind, name in d.children if child_kind == kind)

    def observe_state(self, pod: Pod, namespace: str, verified: VerifiedState) -> frozenset[Key]:
        """Store a pod's state; an acknowledgement never goes back while the same gate process lives."""
        d = self.domain(namespace)
        if pod.name not in d.pods[pod.model]:
            return frozenset()  # The pod is gone meanwhile.
        before = d.states.get(pod.uid)
        d.states[pod.uid] = verified
        if not verified.state.engine_ready:
            # After a restart the engine may read another tokenizer.
            d.renders.pop(pod.uid, None)
        return affected_by_state(self.world(namespace), pod, before, verified)

    def lose_contact(self, namespace: str, uid: str) -> None:
        states = self.domain(namespace).states
        if (answer := states.get(uid)) is not None and answer.in_contact:
            states[uid] = replace(answer, in_contact=False)

    def take_access(self, namespace: str, tier: str, read: Mapping[tuple[str, str], bytes]) -> frozenset[Key]:
        """Store values of a Redis tier's Secrets; return the keys of its models' bundles if one differs."""
        d = self.domain(namespace)
        known = d.access.get(tier, {})
        if read.items() <= known.items():
            return frozenset()
        d.access[tier] = {**known, **read}
        models = (model for name, model in d.models.items() if tier in model.tier_names)
        return frozenset(Key(BUNDLE, namespace, model.name) for model in models)

    def recall_departures(self) -> None:
        """Record pods that vanished while no operator led: named in a model's or tier's status, and not listed."""
        for d in self._domains.values():
            d.led_since = self._now()
            for model in d.models.values():
                known = {pod.uid for pod in d.pods[model.name].values()}
                known |= {gone.uid for gone in d.departures.get(model.name, ())}
                for one in model.status.witnesses:
                    if one.uid not in known:
                        missing = Departure(
                            one.name, one.uid, self._now(), clean=False, acked=one.acked or 0, node=one.node
                        )
                        d.departures[model.name] = (*d.departures.get(model.name, ()), missing)
            for name, tier in d.tiers.items():
                known = {pod.uid for pod in d.servers.get(name, {}).values()}
                known |= {gone.uid for gone in d.lost_servers.get(name, ())}
                unseen = (one for one in tier.status.servers if one.uid not in known)
                lost = [Departure(one.name, one.uid, one.lost_at or self._now(), clean=False) for one in unseen]
                d.lost_servers[name] = (*lost, *d.lost_servers.get(name, ()))

    def all_keys(self) -> Iterator[Key]:
        return chain.from_iterable(map(self.keys_of, self._domains))

    def keys_of(self, namespace: str) -> Iterator[Key]:
        d = self.domain(namespace)
        for kind in OBJECTS:
            yield from (Key(kind, namespace, name) for name in d.objects(kind))
        yield from d.unreadable
        yield from self.key_holders(namespace)

    def key_holders(self, namespace: str) -> Iterator[Key]:
        """Yield the domain, which draws missing data keys, and the bundles, which carry them."""
        yield Key("CacheDomain", namespace, DOMAIN_NAME)
        yield from (Key(BUNDLE, namespace, name) for name in self.domain(namespace).models)

    def _disown(self, d: DomainStore, slot: tuple[str, str]) -> None:
        known = d.children.get(slot)
        for uid in controllers(known) if known else ():
            d.owned[uid].discard(slot)
            if not d.owned[uid]:
                del d.owned[uid]

    def _observe_pod(self, d: DomainStore, raw: Mapping[str, Any]) -> frozenset[Key]:
        pod = parse_pod(raw)
        if pod is None:
            return self._observe_server(d, raw)
        before = d.pods[pod.model].get(pod.name)
        gone = self._forget_pod(d, before.name, None) if before and before.uid != pod.uid else frozenset()
        d.pods[pod.model][pod.name] = pod
        if pod.live:
            d.ending.untouched.clear()
        return gone | affected_by_pod(self.world(d.namespace), before, pod)

    def _observe_server(self, d: DomainStore, raw: Mapping[str, Any]) -> frozenset[Key]:
        tier, server = parse_server_pod(raw)
        if server is None or d.servers[tier].get(server.name) == server:
            return frozenset()
        if (known := d.servers[tier].get(server.name)) is not None and known.uid != server.uid:
            self._forget_pod(d, server.name, None)
        d.servers[tier][server.name] = server
        return frozenset({Key("CacheTier", d.namespace, tier)})

    def _forget_pod(self, d: DomainStore, name: str, last: Pod | None, *, ended: bool = False) -> frozenset[Key]:
        for tier, servers in d.servers.items():
            if (server := servers.pop(name, None)) is not None:
                if server.ever_ran and not (ended or server.ended):
                    lost = Departure(server.name, server.uid, self._now(), clean=False)
                    d.lost_servers[tier] = (*d.lost_servers.get(tier, ()), lost)[-MAX_DEPARTURES:]
                holders = () if tier in d.tiers else HOLDERS  # their record of stores
                keys = (Key(kind, d.namespace, one) for kind in holders for one in d.objects(kind))
                return frozenset({Key("CacheTier", d.namespace, tier), *keys})
        for model, pods in d.pods.items():
            if (pod := pods.pop(name, None)) is None:
                continue
            clean = not (last or pod).live
            answer = d.states.get(pod.uid)
            departure = Departure(pod.name, pod.uid, self._now(), clean, answer.state.acked if answer else 0, pod.node)
            d.departures[model] = (*d.departures.get(model, ()), departure)[-MAX_DEPARTURES:]
            for facts in (d.states, d.renders, d.warmed, d.holdings, d.probes):
                facts.pop(pod.uid, None)
            return affected_by_pod(self.world(d.namespace), pod, None)
        return frozenset()
