"""A whole operator without server, clock or chance: the real store, queue, plans and writer over a memory API server.

`Simulation` runs scenarios to a fixed point in milliseconds. Time moves by `advance` only, pods speak by `ack` only,
and events reach the store after the write that caused them, as a watch would bring them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import KubeError
from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.messages.engine_identity import UNGOVERNED
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle, Entry
from kvstrata.model.keys import FROM_NAMESPACE, AllowedService
from kvstrata.model.pods import ClusterReport, Pod, VerifiedState
from kvstrata.model.redis.external import ExternalReport
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.objects.applied import is_applied, stamped
from kvstrata.objects.context import BuildContext
from kvstrata.plan.actions import (
    CarryOutErasure,
    EndErasure,
    EndReclaim,
    ErasureOrder,
    KeepInKms,
    Plan,
    ProbeBackend,
    ProbePod,
    Question,
    ReadEvents,
    ReclaimFormer,
    ReconcileCluster,
    TendServers,
)
from kvstrata.plan.ownership import has_our_label
from kvstrata.reconcile.events import EventReader
from kvstrata.reconcile.keys.key_ring import KeyRing
from kvstrata.reconcile.keys.kms_domains import KmsDomains
from kvstrata.reconcile.keys.kms_services import KmsServices, Login, by_service_account
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.loop import plan
from kvstrata.reconcile.parse import OWN_KINDS
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.backends import Backends
from kvstrata.reconcile.redis.credentials import CredentialWorker
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.resync import Resync
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.store import Store
from kvstrata.reconcile.writer import Worker, Writer
from tests.support.memory_api.objects import MemoryApi
from tests.support.memory_kube import MemoryKube
from tests.support.memory_secret_store import MemorySecretStore
from tests.support.objects import NAMESPACE, Raw
from tests.support.pool_answers import PoolQuestion, answer_for_pools
from tests.support.renderer import FINGERPRINT, Renderer
from tests.support.server_answers import SimulatedServer, answer_look, answer_probe, answer_tending

START = datetime(2026, 1, 1, tzinfo=UTC)
CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:8")
MAX_STEPS = 1500


def is_empty(plan: Plan) -> bool:
    """Whether a plan writes nothing."""
    return not (plan.apply or plan.statuses or [one for one in plan.actions if not isinstance(one, Question)])


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("a coroutine of the simulation waited for something")


class Killed(BaseException):
    """The operator's process is gone, with all that it knew."""


class Simulation:
    """One namespace and its operator. `shuffle` makes the queue's order random, from `seed`."""

    def __init__(self, *objects: Raw, seed: int = 0, shuffle: bool = False) -> None:
        self.now = START
        self.random = random.Random(seed)
        self._shuffle = shuffle
        self.kube = MemoryKube(MemoryApi(lambda: format_timestamp(self.now)))
        self.acks: dict[str, PodState] = {}
        self.fingerprints: dict[str, str] = {}
        """By pod; all others have `FINGERPRINT`."""
        self.backends_up = True
        self.external: dict[str, ExternalReport] = {}
        self.looks: dict[str, ClusterReport] = {}
        """By tier, the findings of looks at a managed cluster."""
        self.tend: Callable[[ReconcileCluster], None] = lambda order: answer_look(self, order)
        self.servers: dict[str, SimulatedServer] = {}
        self.asked: list[str] = []
        self.renderer = Renderer()
        self.pool_questions: list[PoolQuestion] = []
        self.isolation_questions: list[ProbePod] = []
        """Questions to probes; the test answers them."""
        self.erase: Callable[[str, ErasureOrder], None] = lambda _namespace, _order: None
        self.reclaim_questions: list[ReclaimFormer] = []
        """Questions to deletions of former caches; the test answers them."""
        self.ended_reclaims: list[EndReclaim] = []
        self.kms_addresses: tuple[str, ...] = ()
        self.kms_login: Login = by_service_account(Path("/nonexistent"))
        self.plans: list[tuple[Key, Plan]] = []
        self.boots = 0
        self._boot()
        self.put(*objects)

    def _boot(self) -> None:
        self._shown = {(kind, name) for (kind, _, name), raw in self.kube.objects.items() if has_our_label(raw)}
        self.store = Store(lambda: self.random.randbytes(64), lambda: self.now)
        self.boots += 1
        self.store.term = self.boots
        operator = f"op-{self.boots}"
        self.queue = WorkQueue(lambda: (self.now - START).total_seconds())
        secret_store = MemorySecretStore(self.kube, "kvstrata-system", self.random.randbytes, lambda: self.now)
        self.secret_store = secret_store
        self.store.take_mark_key(secret_store.mark_key)
        self.secret_watch = SecretWatch(self.store, secret_store)
        self.ring = KeyRing()
        allowed = [AllowedService(one, authority=FROM_NAMESPACE) for one in self.kms_addresses]
        services = KmsServices(self.kube, allowed, self.kms_login)
        self.kms_domains = KmsDomains(
            self.kube, "kvstrata-system", self.store, services, operator, lambda: self.now, lambda: True
        )
        self.kms = KmsKeys(self.store, self.queue, self.ring, self.kms_domains)
        self.backends = Backends(self.kube, self.store, self.queue)
        self.events = EventReader(self.kube, self.store, self.queue, lambda: self.now)
        self.credentials = CredentialWorker(self.kube, self.store, self.queue, secret_store, lambda: True)
        self.topologies = Topologies(self.kube, self.store, self.queue, lambda: True)
        workers: dict[type[Any], Worker] = {
            **dict.fromkeys(get_args(PoolQuestion), lambda _, asked: self.pool_questions.append(asked)),
            ProbePod: lambda _, asked: self.isolation_questions.append(asked),
            **dict.fromkeys((CarryOutErasure, EndErasure), lambda where, order: self.erase(where, order)),
            ReclaimFormer: lambda where, question: self.ask(where, question),
            EndReclaim: lambda where, order: self.end(where, order),
            ReadEvents: lambda where, order: finish(self.events.read(where, order)),
            KeepInKms: self.kms.keep,
        }
        forget_tier = (
            lambda *tier: self.backends.forget_unasked(*tier),
            lambda *tier: self.credentials.forget_unmanaged(*tier),
            lambda *tier: self.topologies.forget_untended(*tier),
        )
        self.writer = Writer(
            self.kube, self.store, self.queue, secret_store, workers, {"CacheTier": forget_tier}
        )  # fmt: skip
        self.resync = Resync(self.kube, self.store, secret_store, [NAMESPACE], False)

    # users, pods and servers

    def put(self, *objects: Raw) -> None:
        """Create or change objects as their users, with creation times in the order of the calls."""
        for raw in objects:
            self.kube.put(raw)
            self._deliver()

    def edit(self, kind: str, name: str, **spec: Any) -> None:
        """Change fields of a spec; None removes a field."""
        raw = dict(self.kube.objects[(kind, NAMESPACE, name)])
        merged = {**raw["spec"], **spec}
        self.put({**raw, "spec": {key: value for key, value in merged.items() if value is not None}})

    def delete(self, kind: str, name: str, *, seen: bool = True) -> None:
        """Delete an object as its user. Without `seen`, no operator runs."""
        self.kube.remove(kind, NAMESPACE, name)
        if seen:
            self._deliver()

    def ack(
        self,
        pod: str,
        revision: int | None = None,
        *,
        problem: str = "",
        ungoverned: str = "",
        certificate: str = "",
        lasting: bool = False,
        tiers: tuple[TierState, ...] = (),
        usage: tuple[ScopeUsage, ...] = (),
        usage_left_out: int = 0,
        tier_usage: tuple[ScopeUsage, ...] = (),
    ) -> None:
        """Let a pod acknowledge a revision, by default its bundle's newest, and report the rest of its state."""
        found = self.pod(pod)
        acked = self.bundle(found.model).root.revision if revision is None else revision
        state = PodState(
            pod=pod, pod_uid=found.uid, namespace=NAMESPACE, model=found.model, gate_boot="g",
            identity=found.identity or self.world.models[found.model].status.identity or "",
            cache_boot="c", term=1, acked=acked, seen=acked, fresh=True, fresh_age_ms=0, engine_ready=True,
            problem=problem, tiers=tiers, usage=usage, usage_left_out=usage_left_out,
            tier_usage=tier_usage, unresolved=ungoverned, certificate=certificate, lasting=lasting,
            withheld=UNGOVERNED if ungoverned else "",
            fingerprint="" if ungoverned else self.fingerprints.get(pod, FINGERPRINT),
        )  # fmt: skip
        self.acks[found.uid] = state
        self._report(found, state)

    def ack_all(self) -> None:
        """Let every live pod acknowledge its bundle's newest revision, and settle, until all have acknowledged."""
        for _ in range(20):
            self.settle()
            behind = [
                pod.name
                for model in self.world.models
                for pod in self.world.live_pods(model)
                if model in self.world.bundles and self.world.acked_revision(pod) < self.bundle(model).root.revision
            ]
            if not behind:
                return
            for name in behind:
                self.ack(name)
        raise AssertionError("bundles change without end")

    def come_to_rest(self) -> None:
        """Let all consequences of the present state happen: probes, acknowledgements, rollouts."""
        self.advance(5)
        for _ in range(2):
            for kind, _, name in list(self.kube.objects):
                if kind == "CachedModel" and ("Deployment", NAMESPACE, names.model_child(name)) in self.kube.objects:
                    self.roll_out(name)
            self.ack_all()

    def roll_out(self, model: str = "tiny") -> None:
        """Report a Deployment as rolled out, as its controller would."""
        raw = dict(self.kube.objects[("Deployment", NAMESPACE, names.model_child(model))])
        wanted = raw["spec"]["replicas"]
        status = {"updatedReplicas": wanted, "readyReplicas": wanted, "replicas": wanted}
        self.put({**raw, "status": {**status, "observedGeneration": raw["metadata"]["generation"]}})

    def clone(self) -> Simulation:
        """Return another world that is the same outside of the operator, which is restarted."""
        other = Simulation()
        other.now, other.acks, other.boots = self.now, dict(self.acks), self.boots
        other.servers = dict(self.servers)
        known = self.store.domain(NAMESPACE).servers
        other.store.domain(NAMESPACE).servers = {tier: dict(pods) for tier, pods in known.items()}
        other.random.setstate(self.random.getstate())
        other.kube.api.take_over(self.kube.api)
        other.restart()
        return other

    def kill_at(self, number: int, *, after: bool) -> None:
        """Let the operator vanish at its write of this number, before the API server has it or after."""
        count = 0

        def hook(verb: str, kind: str, name: str) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise Killed

        if after:
            self.kube.after_write = hook
        else:
            self.kube.before_write = hook

    def restart(self) -> None:
        """Kill the operator and start another, which knows only the reports of the API server and the pods."""
        self.kube.take_events()
        self.kube.before_write = self.kube.after_write = lambda verb, kind, name: None
        made_up = self.store.domain(NAMESPACE).servers
        self._boot()
        self.store.domain(NAMESPACE).servers = made_up
        finish(self.resync.objects(lambda _: None))
        self.store.recall_departures()
        finish(self.resync.secrets())
        self.kms.begin()
        for model in self.world.models:
            for pod in self.world.live_pods(model):
                if pod.uid in self.acks:
                    self._report(pod, self.acks[pod.uid])
        self.enqueue_all()

    # the operator

    def settle(self) -> int:
        """Work until no key is due; return the number of plans that were carried out."""
        for steps in range(MAX_STEPS):
            key = self._take()
            if key is None:
                return steps
            self.step(key)
        raise AssertionError(f"no fixed point after {MAX_STEPS} plans; the last: {self.plans[-6:]}")

    def step(self, key: Key) -> Plan:
        """Plan one key and carry the plan out."""
        finish(self.writer.bundles.catch_up(key))
        made = plan(self.store.world(key.namespace), CONTEXT, key, self.now)
        self.plans.append((key, made))
        answered = ProbeBackend | ReconcileCluster | TendServers
        actions = tuple(action for action in made.actions if not isinstance(action, answered))
        try:
            finish(
                self.writer.carry_out(key, Plan(actions, made.apply, made.statuses, made.enqueue, made.wake_after_s))
            )
        except KubeError:
            self.queue.failed(key)
        else:
            self.queue.done(key)
        for action in made.actions:
            if isinstance(action, ProbeBackend):
                answer_probe(self, action)
            if isinstance(action, ReconcileCluster):
                self.tend(action)
            if isinstance(action, TendServers):
                answer_tending(self, action)
        while self.pool_questions:
            answer_for_pools(self, self.pool_questions.pop())
        self._deliver()
        return made

    def advance(self, seconds: float) -> None:
        """Let time pass in small steps, working whenever something is due."""
        end = self.now + timedelta(seconds=seconds)
        self.settle()
        while self.now < end:
            self.now = min(end, self.now + timedelta(seconds=max(1.0, seconds / 50)))
            self.settle()

    def enqueue_all(self) -> None:
        """Ask for every key, as the list-and-diff pass does."""
        for key in self.store.all_keys():
            self.queue.add(key)

    # the state of the world

    @property
    def world(self) -> World:
        """The operator's snapshot."""
        return self.store.world(NAMESPACE)

    def pod(self, name: str) -> Pod:
        """A pod by name."""
        return next(pods[name] for pods in self.world.pods.values() if name in pods)

    def bundle(self, model: str = "tiny") -> Bundle:
        """The bundle that was committed last."""
        return self.world.bundles[model].bundle

    def entry(self, tenant: str, model: str = "tiny") -> Entry:
        """A tenant's entry in a model's bundle."""
        return self.bundle(model).entries[tenant]

    def status(self, kind: str, name: str) -> dict[str, Any]:
        """The status that the API server holds."""
        found: dict[str, Any] = self.kube.objects[(kind, NAMESPACE, name)].get("status") or {}
        return found

    def condition(self, kind: str, name: str, condition: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = next((c for c in self.status(kind, name).get("conditions", ()) if c["type"] == condition), None)
        return (found["status"], found["reason"]) if found else ("", "")

    def unsettled(self) -> dict[str, Plan]:
        """Every key whose plan would still write something."""
        plans = {key: plan(self.world, CONTEXT, key, self.now) for key in set(self.store.all_keys())}
        return {str(key): made for key, made in plans.items() if not is_empty(made) and not self._writes_nothing(made)}

    def _writes_nothing(self, made: Plan) -> bool:
        children = self.world.children
        drifted = [
            c for c in made.apply if not is_applied(children.get((c["kind"], c["metadata"]["name"])), stamped(c))
        ]
        actions = [action for action in made.actions if not isinstance(action, Question)]
        return not (made.statuses or actions or drifted)

    def _take(self) -> Key | None:
        # Commits are held off for a tenth of a second: that may pass, minutes may not.
        due = sorted(self._due_keys())
        if not due:
            return None
        if self._shuffle:
            chosen = self.random.choice(due)
            for key in due:
                if key != chosen:
                    self._postpone(key)
        taken: Key = finish(self.queue.take())
        if self._shuffle:
            for key in due:
                if key != taken:
                    self.queue.add(key)
        return taken

    def _due_keys(self) -> list[Key]:
        horizon = (self.now - START).total_seconds()
        soon = [key for key, due in self.queue._due.items() if due <= horizon + 0.5]
        if soon and not len(self.queue):
            self.now += timedelta(seconds=0.5)
        horizon = (self.now - START).total_seconds()
        return [key for key, due in self.queue._due.items() if due <= horizon]

    def ask(self, namespace: str, question: ReclaimFormer) -> None:
        """Record the questions of a plan to deletions of former caches."""
        self.reclaim_questions.append(question)

    async def end(self, namespace: str, order: EndReclaim) -> None:
        """End a deletion of a former cache."""
        self.ended_reclaims.append(order)
        facts = self.store.domain(namespace).reclaims
        for key in [key for key, report in facts.items() if report.cache == order.cache]:
            del facts[key]

    def _postpone(self, key: Key) -> None:
        self.queue._due.pop(key)

    def _report(self, pod: Pod, state: PodState) -> None:
        for key in self.store.observe_state(pod, NAMESPACE, VerifiedState(state, self.now)):
            self.queue.add(key)

    def _deliver(self) -> None:
        """Bring events as watches do: of objects that are not users', those with our label, and that one lost it."""
        for kind, raw in self.kube.take_events():
            metadata = raw["metadata"]
            if raw["kind"] not in OWN_KINDS and not has_our_label(raw):
                if (raw["kind"], metadata["name"]) not in self._shown:
                    continue
                kind = "DELETED"
            (self._shown.discard if kind == "DELETED" else self._shown.add)((raw["kind"], metadata["name"]))
            if raw["kind"] == "Secret":
                secrets = self.secret_watch
                keys = secrets.forget(raw) if kind == "DELETED" else secrets.observe(raw)
            elif kind == "DELETED":
                keys = self.store.forget(raw["kind"], metadata["namespace"], metadata["name"], raw)
            else:
                keys = self.store.observe(raw)
            for key in keys:
                self.queue.add(key)
