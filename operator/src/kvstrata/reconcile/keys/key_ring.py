"""Data keys that no disk ever has: in the operator's process, and in the memory of pods that they were brought to.

The operator draws a key and brings it to the pods whose bundles name it (`contract.messages.key_delivery`). One that
was started anew finds the keys in pods that still hold them; a key that no pod has any more is lost, and with it what
it encrypted: its epoch is rolled, and a restart of everything is a cold cache.

A key is gone when each process that had it lets go: pods by their word or their end, this operator by overwriting its
own copy, operators before it by their word or their end. To whom a key was brought is noted before it is sent, so a
message that got lost counts as one that arrived.

Not seen from here: swap and core dumps of the nodes, and pieces of a key that an interpreter copied and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.messages.key_delivery import KeysHeld, overwrite, pack_keys, unpack_keys
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, key_id
from kvstrata.contract.receipt.facts import Word
from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.model.keyholders import FormerHolders
from kvstrata.model.keys import Destruction, LetGo, Release, Revocation, Undestroyed
from kvstrata.plan.keys.custody import destroyed_in_memory


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

    `entropy(n)` returns n random bytes, `now` the wall clock in UTC; `operator` is the name of this operator's pod.
    """

    kind = Kind.MEMORY

    def __init__(self, entropy: Callable[[int], bytes], now: Callable[[], datetime], operator: str) -> None:
        self._entropy, self._now, self._operator = entropy, now, operator
        self._keys: dict[str, _Kept] = {}
        self._let_go: dict[str, Release] = {}
        """Who ended, also before it turned out that it may have had a key: who has ended has none and gets none."""

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
        self, body: bytearray, wanted: Mapping[str, str], former: FormerHolders, *, holders: Iterable[str]
    ) -> frozenset[str]:
        """Take keys that a pod sent back, and overwrite the message; return the epochs whose keys were in it.

        `wanted` gives by epoch the id that a bundle names: nothing else is taken. `former` is who may have had them
        before this operator led, `holders` the uids of pods that may have them now. Raises ContractError for a message
        that is none.
        """
        pods = frozenset(holders)
        missing = {name: epoch for epoch, name in wanted.items() if epoch not in self._keys}
        try:
            found, _ = unpack_keys(body, missing)
        finally:
            overwrite(body)
        for name, secret in found.items():
            self._keys[missing[name]] = self._of_before(name, secret, former, pods)
        return frozenset(missing[name] for name in found)

    def remember(self, epoch: str, name: str, former: FormerHolders) -> None:
        """Take note of a revoked key that this process never had, by its id, and of who may have it."""
        if epoch not in self._keys:
            kept = self._of_before(name, bytearray(DATA_KEY_BYTES), former, frozenset())
            kept.overwritten_at = format_timestamp(self._now())
            self._keys[epoch] = kept

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

    async def overwrite_all(self) -> None:
        """Overwrite every key in this process."""
        await self.revoke(tuple(self._keys))

    def hear(self, pod: str, said: KeysHeld, revision: int) -> None:
        """Take a pod's word on keys; `revision` is the first of its bundle that names none of the revoked ones.

        Whose word it is was checked by its token. A word of before a key was brought says nothing of it.
        """
        at = format_timestamp(self._now())
        for kept in self._revoked():
            if pod in kept.holders and pod not in kept.releases and said.says_gone((kept.id,), revision):
                kept.releases[pod] = Release(pod, LetGo.SAID, at)

    def ended(self, pod: str) -> None:
        """Take note that the kubelet reported all containers of a pod as ended."""
        self.let_go(Release(pod, LetGo.ENDED, format_timestamp(self._now())))

    def let_go(self, release: Release) -> None:
        """Take note that a pod, or an operator before this one, has no key any more, whichever it had."""
        self._let_go.setdefault(release.holder, release)
        for kept in self._keys.values():
            if release.holder in kept.holders | kept.predecessors:
                kept.releases.setdefault(release.holder, release)

    def held_by(self, holder: str) -> frozenset[str]:
        """Return the ids of the keys that a pod, or an operator before this one, has not let go of."""
        return frozenset(
            kept.id
            for kept in self._keys.values()
            if holder in kept.holders | kept.predecessors and holder not in kept.releases
        )

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

    def _of_before(self, name: str, secret: bytearray, former: FormerHolders, pods: frozenset[str]) -> _Kept:
        kept = _Kept(name, secret, {*pods, *former.pods_with(name)}, {*former.operators})
        known = {one.holder: one for one in former.operators.values() if one is not None} | self._let_go
        kept.releases |= {who: known[who] for who in kept.holders | kept.predecessors if who in known}
        return kept

    def _live(self, epoch: str) -> _Kept | None:
        kept = self._keys.get(epoch)
        return kept if kept is not None and kept.overwritten_at is None else None

    def _revoked(self) -> list[_Kept]:
        return [kept for kept in self._keys.values() if kept.overwritten_at is not None]
