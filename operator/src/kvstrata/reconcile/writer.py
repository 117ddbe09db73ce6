"""The writer: carries out plans. The API server's answers go into the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.api.reasons import DomainReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND, SECRET
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle
from kvstrata.model.pods import CommittedBundle
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import names
from kvstrata.plan.actions import (
    Action,
    CarryOutErasure,
    CommitBundle,
    Create,
    EmptySecrets,
    EndErasure,
    EndReclaim,
    EnsureSecret,
    ErasureOrder,
    InspectPool,
    IsolationQuestion,
    KeepInKms,
    Plan,
    PoolQuestion,
    ProbeBackend,
    ProbePod,
    ReadForeign,
    ReadSource,
    ReclaimFormer,
    ReconcileCluster,
    Remove,
    RenderPool,
    SetFinalizers,
    StatusWrite,
    TellFormer,
    TellIsolation,
    TendServers,
    TurnSecret,
    WarmPool,
)
from kvstrata.plan.budgets.admission import admitted_by
from kvstrata.plan.kinds.rejected import plan_refused
from kvstrata.reconcile.affected import concerned_by_commit
from kvstrata.reconcile.domain_store import DomainStore, NameConflictError
from kvstrata.reconcile.redis.backends import Backends
from kvstrata.reconcile.redis.credentials import CredentialWorker
from kvstrata.reconcile.redis.topology import Topologies

from . import metrics
from .audit import tell_restore, tell_sharing, tell_status
from .background import utc_now
from .bundles import bundle_secret, read_bundle, shards_of, take
from .children import ChildRefusedError, Children, create, set_finalizers
from .events import Events
from .metrics import count_lazy
from .queue import WorkQueue
from .reclaimed import Reclaimer, reclaim, tell_reclaimed
from .secrets import SecretStore
from .store import Store

COMMIT_INTERVAL_S = 0.1
"""A bundle is committed at most ten times a second; the next commit carries edits in between."""

PROGRESS_INTERVAL_S = 0.25
"""How long a progress-only status waits: the progress is often complete by then."""


class Writer:
    """Carries out plans. `leading` is whether this process may write; the other callables run parts beside the loop."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        secret_store: SecretStore,
        leading: Callable[[], bool],
        ask_for_pools: Callable[[str, PoolQuestion], None],
        probe: Callable[[str, IsolationQuestion], None],
        erase: Callable[[str, ErasureOrder], None] = lambda _namespace, _order: None,
        keep_in_kms: Callable[[str, KeepInKms], None] = lambda _namespace, _order: None,
        reclaims: Reclaimer | None = None,
    ) -> None:
        self._kube, self._store, self._queue, self._secret_store, self._leading = (
            kube,
            store,
            queue,
            secret_store,
            leading,
        )
        self._ask_for_pools, self._probe, self._erase, self._keep_in_kms = ask_for_pools, probe, erase, keep_in_kms
        self._reclaims = reclaims
        self._events = Events(kube)
        self._children = Children(kube, store, self._enqueue, self._may_write)
        self.backends = Backends(kube, store, queue)
        self.topologies = Topologies(kube, store, queue, leading)
        self.credentials = CredentialWorker(kube, store, queue, secret_store, leading)

    async def carry_out(self, key: Key, plan: Plan) -> None:
        """Write everything of `plan`, in its order. Raises KubeError on the first refusal; earlier writes stand. A
        ChildRefusedError is reported in the status of `key` before it is raised, a NameConflictError by its next
        plan."""
        granting = self._store.domain(key.namespace).granting
        # Plans made from here on must not give away the same capacity.
        granting.update(admitted_by(plan.statuses))
        try:
            await self._act_all(key, plan.actions)
            await self._apply_all(key, plan.apply)
            if not plan.statuses:
                self._queue.put_off_no_more(key)
            for write in plan.statuses:
                await self._write_status(key, write)
        except NameConflictError:
            await self._children.find_foreign(key.namespace, plan.apply)
            if key.kind == BUNDLE:
                self._queue.add(Key("CachedModel", key.namespace, key.name))
            raise
        finally:
            for write in plan.statuses:
                granting.pop(write.key, None)
        for other in plan.enqueue:
            self._queue.add(other)
        if plan.wake_after_s is not None:
            self._queue.add(key, plan.wake_after_s)
        if key.kind == "CacheTier":
            self.backends.forget_unasked(key.namespace, key.name)
            self.credentials.forget_unmanaged(key.namespace, key.name)
            self.topologies.forget_untended(key.namespace, key.name)

    async def _act_all(self, key: Key, actions: Sequence[Action]) -> None:
        """Carry out actions in order; every Secret with a name conflict is found."""
        conflict: NameConflictError | None = None
        for action in actions:
            try:
                await self._act(key, action)
            except NameConflictError as error:
                conflict = error
        if conflict is not None:
            raise conflict

    async def _act(self, key: Key, action: Action) -> None:
        match action:
            case EnsureSecret():
                self._may_write()
                await self._ensure(key.namespace, action)
            case KeepInKms():
                self._keep_in_kms(key.namespace, action)
            case CommitBundle():
                await self._commit(key, action)
            case EmptySecrets():
                await self._empty(key, action)
            case ProbeBackend():
                self.backends.begin(key.namespace, action)
            case ReconcileCluster():
                self.topologies.tend(key.namespace, action)
            case TendServers():
                self.credentials.begin(key.namespace, action)
            case TurnSecret():
                self._may_write()
                await self._secret_store.turn(self._store.domain(key.namespace), action)
            case ReadSource() | RenderPool() | WarmPool() | InspectPool():
                self._ask_for_pools(key.namespace, action)
            case ProbePod() | TellIsolation():
                self._probe(key.namespace, action)
            case CarryOutErasure() | EndErasure():
                self._erase(key.namespace, action)
            case ReclaimFormer() | TellFormer() | EndReclaim():
                await reclaim(self._reclaims, key.namespace, action, self._may_write)
            case SetFinalizers():
                self._may_write()
                self._enqueue(await set_finalizers(self._kube, self._store, key, action))
            case Create():
                self._may_write()
                await self._create(key, action)
            case ReadForeign():
                await self._children.read_foreign(key, action)
            case Remove():
                self._may_write()
                await self._children.remove(key.namespace, action)

    async def _ensure(self, namespace: str, order: EnsureSecret) -> None:
        """Create or repair a Secret. Objects planned while the domain's key was written lack it."""
        domain = self._store.domain(namespace)
        before = domain.domain_key
        await self._secret_store.ensure(domain, order)
        if domain.domain_key != before:
            self._enqueue({key for key in self._store.all_keys() if key.namespace == namespace})

    async def _create(self, key: Key, order: Create) -> None:
        try:
            self._enqueue(await create(self._kube, self._store, key, order))
        except KubeError as error:
            if error.is_refusal:
                named = order.body["metadata"]["name"]
                await self._tell_refused(key, ChildRefusedError(order.body["kind"], named, error))
            raise

    async def _apply_all(self, key: Key, children: Sequence[Mapping[str, Any]]) -> None:
        try:
            await self._children.apply(key, children)
        except ChildRefusedError as refused:
            await self._tell_refused(key, refused)
            raise

    async def _tell_refused(self, key: Key, refused: ChildRefusedError) -> None:
        world = self._store.world(key.namespace)
        for write in plan_refused(world, key, refused.child, refused.message, utc_now()).statuses:
            await self._write_status(key, write)

    async def _write_status(self, reconciled: Key, write: StatusWrite) -> None:
        if not write.can_wait:
            self._queue.put_off_no_more(write.key)
        elif not self._queue.put_off(write.key, PROGRESS_INTERVAL_S):
            return
        self._may_write()
        resource = BY_KIND[write.key.kind]
        key = write.key
        objects = self._store.domain(key.namespace).objects[key.kind]
        # Read now, because a watch may report this write before its answer arrives.
        before = objects.get(key.name)
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
        after = objects.get(key.name)
        tell_status(key, before, after, self._store.domain(key.namespace))
        count_lazy(before, after)
        tell_reclaimed(key, before, after)
        story = tell_restore(key, before, after)
        if story is not None and after is not None:
            await self._events.tell(after, DomainReason.RESTORE_DETECTED, story, warning=True)
        # The own status adds nothing for the reconciled object; others may depend on it (on an epoch, say).
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
        for name, data in shards_of(commit):
            await self._write_shard(key, commit, name, data)
        self._may_write()
        encoded = {ROOT_DATA_KEY: commit.root.encode()}
        root = bundle_secret(names.bundle_root(commit.model), encoded, commit.model, commit.owner)
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
            # The answer may have been lost after the write: then the stored bundle equals the intended one.
            await self._secret_store.read(self._store.domain(key.namespace), root["metadata"]["name"], commit.owner)
            found = await read_bundle(self._kube, key.namespace, commit.model, commit.owner["uid"])
            if found is None or found.bundle != Bundle(commit.root, commit.entries, commit.pools):
                take(self._store.domain(key.namespace), commit.model, found)
                raise
            version = found.resource_version
        domain = self._store.domain(key.namespace)
        before = domain.bundles.get(commit.model)
        domain.bundles[commit.model] = CommittedBundle(
            Bundle(commit.root, commit.entries, commit.pools),
            version,
            commit.compiled,
            commit.keyless,
            commit.pool_indexes,
        )
        domain.committed_at[commit.model] = (commit.root.revision, time.monotonic())
        metrics.COMMITS.observe(time.monotonic() - started)
        tell_sharing(key.namespace, commit, before.bundle.entries if before else {}, domain)
        self._enqueue(concerned_by_commit(self._store.world(key.namespace), commit, before))

    async def _write_shard(self, key: Key, commit: CommitBundle, name: str, data: bytes) -> None:
        """Fill the unused slot of a shard, if it is as this process knows it. Otherwise another writer, perhaps
        another leader, changed it, and the plan is outdated."""
        self._may_write()
        body = bundle_secret(name, {SHARD_DATA_KEY: data}, commit.model, commit.owner)
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
                await self._reread(domain, name, commit.owner)
                await self.load_bundle(key.namespace, commit.model)
            raise
        self._secret_store.observe(domain, written)

    async def _empty(self, key: Key, order: EmptySecrets) -> None:
        """Empty unused Secrets; one that was written meanwhile is read again."""
        domain = self._store.domain(key.namespace)
        for name, version in order.versions.items():
            self._may_write()
            body = bundle_secret(name, {}, order.model, order.owner)
            body["metadata"]["resourceVersion"] = version
            try:
                written = await self._kube.replace(SECRET, key.namespace, body)
            except KubeError as error:
                if error.is_not_found:
                    self._secret_store.forget(domain, name)
                    continue
                if error.is_conflict:
                    await self._reread(domain, name, order.owner)
                raise
            self._secret_store.observe(domain, written)

    async def _reread(self, domain: DomainStore, name: str, owner: Mapping[str, Any]) -> None:
        stored = await self._secret_store.read(domain, name, owner)
        if stored is not None:
            self._secret_store.observe(domain, stored)
        else:
            self._secret_store.forget(domain, name)

    async def catch_up(self, key: Key) -> None:
        """Read the bundle of `key` again if a watch reported a version that this process did not write. It runs in
        the key's turn, never beside a commit of the same bundle, so the answers to own writes are known."""
        domain = self._store.domain(key.namespace)
        if key.kind != BUNDLE or key.name not in domain.suspected_bundles:
            return
        suspected = domain.suspected_bundles.pop(key.name)
        committed = domain.bundles.get(key.name)
        if committed is None or suspected <= int(committed.resource_version or 0):
            return
        try:
            take(domain, key.name, await self._read_bundle(domain, key.name))
        except KubeError:
            domain.suspected_bundles.setdefault(key.name, suspected)
            raise

    async def load_bundle(self, namespace: str, model: str) -> None:
        """Read a model's bundle after a refused write."""
        domain = self._store.domain(namespace)
        take(domain, model, await self._read_bundle(domain, model))
        self._queue.add(Key(BUNDLE, namespace, model))

    async def _read_bundle(self, domain: DomainStore, model: str) -> CommittedBundle | None:
        known = domain.objects["CachedModel"].get(model)
        return await read_bundle(self._kube, domain.namespace, model, known.uid if known else "")

    def _enqueue(self, keys: frozenset[Key] | set[Key]) -> None:
        for key in keys:
            self._queue.add(key)

    def _may_write(self) -> None:
        if not self._leading():
            raise NotLeadingError("this process no longer leads and must not write")


class NotLeadingError(RuntimeError):
    """A write was attempted after the Lease was lost."""
