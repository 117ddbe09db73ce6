"""The writer: carries out plans. What it wrote goes into the store from the API server's answer."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.redis_probe import probe_redis
from kvstrata.adapters.resources import BY_KIND, SECRET, SERVICE_MONITOR
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.contract.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle
from kvstrata.model.facts import BackendReport, CommittedBundle
from kvstrata.model.refs import BUNDLE, FIELD_MANAGER_PREFIX, Key
from kvstrata.objects import labels, names
from kvstrata.objects.applied import missing
from kvstrata.plan.refused import plan_refused
from kvstrata.plan.types import Action, CommitBundle, Create, EnsureSecret, Plan, ProbeBackend, Remove, StatusWrite

from . import metrics
from .bundles import read_bundle, take
from .clock import utc_now
from .queue import WorkQueue
from .secrets import Keeper, decode
from .store import Store

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 0.1
"""A bundle is committed at most ten times a second; edits in between are carried by the next commit."""

PROGRESS_INTERVAL_S = 0.25
"""How long a status that only tells of progress waits: most often what it would report is over by then."""


class Writer:
    """Carries out plans for one operator process. `leading` says whether this process may still write."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue, keeper: Keeper, leading: Callable[[], bool]) -> None:
        self._kube, self._store, self._queue, self._keeper, self._leading = kube, store, queue, keeper, leading
        self._probes: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def carry_out(self, key: Key, plan: Plan) -> None:
        """Write everything of `plan`, in its order. Raises KubeError on the first refusal; what was written stands.

        A ChildRefusedError is told in the status of `key` before it is raised.
        """
        for action in plan.actions:
            await self._act(key, action)
        await self._apply_all(key, plan.apply)
        if not plan.statuses:
            self._queue.put_off_no_more(key)
        for write in plan.statuses:
            await self._write_status(key, write)
        for other in plan.enqueue:
            self._queue.add(other)
        if plan.wake_after_s is not None:
            self._queue.add(key, plan.wake_after_s)
        if key.kind == "CacheTier" and not self._is_asked(key.namespace, key.name):
            self._store.domain(key.namespace).backends.pop(key.name, None)
            metrics.BACKEND_UP.remove(key.namespace, key.name)

    def _is_asked(self, namespace: str, tier: str) -> bool:
        """Whether a tier exists and has a server that the operator asks."""
        found: CacheTier | None = self._store.domain(namespace).objects["CacheTier"].get(tier)
        if found is None or found.metadata.deleting or found.status.is_true(ConditionType.STALLED):
            return False
        return found.spec.medium is Medium.REDIS

    async def _act(self, key: Key, action: Action) -> None:
        match action:
            case EnsureSecret():
                self._may_write()
                await self._keeper.ensure(self._store.domain(key.namespace), action)
            case CommitBundle():
                await self._commit(key, action)
            case ProbeBackend():
                self._probe(key.namespace, action)
            case Create():
                await self._create(key, action.body)
            case Remove():
                self._may_write()
                await self._kube.delete(BY_KIND[action.kind], key.namespace, action.name, action.uid)

    async def _create(self, key: Key, body: Mapping[str, Any]) -> None:
        self._may_write()
        try:
            created = await self._kube.create(BY_KIND[body["kind"]], key.namespace, body)
        except KubeError as error:
            if error.is_conflict:
                return
            raise
        self._enqueue(self._store.observe(_typed(created, body)))

    async def _apply_all(self, key: Key, children: Iterable[Mapping[str, Any]]) -> None:
        try:
            for desired in children:
                await self._apply(key, desired)
        except ChildRefusedError as refused:
            told = plan_refused(self._store.world(key.namespace), key, refused.child, refused.message, utc_now())
            for write in told.statuses:
                await self._write_status(key, write)
            raise

    async def _apply(self, key: Key, desired: Mapping[str, Any]) -> None:
        kind, name = desired["kind"], desired["metadata"]["name"]
        domain = self._store.domain(key.namespace)
        wanted = missing(domain.memo, domain.children.get((kind, name)), desired)
        if wanted is None:
            return
        self._may_write()
        manager = f"{FIELD_MANAGER_PREFIX}-{key.kind.lower()}"
        try:
            applied = await self._kube.apply(BY_KIND[kind], key.namespace, wanted, manager)
        except KubeError as error:
            if error.is_not_found and kind == SERVICE_MONITOR.kind:
                return
            if error.is_refusal:
                raise ChildRefusedError(kind, name, error) from error
            raise
        metrics.WRITES.labels(kind, "apply").inc()
        self._enqueue(self._store.observe(_typed(applied, desired)))

    async def _write_status(self, reconciled: Key, write: StatusWrite) -> None:
        if not write.can_wait:
            self._queue.put_off_no_more(write.key)
        elif not self._queue.put_off(write.key, PROGRESS_INTERVAL_S):
            return
        self._may_write()
        resource = BY_KIND[write.key.kind]
        key = write.key
        try:
            written = await self._kube.patch_status(
                resource, key.namespace, key.name, write.status, write.resource_version
            )
        except KubeError as error:
            if error.is_not_found:
                return
            if error.is_conflict:
                await self._refresh(key)
            raise
        metrics.WRITES.labels(key.kind, "status").inc()
        concerned = self._store.observe(written | {"apiVersion": resource.api_version, "kind": resource.kind})
        # Its own status tells the reconciled object nothing new; others may follow from it (an epoch, say).
        self._enqueue(concerned - {reconciled})

    async def _refresh(self, key: Key) -> None:
        resource = BY_KIND[key.kind]
        fresh = await self._kube.get(resource, key.namespace, key.name)
        if fresh is not None:
            self._enqueue(self._store.observe(fresh | {"apiVersion": resource.api_version, "kind": resource.kind}))

    async def _commit(self, key: Key, commit: CommitBundle) -> None:
        self._may_write()
        started = time.monotonic()
        self._queue.hold_off(key, COMMIT_INTERVAL_S)
        for index in commit.shards:
            await self._write_shard(key, commit, index)
        self._may_write()
        root = _bundle_secret(names.bundle_root(commit.model), ROOT_DATA_KEY, commit.root.encode(), commit)
        try:
            if not commit.resource_version:
                written = await self._kube.create(SECRET, key.namespace, root)
            else:
                root["metadata"]["resourceVersion"] = commit.resource_version
                written = await self._kube.replace(SECRET, key.namespace, root)
            version = written["metadata"]["resourceVersion"]
        except KubeError as error:
            if error.is_refusal or error.is_too_many:
                raise
            # The answer may have been lost after the write: then what is stored is what was to be written.
            found = await read_bundle(self._kube, key.namespace, commit.model)
            if found is None or found.bundle != Bundle(commit.root, commit.entries):
                take(self._store.domain(key.namespace), commit.model, found)
                raise
            version = found.resource_version
        domain = self._store.domain(key.namespace)
        before = domain.bundles.get(commit.model)
        held = {entry.policy for entry in before.bundle.entries.values()} if before else set()
        dropped = frozenset(held - {entry.policy for entry in commit.entries.values()})
        domain.bundles[commit.model] = CommittedBundle(
            Bundle(commit.root, commit.entries), version, commit.compiled, commit.keyless
        )
        domain.committed_at[commit.model] = (commit.root.revision, time.monotonic())
        metrics.COMMITS.observe(time.monotonic() - started)
        for other in ("TenantCachePolicy", "TenantGroup"):
            self._enqueue(
                {Key(other, key.namespace, name) for name in self._concerned(key.namespace, other, commit, dropped)}
            )
        self._enqueue({Key("CachedModel", key.namespace, commit.model), Key("CacheDomain", key.namespace, "default")})
        self._enqueue(
            {
                Key("CacheInvalidation", key.namespace, invalidation.name)
                for invalidation in domain.objects["CacheInvalidation"].values()
                if not (invalidation.status.phase and invalidation.status.phase.finished)
            }
        )

    async def _write_shard(self, key: Key, commit: CommitBundle, index: int) -> None:
        """Fill the slot of a shard that no reader uses, if it is as this process knows it.

        Otherwise somebody else wrote it, perhaps another leader: then the plan was made for a bundle of the past.
        """
        self._may_write()
        name = names.bundle_shard(commit.model, index, commit.root.shards[index].slot)
        body = _bundle_secret(name, SHARD_DATA_KEY, commit.shards[index], commit)
        domain = self._store.domain(key.namespace)
        known = domain.secrets.get(name)
        try:
            if known is None:
                written = await self._kube.create(SECRET, key.namespace, body)
            else:
                body["metadata"]["resourceVersion"] = known.resource_version
                written = await self._kube.replace(SECRET, key.namespace, body)
        except KubeError as error:
            if error.is_conflict or error.is_not_found:
                stored = await self._kube.get(SECRET, key.namespace, name)
                if stored is not None:
                    self._keeper.observe(domain, stored)
                else:
                    self._keeper.forget(domain, name)
                await self.load_bundle(key.namespace, commit.model)
            raise
        self._keeper.observe(domain, written)

    def _concerned(self, namespace: str, kind: str, commit: CommitBundle, dropped: frozenset[str]) -> set[str]:
        """Return the objects that a commit concerns; `dropped` are the policies whose entry it took out."""
        objects = self._store.domain(namespace).objects[kind]
        if kind == "TenantGroup":
            return set(objects)
        changed = dropped | {e.policy for e in commit.entries.values() if e.since == commit.root.revision}
        everyone = commit.root.rules_since == commit.root.revision
        return {name for name, policy in objects.items() if everyone or policy.uid in changed}

    async def catch_up(self, key: Key) -> None:
        """Read the bundle that `key` is about anew if a watch told of a version that this process did not write.

        Done when the key has its turn, so never beside a commit of the same bundle: by then the answers to its own
        writes are known.
        """
        domain = self._store.domain(key.namespace)
        if key.kind != BUNDLE or key.name not in domain.suspected_bundles:
            return
        suspected = domain.suspected_bundles.pop(key.name)
        committed = domain.bundles.get(key.name)
        if committed is None or suspected <= int(committed.resource_version or 0):
            return
        try:
            take(domain, key.name, await read_bundle(self._kube, key.namespace, key.name))
        except KubeError:
            domain.suspected_bundles.setdefault(key.name, suspected)
            raise

    async def load_bundle(self, namespace: str, model: str) -> None:
        """Read a model's bundle as the API server holds it, after a write of it was refused."""
        take(self._store.domain(namespace), model, await read_bundle(self._kube, namespace, model))
        self._queue.add(Key(BUNDLE, namespace, model))

    def _probe(self, namespace: str, order: ProbeBackend) -> None:
        slot = (namespace, order.tier)
        running = self._probes.get(slot)
        if running is None or running.done():
            self._probes[slot] = asyncio.create_task(self._ask_backend(namespace, order), name=f"probe {order.tier}")

    async def _ask_backend(self, namespace: str, order: ProbeBackend) -> None:
        try:
            password = await self._secret_value(namespace, order.password_secret)
            authority = await self._secret_value(namespace, order.authority_secret)
            text = password.decode() if password else None
        except (KubeError, LookupError) as error:
            report = _unasked(order, TierReason.SECRET_NOT_FOUND, str(error))
        except UnicodeDecodeError:
            where = order.password_secret or ("", "")
            sentence = f"the key {where[1]} of Secret {where[0]} is not UTF-8 text"
            report = _unasked(order, TierReason.SECRET_UNREADABLE, sentence)
        else:
            answer = await probe_redis(
                order.endpoint,
                text,
                authority,
                order.server_name,
                username=order.username,
            )
            report = BackendReport(
                endpoint=order.endpoint,
                username=order.username,
                reachable=answer.reachable,
                reason=str(answer.reason),
                message=answer.message,
                at=utc_now(),
                used_bytes=answer.used_memory_bytes,
                max_bytes=answer.maxmemory_bytes,
                evicts=answer.maxmemory_policy not in ("", "noeviction"),
                version=answer.version,
            )
        if not self._is_asked(namespace, order.tier):
            return
        self._store.domain(namespace).backends[order.tier] = report
        metrics.BACKEND_UP.labels(namespace, order.tier).set(1 if report.reachable else 0)
        self._queue.add(Key("CacheTier", namespace, order.tier))

    async def _secret_value(self, namespace: str, where: tuple[str, str] | None) -> bytes | None:
        if where is None:
            return None
        raw = await self._kube.get(SECRET, namespace, where[0])
        value = decode(raw).get(where[1]) if raw else None
        if value is None:
            raise LookupError(f"Secret {where[0]} does not exist or has no key {where[1]}")
        return value

    def _enqueue(self, keys: frozenset[Key] | set[Key]) -> None:
        for key in keys:
            self._queue.add(key)

    def _may_write(self) -> None:
        if not self._leading():
            raise NotLeadingError("this process no longer leads and must not write")


class ChildRefusedError(KubeError):
    """The API server will not have an object that belongs to the reconciled one, as it was built from its spec."""

    def __init__(self, kind: str, name: str, cause: KubeError) -> None:
        super().__init__(cause.status, cause.reason, cause.message, cause.retry_after_s)
        self.child = f"{kind} {name}"


class NotLeadingError(RuntimeError):
    """A write was about to happen in a process that lost the Lease."""


def _unasked(order: ProbeBackend, reason: TierReason, message: str) -> BackendReport:
    return BackendReport(order.endpoint, order.username, reachable=False, reason=reason, message=message, at=utc_now())


def _typed(answer: dict[str, Any], desired: Mapping[str, Any]) -> dict[str, Any]:
    return answer | {"apiVersion": desired["apiVersion"], "kind": desired["kind"]}


def _bundle_secret(name: str, data_key: str, data: bytes, commit: CommitBundle) -> dict[str, Any]:
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": {
            "name": name,
            "labels": labels.of_model(commit.model, "bundle"),
            "ownerReferences": [dict(commit.owner)],
        },
        "type": "Opaque",
        "data": {data_key: base64.b64encode(data).decode()},
    }
