from __future__ import annotations

import decimal
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from kvstrata.api.scalars import ResourceQuantity
from kvstrata.objects.quantities import MOST, binary, canonical_quantity, round_up
from kvstrata.quantity import quantity_bytes


@pytest.mark.parametrize(
    ("given_form", "stored"),
    [
        ("1024Mi", "1Gi"),
        ("1536Mi", "1536Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5", "500m"),
        ("0.1", "100m"),
        ("1000m", "1"),
        ("4000m", "4"),
        ("1500m", "1500m"),
        ("1000", "1k"),
        ("1024", "1024"),
        ("1000000", "1M"),
        ("1234567", "1234567"),
        ("1G", "1G"),
        ("0.5Ki", "512"),
        ("1Ki", "1Ki"),
        ("62.5Ki", "64k"),
        ("1.5Ki", "1536"),
        ("100n", "100n"),
        ("0", "0"),
        ("0Gi", "0"),
        ("1e3", "1e3"),
        ("12E2", "1200"),
        (".5", "500m"),
        ("2", "2"),
        ("100", "100"),
        ("7Ei", "7Ei"),
        ("8Ei", "9223372036854775807"),
        ("9.5Ei", "9223372036854775807"),
        ("10995116277824Mi", "9223372036854775807"),
        ("9223372036854775807", "9223372036854775807"),
        ("10E", "10E"),
    ],
)
def test_a_quantity_takes_the_form_in_which_the_apiserver_stores_it(given_form: str, stored: str) -> None:
    assert canonical_quantity(given_form) == stored


@given(st.integers(0, 2**60))
def test_a_binary_size_means_the_same_number_of_bytes(size_bytes: int) -> None:
    assert ResourceQuantity(binary(size_bytes)).in_bytes == size_bytes


@given(st.from_regex(r"\A[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|Ki|Mi|Gi|e[0-9])?\Z"))
def test_a_quantity_in_bytes_is_that_of_the_api(text: str) -> None:
    assert quantity_bytes(text) == ResourceQuantity(text).in_bytes


amounts = st.from_regex(r"\A[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|Ki|Mi|Gi)?\Z")


@given(amounts)
def test_the_canonical_form_keeps_the_amount_and_is_stable(text: str) -> None:
    canonical = canonical_quantity(text)
    assert ResourceQuantity(canonical).in_units == ResourceQuantity(text).in_units
    assert canonical_quantity(canonical) == canonical


def by_kubernetes(text: str) -> Fraction:
    with decimal.localcontext(prec=200):
        return Fraction(parse_quantity(text))


@given(st.from_regex(ResourceQuantity.PATTERN, fullmatch=True))
def test_a_quantity_is_the_amount_that_the_official_client_reads(text: str) -> None:
    amount = by_kubernetes(text)
    assert ResourceQuantity(text).in_units == amount
    stored = min(amount, Fraction(MOST)) if text.endswith("i") else amount
    assert by_kubernetes(canonical_quantity(text)) == Fraction(math.ceil(stored * 10**9), 10**9)


def test_a_size_beyond_what_the_apiserver_stores_is_what_it_stores_instead() -> None:
    assert binary(10 * 2**60) == canonical_quantity("10Ei")


def test_what_is_not_a_quantity_is_refused() -> None:
    with pytest.raises(ValueError, match="quantity"):
        canonical_quantity("1 Gi")


def test_sizes_are_rounded_up_to_whole_units() -> None:
    assert [round_up(size, 10) for size in (0, 1, 10, 11)] == [0, 10, 10, 20]
