"""The gates of a simulation's pods, as far as data keys go that their bundles only name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from kvstrata.clients.gate import GateError, GateFailure
from kvstrata.clients.kube import TokenIdentity
from kvstrata.contract.messages.key_delivery import KeysLacking, unpack_keys
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.cache_view import data_keys
from kvstrata.contract.policy.data_key import KeyReference
from kvstrata.objects import names
from kvstrata.reconcile.keys.delivery import KeyDelivery

from .objects import NAMESPACE, pod
from .worlds import Simulation

TURNS = 20
"""Of the loop, within which gates that answer at once have been asked everything."""


class KeyPods:
    """Pods that keep delivered keys for as long as the bundle that they acknowledged last names them."""

    def __init__(self, sim: Simulation, addresses: dict[str, str] | None = None) -> None:
        self.sim = sim
        self.addresses = {} if addresses is None else addresses
        self.held: dict[str, dict[str, bytes]] = {}
        """By pod, the keys that it has, by id."""
        self.away: set[str] = set()
        """Pods that do not answer."""
        self.token = ""
        """Sent instead of the pod's own token, if set."""
        self.brought: list[tuple[str, int]] = []
        self.delivery: KeyDelivery | None = None

    def start(self, name: str, model: str = "tiny") -> None:
        """Let a pod come up with an address of its own, and acknowledge."""
        self.addresses[name] = f"10.0.1.{len(self.addresses) + 1}"
        raw = pod(name, model)
        self.sim.put({**raw, "status": {**raw["status"], "podIP": self.addresses[name]}})
        self.held[name] = {}
        self.sim.settle()

    def lead(self, *, leading: bool = True) -> None:
        """Let the operator that leads now bring keys."""
        self.delivery = KeyDelivery(
            self.sim.kube,
            self,
            self.sim.store,
            self.sim.ring,
            lambda: leading,
            self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        until = self.sim.now + timedelta(seconds=seconds)
        while self.sim.now < until:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def turn(self, seconds: float = 1.0) -> None:
        """Let every pod acknowledge and report the keys that it lacks, deliver those keys, and let time pass."""
        assert self.delivery is not None
        for _ in range(4):
            self.sim.settle()
            for name in self.addresses.keys() - self.away:
                if name in self.sim.world.pods.get("tiny", {}):
                    self.acknowledge(name)
            self.delivery.follow()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self.sim.settle()
        self.sim.advance(seconds)

    def acknowledge(self, name: str) -> None:
        """Let a pod acknowledge its bundle, drop keys that it does not name, and report how many keys it lacks."""
        ids = self.named()
        self.held[name] = {one: key for one, key in self.held[name].items() if one in ids}
        lacking = len(ids - self.held[name].keys())
        found = self.sim.pod(name)
        known = self.sim.acks.get(found.uid)
        revision = self.bundle().root.revision
        if known is not None and (known.acked, known.keys_lacking) == (revision, lacking):
            contact = self.sim.store.domain(NAMESPACE).states.get(found.uid)
            if contact is not None and contact.in_contact:
                return
        self.sim.ack(name)
        self.sim.acks[found.uid] = replace(self.sim.acks[found.uid], keys_lacking=lacking)
        self.sim._report(found, self.sim.acks[found.uid])

    def silence(self, name: str) -> None:
        """Let a pod stop answering."""
        self.away.add(name)
        self.sim.store.lose_contact(NAMESPACE, self.sim.pod(name).uid)

    def end(self, name: str) -> None:
        """Let the kubelet report a pod as ended, and its object go."""
        raw = pod(name, state="terminated")
        self.sim.put({**raw, "status": {**raw["status"], "phase": "Succeeded", "podIP": self.addresses[name]}})
        self.sim.delete("Pod", name)
        self.held.pop(name)
        self.addresses.pop(name)
        self.sim.settle()

    def bundle(self) -> Bundle:
        """The bundle that pods watch."""
        return self.sim.bundle()

    def named(self) -> set[str]:
        """The ids of the keys that it names."""
        return {key.id for keys in data_keys(self.bundle()).values() for key in keys if isinstance(key, KeyReference)}

    # answers to the operator

    async def keys(self, pod_ip: str, server_name: str) -> tuple[KeysLacking, str]:
        """Return the keys that a pod lacks, and its token."""
        name, token = self._answering(pod_ip)
        return self._lacking(name), token

    async def bring_keys(self, pod_ip: str, server_name: str, message: bytearray) -> tuple[KeysLacking, str]:
        """Take the keys that the pod lacks; return the remaining ones, and its token."""
        name, token = self._answering(pod_ip)
        taken, _ = unpack_keys(message, self.named() - self.held[name].keys())
        self.held[name] |= {one: bytes(key) for one, key in taken.items()}
        self.brought.append((name, len(taken)))
        return self._lacking(name), token

    def _lacking(self, name: str) -> KeysLacking:
        return KeysLacking(tuple(self.named() - self.held[name].keys()))

    def _answering(self, ip: str) -> tuple[str, str]:
        name = next(name for name, address in self.addresses.items() if address == ip)
        if name in self.away:
            raise GateError(GateFailure.TIMEOUT, "it did not answer")
        account = f"system:serviceaccount:{NAMESPACE}:{names.model_child('tiny')}"
        token = f"token-of-{name}"
        self.sim.kube.tokens[token] = TokenIdentity(account, self.sim.pod(name).uid)
        return name, self.token or token
