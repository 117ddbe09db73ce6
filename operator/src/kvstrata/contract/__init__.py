"""Formats shared by the operator and the data plane: bundles, keyspaces, key names and wire messages.

Operator and pods roll separately, so every document carries `CONTRACT_VERSION`, and a reader takes its own version
and the one before. The package needs the standard library only, because it also runs inside the cache server's
and the engine's images.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

CONTRACT_VERSION = 1
"""Version of every document in this package; readers accept this one and its predecessor."""


MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions of reading a malformed document: wrong shapes, infinite numbers, nesting without end."""


class ContractError(ValueError):
    """A document of the other side that cannot be trusted: malformed, incomplete, of an unknown version."""


class Meaningful(StrEnum):
    """Members are declared with a sentence that explains them."""

    meaning: str

    def __new__(cls, value: str, meaning: str, *_: object) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member
