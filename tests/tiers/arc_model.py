"""ARC as in Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.

Lists are kept with the least recently used first. Nothing here is shared with the product.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Arc:
    """A cache of `c` pages."""

    c: int
    p: float = 0.0
    t1: list[Hashable] = field(default_factory=list)
    t2: list[Hashable] = field(default_factory=list)
    b1: list[Hashable] = field(default_factory=list)
    b2: list[Hashable] = field(default_factory=list)

    def request(self, x: Hashable) -> bool:
        """Ask for a page; whether it was there."""
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # case II
            self.p = min(float(self.c), self.p + max(len(self.b2) / len(self.b1), 1))
            self._replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return False
        if x in self.b2:  # case III
            self.p = max(0.0, self.p - max(len(self.b1) / len(self.b2), 1))
            self._replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return False
        if len(self.t1) + len(self.b1) == self.c:  # case IV
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self._replace(x)
            else:
                self.t1.pop(0)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self._replace(x)
        self.t1.append(x)
        return False

    @property
    def resident(self) -> list[Hashable]:
        """What is in the cache."""
        return [*self.t1, *self.t2]

    def _replace(self, x: Hashable) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))
