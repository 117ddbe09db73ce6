"""Data keys that no disk ever has: in the operator's process, and in the memory of pods that they were brought to.

The operator draws a key and brings it to the pods whose bundles name it (`contract.keydelivery`). One that was started
anew finds the keys in pods that still hold them; a key that no pod has any more is lost, and with it what it encrypted:
its epoch is rolled, and a restart of everything is a cold cache.

A key is gone when each process that had it lets go: pods by their word or their end, this operator by overwriting its
own copy, operators before it by their end. To whom a key was brought is noted before it is sent, so a message that got
lost counts as one that arrived.

Not seen from here: swap and core dumps of the nodes, and pieces of a key that an interpreter copied and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.datakey import DATA_KEY_BYTES, key_id
from kvstrata.contract.keydelivery import KeysHeld, overwrite, pack_keys, unpack_keys
from kvstrata.contract.receiptfacts import Word
from kvstrata.contract.receiptwords import KeyCustody as Kind
from kvstrata.contract.receiptwords import Party
from kvstrata.model.keycustody import Destruction, LetGo, Release, Revocation, Undestroyed
from kvstrata.plan.keycustody import destroyed_in_memory

from . import CustodyError


@dataclass(slots=True)
class _Kept:
    """One key and everybody who has it. `secret` is zeros once it was overwritten."""

    id: str
    secret: bytearray = field(repr=False)
    holders: set[str] = field(default_factory=set)
    predecessors: set[str] = field(default_factory=set)
    releases: dict[str, Release] = field(default_factory=dict)
    overwritten_at: str | None = None


class MemoryCustody:
    """The keys of one domain in this process.

    `entropy(n)` returns n random bytes, `now` the wall clock in UTC; `operator` is the uid of this operator's pod.
    """

    kind = Kind.MEMORY

    def __init__(self, entropy: Callable[[int], bytes], now: Callable[[], datetime], operator: str) -> None:
        self._entropy, self._now, self._operator = entropy, now, operator
        self._keys: dict[str, _Kept] = {}

    async def draw(self, epochs: Iterable[str]) -> None:
        """Make a key for each epoch that has none. One that was revoked gets no other.

        Whoever calls it has looked for the keys of epochs that were in use before (`recover`): a second key would make
        what the first encrypted unreadable.
        """
        for epoch in epochs:
            if epoch not in self._keys:
                secret = bytearray(self._entropy(DATA_KEY_BYTES))
                self._keys[epoch] = _Kept(key_id(secret), secret)

    async def unlock(self, epochs: Iterable[str]) -> Mapping[str, bytes]:
        """Return copies of the keys of these epochs; prefer `pack`, whose buffer can be overwritten."""
        return {epoch: bytes(kept.secret) for epoch in epochs if (kept := self._live(epoch)) is not None}

    def ids(self, epochs: Iterable[str]) -> Mapping[str, str]:
        """Return what bundles say of the keys of these epochs."""
        return {epoch: kept.id for epoch in epochs if (kept := self._live(epoch)) is not None}

    def take(self, epoch: str, secret: bytes) -> None:
        """Hold a key that another custody keeps, for those who are brought it."""
        if epoch not in self._keys:
            self._keys[epoch] = _Kept(key_id(secret), bytearray(secret))

    def epochs_of(self, ids: Iterable[str]) -> list[str]:
        """Return the epochs whose keys have these ids, of those that are given to anybody."""
        wanted = frozenset(ids)
        return [epoch for epoch, kept in self._keys.items() if kept.id in wanted and self._live(epoch) is not None]

    def knows(self, epoch: str) -> bool:
        """Whether this process ever had the key of an epoch."""
        return epoch in self._keys

    def holders(self, epochs: Iterable[str]) -> frozenset[str]:
        """Return the uids of the pods that have not let go of these keys."""
        kept = [self._keys[epoch] for epoch in epochs if epoch in self._keys]
        return frozenset(pod for one in kept for pod in one.holders if pod not in one.releases)

    def seen(self, pod: str, ids: Iterable[str]) -> None:
        """Take note that a pod has keys with these ids, however they came there."""
        wanted = frozenset(ids)
        for kept in self._keys.values():
            if kept.id in wanted:
                kept.holders.add(pod)
                kept.releases.pop(pod, None)

    def pack(self, pod: str, epochs: Iterable[str]) -> bytearray:
        """Return the message that brings these keys to the pod with this uid, and note that it has them from now on.

        Whoever sends it overwrites it afterwards.
        """
        giving = [kept for epoch in epochs if (kept := self._live(epoch)) is not None]
        for kept in giving:
            kept.holders.add(pod)
            kept.releases.pop(pod, None)
        return pack_keys(kept.secret for kept in giving)

    def recover(
        self,
        body: bytearray,
        wanted: Mapping[str, str],
        *,
        holders: Iterable[str],
        predecessors: Iterable[str],
    ) -> frozenset[str]:
        """Take keys that a pod sent back, and overwrite the message; return the epochs whose keys were in it.

        `wanted` gives by epoch the id that a bundle names: nothing else is taken. `holders` are the uids of all pods
        that may have them, alive or gone without having ended, `predecessors` those of operators that had them before.
        Raises ContractError for a message that is none, and CustodyError without a predecessor: somebody drew them.
        """
        former, pods = {*predecessors}, {*holders}
        if not former:
            raise CustodyError("keys come back from pods, and no operator is known that brought them there")
        missing = {name: epoch for epoch, name in wanted.items() if epoch not in self._keys}
        try:
            found, _ = unpack_keys(body, missing)
        finally:
            overwrite(body)
        for name, secret in found.items():
            self._keys[missing[name]] = _Kept(name, secret, set(pods), set(former))
        return frozenset(missing[name] for name in found)

    async def revoke(self, epochs: Iterable[str]) -> Mapping[str, Revocation]:
        """Overwrite the keys in this process. A key that it does not have it cannot revoke."""
        done = {}
        for epoch in epochs:
            kept = self._keys.get(epoch)
            if kept is None:
                done[epoch] = Revocation(self.kind, None)
                continue
            if kept.overwritten_at is None:
                overwrite(kept.secret)
                kept.overwritten_at = format_timestamp(self._now())
            done[epoch] = Revocation(self.kind, Word(Party.OPERATOR, self._operator, kept.overwritten_at))
        return done

    def hear(self, pod: str, said: KeysHeld, revision: int) -> None:
        """Take a pod's word on keys; `revision` is the first of its bundle that names none of the revoked ones.

        Whose word it is was checked by its token. A word of before a key was brought says nothing of it.
        """
        at = format_timestamp(self._now())
        for kept in self._revoked():
            if pod in kept.holders and pod not in kept.releases and said.says_gone((kept.id,), revision):
                kept.releases[pod] = Release(pod, LetGo.SAID, at)

    def ended(self, pod: str) -> None:
        """Take note that the kubelet reported all containers of a pod, or of an operator before this one, as ended."""
        at = format_timestamp(self._now())
        for kept in self._keys.values():
            if pod in kept.holders | kept.predecessors:
                kept.releases.setdefault(pod, Release(pod, LetGo.ENDED, at))

    async def destroy(self, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        """Return for each revoked key whether everybody let go."""
        return {epoch: self._end_of(epoch) for epoch in epochs}

    def _end_of(self, epoch: str) -> Destruction:
        kept = self._keys.get(epoch)
        if kept is None:
            return Destruction(self.kind, None, Undestroyed.PREDECESSOR_UNKNOWN, ("this operator never had the key",))
        return destroyed_in_memory(
            operator=self._operator,
            holders=kept.holders,
            predecessors=kept.predecessors,
            releases=kept.releases,
            overwritten_at=kept.overwritten_at,
        )

    def _live(self, epoch: str) -> _Kept | None:
        kept = self._keys.get(epoch)
        return kept if kept is not None and kept.overwritten_at is None else None

    def _revoked(self) -> list[_Kept]:
        return [kept for kept in self._keys.values() if kept.overwritten_at is not None]
