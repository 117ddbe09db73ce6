"""Amounts in Kubernetes' notation: `512Mi`, `0.5`, `1e3`."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
DECIMAL = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_EXPONENTS = {suffix: exponent for exponent, suffix in DECIMAL.items()}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?")


def read_quantity(text: str) -> tuple[Fraction, str, bool]:
    """Return the amount, its suffix, and whether it has an exponent. Raises ValueError for anything else."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, suffix, exponent = found.groups(default="")
    if suffix in BINARY[1:]:
        return Fraction(number) * Fraction(1024) ** BINARY.index(suffix), suffix, False
    return Fraction(number) * Fraction(10) ** int(exponent or _EXPONENTS[suffix]), suffix, bool(exponent)


@lru_cache(maxsize=4096)
def quantity_bytes(text: str) -> int:
    """Return a size such as `512Mi` in bytes, rounded up. Raises ValueError for texts that are not quantities. Cached:
    plans ask for the same few sizes all the time."""
    return math.ceil(read_quantity(text)[0])
