"""A simulation whose pods hold bundles as gates do, and whose API server may be restored from a backup."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from kvstrata.clients.gate import GateClient
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import Pod
from kvstrata.reconcile.bundles import read_bundle
from kvstrata.reconcile.pod_states import AckListener
from tests.support.memory_api.objects import MemoryApi
from tests.support.objects import NAMESPACE, Raw
from tests.support.worlds import MAX_STEPS, Simulation, finish


@dataclass
class Backup:
    """A snapshot of etcd: every object, and the count of leaders."""

    api: MemoryApi
    boots: int


@dataclass
class RestoredWorld:
    """One namespace whose pods read bundles by the gate's rule: a new bundle must supersede the one that they hold."""

    simulation: Simulation
    held: dict[str, Bundle] = field(default_factory=dict)
    readable: set[str] = field(default_factory=set)
    """Every keyspace in a bundle that some pod read since the last restore."""

    @classmethod
    def of(cls, *objects: Raw) -> RestoredWorld:
        """Return a world at rest in which all pods enforce all there is."""
        world = cls(Simulation(*objects))
        world.rest()
        return world

    def rest(self) -> None:
        """Work until neither the operator nor any pod changes anything."""
        quiet = 0
        for _ in range(60):
            self.work()
            # A pod's report may move the operator, and that the pod.
            quiet = 0 if [pod for pod in self._pods() if self.speak(pod.name)] else quiet + 1
            if quiet > 1:
                self.simulation.settle()
                return
        raise AssertionError("pods and operator do not come to rest")

    def work(self, plans: int | None = None) -> None:
        """Let a second pass, or in it only so many plans; pods read every bundle that is committed meanwhile."""
        simulation = self.simulation
        simulation.now += timedelta(seconds=1)
        for _ in range(MAX_STEPS if plans is None else plans):
            key = simulation._take()
            if key is None:
                return
            simulation.step(key)
            bundles = simulation.world.bundles
            for pod in self._pods():
                held = self.held.get(pod.uid)
                if pod.model in bundles and (held is None or bundles[pod.model].bundle.root != held.root):
                    self._read(pod)
        if plans is None:
            raise AssertionError(
                f"no fixed point after {MAX_STEPS} plans: {[key for key, _ in simulation.plans[-20:]]}"
            )

    def speak(self, name: str, *, lie: PodState | None = None) -> bool:
        """Let a pod read the bundle and report its state; return whether it took a new bundle."""
        pod = self.simulation.pod(name)
        before = self.held.get(pod.uid)
        if lie is None:
            self._read(pod)
        state = lie or self.state(pod)
        listener = AckListener(
            self.simulation.kube, GateClient.__new__(GateClient), self.simulation.store, self.simulation.queue
        )
        if pod.model in self.simulation.world.bundles:
            finish(listener.receive(NAMESPACE, pod, state))
        self.simulation.acks[pod.uid] = state
        return self.held.get(pod.uid) is not before

    def state(self, pod: Pod) -> PodState:
        """Return the state that the gate of a pod reports."""
        bundle = self.held.get(pod.uid)
        root = bundle.root if bundle is not None else None
        revision = root.revision if root is not None else 0
        return PodState(
            pod=pod.name, pod_uid=pod.uid, namespace=NAMESPACE, model=pod.model, identity="", gate_boot="g",
            cache_boot="c", term=root.term if root is not None else 0, acked=revision, seen=revision, fresh=True,
            fresh_age_ms=0, engine_ready=True, revision=revision,
            root=digest_bytes(root.encode()) if root is not None else "",
            model_uid=root.model_uid if root is not None else "",
        )  # fmt: skip

    def back_up(self) -> Backup:
        """Take a snapshot of etcd."""
        copy = MemoryApi(lambda: "")
        copy.take_over(self.simulation.kube.api)
        return Backup(copy, self.simulation.boots)

    def restore(self, backup: Backup, *, reached: bool = True) -> None:
        """Put etcd back to a snapshot and restart the operator, which has `reached` the pods before it acts."""
        simulation = self.simulation
        simulation.kube.api.take_over(backup.api)
        simulation.boots = backup.boots
        # Random values of the lost history are not drawn again.
        simulation.random = random.Random(simulation.random.random())
        self.readable = set()
        self.restart(reached=reached)

    def restart(self, *, reached: bool = True) -> None:
        """Start another operator, which receives the pods' reports before it acts, unless they cannot be `reached`."""
        self.simulation.acks.clear()
        self.simulation.restart()
        for pod in self._pods() if reached else ():
            self.speak(pod.name)

    def clone(self, seed: int) -> RestoredWorld:
        """Return another world with the same API server and pods, and an operator that works in any order."""
        other = RestoredWorld(self.simulation.clone(), dict(self.held), set(self.readable))
        other.simulation.random = random.Random(seed)
        other.simulation._shuffle = True
        other.restart()
        return other

    def keyspaces(self) -> set[str]:
        """Return every keyspace of the bundles that the API server holds."""
        return {keyspace for one in self.simulation.world.bundles.values() for keyspace in one.bundle.keyspaces}

    def _pods(self) -> Iterator[Pod]:
        world = self.simulation.world
        for model in sorted(world.pods):
            yield from world.live_pods(model)

    def _read(self, pod: Pod) -> None:
        owner = self.simulation.world.models[pod.model].owner_reference()
        found = finish(read_bundle(self.simulation.kube, self.simulation.store.domain(NAMESPACE), pod.model, owner))
        before = self.held.get(pod.uid)
        if found is not None and found.whole and found.bundle.root.supersedes(before.root if before else None):
            self.held[pod.uid] = found.bundle
            self.readable |= found.bundle.keyspaces
