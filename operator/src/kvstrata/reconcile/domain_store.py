"""State of one namespace. Events, lists and answers may be late: an older version revives no deleted object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kvstrata.api.base import InvalidObjectError, Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import CacheDomain, Installation
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import OBJECTS, Ending, World
from kvstrata.plan.ownership import is_ours, may_take_over
from kvstrata.reconcile.background import Clock
from kvstrata.reconcile.parse import OWN_KINDS, unreadable


@dataclass(slots=True, kw_only=True)
class DomainStore(World):
    """A namespace's world, with facts that only the store reads.

    By model: `suspected_bundles` is the root's newest resourceVersion from a watch, infinite after a shard was touched;
    `committed_at` this process' last committed revision and its monotonic time in seconds.
    """

    versions: Versions
    suspected_bundles: dict[str, float] = field(default_factory=dict)
    committed_at: dict[str, tuple[int, float]] = field(default_factory=dict)

    def observe(self, key: Key, raw: Mapping[str, Any]) -> tuple[Resource | None, Resource] | None:
        """Store an object of the API; return its former and its new form. None if it is unreadable: the last valid form
        stays in the store and in force until the object can be read."""
        before: Resource | None = self.objects(key.kind).get(key.name)
        try:
            after = _parse(raw, before)
        except InvalidObjectError as error:
            self.unreadable[key] = unreadable(raw, str(error))
            claim = (raw.get("status") or {}).get("servedBy") if key.kind == CacheDomain.INFO.kind else None
            if claim is not None:  # A newer installation may read the object.
                with suppress(ValueError):
                    self.ending.served_by = Installation.model_validate(claim)
            return None
        if before is not None and (before.uid, before.generation) == (after.uid, after.generation):
            # A spec changes only with the generation. Sharing the object makes comparisons fast.
            after = after.model_copy(update={"spec": before.spec})
        self.replace(key, after)
        return before, after

    def replace(self, key: Key, after: Resource | None) -> Resource | None:
        """Replace an object of the API, None for a deleted one; return the former one."""
        objects = self.objects(key.kind)
        before: Resource | None = objects.get(key.name)
        if before is not None and (after is None or (before.uid, before.generation) != (after.uid, after.generation)):
            # Its needs may have changed.
            self.foreign = {slot: uid for slot, uid in self.foreign.items() if uid != before.uid}
        self.unreadable.pop(key, None)
        self.judged_epochs |= (_epochs(before) - _epochs(after)) & self.data_keys.keys()
        for policy in (before, after):
            if isinstance(policy, TenantCachePolicy):
                self._index_policy(policy, present=policy is after)
        if after is not None:
            objects[key.name] = after
            self._note_presence(after)
            is_new = before is None and isinstance(after, CacheTier) and after.status.observed_generation is None
            if is_new and not any(pod.live for pods in self.pods.values() for pod in pods.values()):
                self.ending.untouched.add(after.uid)
            self._forget_keys_of_former(before, after)
        elif before is not None:
            del objects[key.name]
            self._note_end(before)
        self.claims.replace(key, after)
        return before

    def _index_policy(self, policy: TenantCachePolicy, *, present: bool) -> None:
        if present:
            self.policy_names[policy.uid] = policy.name
        else:
            self.policy_names.pop(policy.uid, None)
        waits = present and policy.status.enforced_generation != policy.generation
        (self.unsettled.add if waits else self.unsettled.discard)(policy.name)
        tenant, names = policy.spec.tenant, set(self.policies_of_tenant.get(policy.spec.tenant, ()))
        (names.add if present else names.discard)(policy.name)
        for index, least in ((self.policies_of_tenant, 1), (self.contested, 2)):
            if len(names) >= least:
                index[tenant] = tuple(sorted(names))
            else:
                index.pop(tenant, None)

    def _note_presence(self, after: Resource) -> None:
        """Record a present object, so that nothing older is taken for its end."""
        match after:
            case CacheTier():
                self.ending.tiers.pop(after.name, None)
            case CachedModel():
                self.ending.models.pop(after.name, None)
            case CacheInvalidation() if after.status.rolled_time is not None:
                self.rolled_since.setdefault(after.uid, self.versions.now())
            case CacheDomain():
                self.ending.domain_id = None if after.status.domain_id is not None else self.ending.domain_id
                self.ending.served_by = None if after.status.served_by is not None else self.ending.served_by

    def _note_end(self, before: Resource) -> None:
        match before:
            case TenantCachePolicy():
                self.ending.refused.discard(before.uid)
            case CacheInvalidation():
                self.rolled_since.pop(before.uid, None)
            case CacheTier():
                self.ending.tiers[before.name] = before
                self.clusters.pop(before.name, None)
            case CachedModel():
                self.ending.models[before.name] = before
                self.bundles.pop(before.name, None)
                self.suspected_bundles.pop(before.name, None)
            case CacheDomain():
                self.ending.domain_id = before.status.domain_id or self.ending.domain_id
                self.ending.served_by = before.status.served_by or self.ending.served_by

    def _forget_keys_of_former(self, before: Resource | None, after: Resource) -> None:
        """Drop wrapped keys that were another CacheDomain's, if `after` is a new one. Secrets with keys go with their
        CacheDomain; keys that a KMS wraps do not. The new domain does not end those; its epochs get new keys."""
        new = isinstance(after, CacheDomain) and after.status.domain_id is None
        if not new or (before is not None and before.uid == after.uid):
            return
        self.keys_lost |= {epoch for epoch, kept in self.data_keys.items() if isinstance(kept, str)}
        self.data_keys = {epoch: kept for epoch, kept in self.data_keys.items() if not isinstance(kept, str)}

    def belongs_to(
        self, owner: Mapping[str, Any], live: Mapping[str, Any], desired: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether an object belongs to the one of reference `owner`, which needs its name; if not, and it may not be
        taken over either, record it as foreign."""
        slot = (live["kind"], live["metadata"]["name"])
        ours = is_ours(self.mark_key, owner, live, desired)
        if ours or may_take_over(owner, live):
            self.foreign.pop(slot, None)
        else:
            self.foreign[slot] = owner["uid"]
        return ours

    def waiting(self, slot: tuple[str, str]) -> frozenset[Key]:
        """Return the keys that wait for the end of a foreign object."""
        uid = self.foreign.get(slot)
        named = ((kind, one) for kind in OBJECTS for one in self.objects(kind).values())
        kinds = [(kind, one.name) for kind, one in named if one.uid == uid] if uid is not None else []
        bundles = {Key(BUNDLE, self.namespace, name) for kind, name in kinds if kind == "CachedModel"}
        return frozenset(bundles | {Key(kind, self.namespace, name) for kind, name in kinds})

    def forget_ending(self) -> None:
        """Forget the deleted namespace, once nothing that could need its data is left."""
        if not (self.erasures or self.unreadable or any(map(self.objects, OBJECTS))):
            self.ending = Ending()


REMEMBERED_S = 3600.0
"""Far longer than a request, a list or a watch may take."""

Slot = tuple[str, str]


class Versions:
    """Versions of one namespace's objects; 0 for unknown ones."""

    def __init__(self, now: Clock) -> None:
        self.now = now
        self._known: dict[Slot, int] = {}
        self._gone: dict[Slot, datetime] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, slot: Slot) -> int:
        return self._known.get(slot, 0)

    def seen(self, slot: Slot, version: int) -> None:
        self._known[slot] = version
        self._gone.pop(slot, None)

    def gone(self, slot: Slot, version: int) -> None:
        """Record that an object is gone since `version`, 0 if unknown; the record expires."""
        self._known[slot] = max(self.of(slot), version)
        self._gone.pop(slot, None)
        self._gone[slot] = now = self.now()
        while (now - self._gone[oldest := next(iter(self._gone))]).total_seconds() > REMEMBERED_S:
            del self._gone[oldest], self._known[oldest]


def _parse(raw: Mapping[str, Any], before: Resource | None) -> Resource:
    """Raises InvalidObjectError. A deleted policy with an invalid spec keeps the last valid one, which names the data
    to erase."""
    kind = OWN_KINDS[raw["kind"]]
    try:
        return kind.parse(raw)
    except InvalidObjectError:
        going = "deletionTimestamp" in raw["metadata"]
        if not (going and isinstance(before, TenantCachePolicy) and before.uid == raw["metadata"].get("uid")):
            raise
        return kind.parse({**raw, "spec": before.spec.to_kubernetes()})


def _epochs(resource: Resource | None) -> frozenset[str]:
    """Return the epochs that a status names. They are random: one that no status names any more never returns."""
    if isinstance(resource, PrefixPool):
        return resource.status.epochs
    scope = getattr(getattr(resource, "status", None), "scope", None)
    return frozenset() if scope is None else frozenset({scope.epoch})


def note_refusal(ending: Ending, policies: Iterable[TenantCachePolicy]) -> frozenset[Key]:
    """Record that nothing can be created in the namespace; return its newly affected deleted policies."""
    news = [policy for policy in policies if policy.metadata.deleting and policy.uid not in ending.refused]
    ending.refused |= {policy.uid for policy in news}
    return frozenset(Key(policy.INFO.kind, policy.namespace, policy.name) for policy in news)
