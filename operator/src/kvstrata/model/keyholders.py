"""Who may hold the data keys of a namespace that are in processes only, as one operator leaves it to the next.

Keys themselves are not told, and of their ids the first digits alone: a note that holds too many keys to be held by
somebody errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvstrata.model.keys import Release

DIGITS = 16
"""How much of a key's id a note has."""

FORMER = "an operator before this one"
"""Who had keys of which there is no note."""


@dataclass(frozen=True, slots=True)
class HoldersNote:
    """What is known after the leader of `term` wrote it.

    `operators` are names of pods whose processes led and may have keys, each with how it let go of them, None if it is
    not known to have. `pods` are the uids of pods that may have been brought any. `unaccounted` names, by a key's id, a
    holder that went without anybody seeing its end: it will never say that the key is gone.
    """

    term: int
    operators: Mapping[str, Release | None] = field(default_factory=dict)
    pods: frozenset[str] = frozenset()
    unaccounted: Mapping[str, str] = field(default_factory=dict)

    def entering(self, pods: Iterable[str]) -> HoldersNote:
        """Return it with pods that are about to be brought keys."""
        return replace(self, pods=self.pods | {*pods})

    def leaving(self, pods: Iterable[str]) -> HoldersNote:
        """Return it without pods that have nothing to say any more."""
        return replace(self, pods=self.pods - {*pods})

    def without(self, operator: str) -> HoldersNote:
        """Return it without an operator whose end need not be asked for any more."""
        return replace(self, operators={name: one for name, one in self.operators.items() if name != operator})

    def hearing(self, *released: Release) -> HoldersNote:
        """Return it with what is known of operators' ends; of one that it does not name, or knew before, nothing."""
        known = self.operators
        news = {one.holder: one for one in released if one.holder in known and known[one.holder] is None}
        return replace(self, operators={**known, **news}) if news else self

    def losing_sight(self, holder: str, ids: Iterable[str]) -> HoldersNote:
        """Return it with a holder of keys with these ids that nobody will hear of again."""
        return replace(self, unaccounted={**{one[:DIGITS]: holder for one in ids}, **self.unaccounted})

    def about(self, ids: Iterable[str]) -> HoldersNote:
        """Return it without what it says of other keys than these, which nobody asks about any more."""
        wanted = {one[:DIGITS] for one in ids}
        return replace(self, unaccounted={one: who for one, who in self.unaccounted.items() if one in wanted})


@dataclass(frozen=True, slots=True)
class FormerHolders:
    """Who may have keys that were drawn before this operator led: its share of a note's words, for each of them."""

    operators: Mapping[str, Release | None] = field(default_factory=dict)
    pods: frozenset[str] = frozenset()
    unaccounted: Mapping[str, str] = field(default_factory=dict)

    def pods_with(self, key_id: str) -> frozenset[str]:
        """Return the uids of pods that may have this key, and whoever else has to let go of it."""
        lost = self.unaccounted.get(key_id[:DIGITS])
        return self.pods | ({lost} if lost is not None else frozenset())
