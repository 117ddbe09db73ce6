"""Keys that a KMS wraps: which to draw, unwrap and destroy next, and how answers of the KMS are judged.

Records outlive the process, keys in memory do not, and any answer may be lost: so work is never remembered, but planned
again from the present state. A key counts as ended only when the KMS answered so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from kvstrata.contract.policy.data_key import KeyReference
from kvstrata.model.world import World
from kvstrata.plan.keys.data_keys import epochs_in_use, epochs_with_a_future, scopes_in_use
from kvstrata.plan.scopes import keyspace_of


@dataclass(frozen=True, slots=True)
class KeyNeeds:
    """Epochs by the need for their keys.

    `used`: a status names it. `lasting`: used, does not end with its policy, and its key is not lost. `wanted`: the
    plan misses its key. `named`: this process or a bundle has the id of its key. `spent`: no pod needs its key.
    """

    used: Set[str]
    lasting: Set[str]
    wanted: Set[str]
    named: Set[str]
    spent: Set[str]

    @classmethod
    def of(cls, world: World, wanted: Set[str], spent: Set[str]) -> KeyNeeds:
        lasting = epochs_with_a_future(world) - world.keys_lost
        return cls(epochs_in_use(world), lasting, wanted, world.data_keys.keys(), spent)


@dataclass(frozen=True, slots=True)
class KeyRecords:
    """Epochs by their keys' state in Secrets; `unusable` are unreadable or foreign records, by epoch, and where."""

    wrapped: Set[str]
    revoked: Set[str]
    unusable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyWork:
    """Epochs by the work that is due. `lost`: their keys cannot be had any more, so the epochs are to be replaced."""

    draw: Set[str]
    unwrap: Set[str]
    destroy: Set[str]
    lost: Set[str] = frozenset()

    def within(self, epochs: Iterable[str]) -> KeyWork:
        some = frozenset(epochs)
        return KeyWork(self.draw & some, self.unwrap & some, self.destroy & some)


def plan_keys(needs: KeyNeeds, records: KeyRecords, held: Set[str], settled: Set[str]) -> KeyWork:
    """Return the work that is due. `held`: this process has the key. `settled`: it is done with it.

    1. Draw keys that are wanted and never existed.
    2. Unwrap the keys of lasting epochs; and all others once, so that plans see and end them.
    3. Destroy keys that no pod needs, and those that a former process revoked.
    4. Replace lasting epochs that had a key and have no usable record of it.
    """
    had = needs.named | records.wrapped | records.revoked | records.unusable.keys() | settled
    return KeyWork(
        draw=(needs.wanted & needs.lasting) - had - held,
        unwrap=((records.wrapped & needs.lasting) | (records.wrapped - settled)) - held - needs.spent,
        destroy=(needs.spent | (records.revoked - settled)) - needs.used,
        lost=(needs.lasting & had) - records.wrapped - held,
    )


def judge_unwrapped(work: KeyWork, needs: KeyNeeds, none: Set[str], refused: Set[str]) -> tuple[Set[str], Set[str]]:
    """Return the epochs whose keys are lost, and those to settle. `none`: the KMS has no such key. `refused`: it failed
    for this key alone, and is repeated while the epoch is in use; afterwards only the next process asks again."""
    gone = none & work.unwrap
    return gone & needs.lasting, gone | (refused - needs.used)


def named_in_bundles(world: World) -> dict[str, str]:
    """Return by epoch the key id in bundles, left by a former operator. Epochs without one are omitted; empty while the
    domain's key is unknown."""
    named: dict[str, str] = {}
    for committed in world.bundles.values():
        held = [(entry.keyspace, entry.keys) for entry in committed.bundle.entries.values()]
        held += [(one.keyspace, one.keys) for shard in committed.bundle.pools.values() for one in shard.versions]
        named |= {keyspace: key.id for keyspace, keys in held for key in keys[:1] if isinstance(key, KeyReference)}
    if not named:
        return {}
    found = {scope.epoch: keyspace_of(world.domain_key, scope) for scope in scopes_in_use(world)}
    return {epoch: named[keyspace] for epoch, keyspace in found.items() if keyspace in named}
