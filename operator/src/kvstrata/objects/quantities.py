"""Quantities in the canonical form of the apiserver: `1024Mi` becomes `1Gi`, `0.5` becomes `500m`.

The operator skips a write when the live object equals the desired one, so desired quantities must be canonical.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MOST = (1 << 63) - 1
"""The apiserver stores larger values with a binary suffix as this."""

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_EXPONENTS = {suffix: exponent for exponent, suffix in _DECIMAL.items()}


def canonical_quantity(text: str) -> str:
    """Return the form in which the apiserver stores a quantity (apimachinery's `Quantity.String`). Raises ValueError
    for texts that are not quantities."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, suffix, exponent = found.groups()
    if suffix in _BINARY and suffix:
        value = min(Fraction(number) * 1024 ** _BINARY.index(suffix), Fraction(MOST))
        # Without a suffix it is read as decimal: 62.5Ki is stored as 64k, not as 64000.
        return binary(int(value)) if value and value % 1024 == 0 else _decimal(value)
    if exponent is not None:
        mantissa, power = _thousands(Fraction(number) * Fraction(10) ** int(exponent))
        return f"{mantissa}e{power}" if power else str(mantissa)
    return _decimal(Fraction(number) * Fraction(10) ** _EXPONENTS[suffix or ""])


def canonical_amounts(amounts: Mapping[str, str]) -> dict[str, str]:
    return {name: canonical_quantity(str(amount)) for name, amount in amounts.items()}


def binary(size_bytes: int) -> str:
    """Return a size in bytes, MOST at most, as a canonical quantity with a binary suffix: `1610612736` is `1536Mi`."""
    if size_bytes < 1024:
        return _decimal(Fraction(size_bytes))
    size_bytes, power = min(size_bytes, MOST), 0
    while size_bytes % 1024 == 0 and power < len(_BINARY) - 1:
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{_BINARY[power]}"


def readable(size_bytes: int) -> str:
    """Return a size for messages: whole mebibytes, or the exact size below one."""
    return binary(size_bytes // MIB * MIB or size_bytes)


def mebibytes(size_bytes: int) -> str:
    """Return a size in whole mebibytes, rounded up."""
    return f"{-(-size_bytes // MIB)}Mi"


def round_up(size_bytes: int, unit_bytes: int = MIB) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def _decimal(value: Fraction) -> str:
    mantissa, power = _thousands(value)
    return f"{mantissa}{_DECIMAL[power]}"


def _thousands(value: Fraction) -> tuple[int, int]:
    """Return (integer, power of ten that is a multiple of three) with the smallest integer; nano at least."""
    whole = math.ceil(value * 10**9)
    if whole == 0:
        return 0, 0
    power = -9
    while whole % 1000 == 0 and power < 18:
        whole //= 1000
        power += 3
    return whole, power
