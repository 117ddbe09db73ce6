"""Quantities in the canonical form of the apiserver: `1024Mi` becomes `1Gi`, `0.5` becomes `500m`.

The operator skips a write when the live object equals the desired one, so desired quantities must be canonical.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from kvstrata.quantity import BINARY, DECIMAL, read_quantity

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MOST = (1 << 63) - 1
"""The apiserver stores larger values with a binary suffix as this."""


def canonical_quantity(text: str) -> str:
    """Return the form in which the apiserver stores a quantity (apimachinery's `Quantity.String`). Raises ValueError
    for texts that are not quantities."""
    value, suffix, has_exponent = read_quantity(text)
    if suffix in BINARY[1:]:
        value = min(value, Fraction(MOST))
        # Without a suffix it is read as decimal: 62.5Ki is stored as 64k, not as 64000.
        return binary(int(value)) if value and value % 1024 == 0 else _decimal(value)
    if has_exponent:
        mantissa, power = _thousands(value)
        return f"{mantissa}e{power}" if power else str(mantissa)
    return _decimal(value)


def canonical_amounts(amounts: Mapping[str, str]) -> dict[str, str]:
    return {name: canonical_quantity(str(amount)) for name, amount in amounts.items()}


def binary(size_bytes: int) -> str:
    """Return a size in bytes, MOST at most, as a canonical quantity with a binary suffix: `1610612736` is `1536Mi`."""
    if size_bytes < 1024:
        return _decimal(Fraction(size_bytes))
    size_bytes, power = min(size_bytes, MOST), 0
    while size_bytes % 1024 == 0 and power < len(BINARY) - 1:
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{BINARY[power]}"


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
    return f"{mantissa}{DECIMAL[power]}"


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
