"""Quantities, durations and names: what they accept, and the numbers behind them."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kvstrata.api.scalars import (
    Duration,
    Quantity,
    ResourceQuantity,
    TenantName,
    Timestamp,
    format_timestamp,
)

QUANTITY = TypeAdapter(Quantity)
RESOURCE = TypeAdapter(ResourceQuantity)
DURATION = TypeAdapter(Duration)
TENANT: TypeAdapter[str] = TypeAdapter(TenantName)

SUFFIXES = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip


@given(st.integers(0, 10**18 - 1), st.integers(0, 10**9 - 1), st.sampled_from(sorted(SUFFIXES)))
def test_a_quantity_is_its_number_times_its_suffix_rounded_up(whole: int, billionths: int, suffix: str) -> None:
    exact = (Fraction(whole) + Fraction(billionths, 10**9)) * SUFFIXES[suffix]
    assert QUANTITY.validate_python(f"{whole}.{billionths:09}{suffix}").in_bytes == math.ceil(exact)


@given(st.integers(0, 2**59))
def test_an_integer_is_a_quantity_of_bytes_and_is_written_back_as_text(amount: int) -> None:
    quantity = QUANTITY.validate_python(amount)
    assert quantity.in_bytes == amount
    assert QUANTITY.dump_python(quantity, mode="json") == str(amount)


@given(st.text(max_size=40))
def test_no_text_is_both_accepted_and_unreadable(text: str) -> None:
    readers: list[tuple[TypeAdapter[Any], str]] = [
        (QUANTITY, "in_bytes"),
        (RESOURCE, "in_units"),
        (DURATION, "in_seconds"),
    ]
    for adapter, number in readers:
        try:
            value = adapter.validate_python(text)
        except ValidationError:
            continue
        assert getattr(value, number) >= 0
        assert adapter.dump_python(value, mode="json") == text


@pytest.mark.parametrize(
    "text", ["", "-1", "1 Gi", "100m", "1gi", "Gi", "1e3", "1.", ".5", "1" * 19, "1\n", True, 1.5, None]
)
def test_what_is_no_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValidationError, match="must be a size such as 512Mi"):
        QUANTITY.validate_python(text)


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("250m", Fraction(1, 4)),
        ("2", Fraction(2)),
        ("1e3", Fraction(1000)),
        (".5", Fraction(1, 2)),
        (4, Fraction(4)),
        (0.5, Fraction(1, 2)),
        (1e-6, Fraction(1, 10**6)),
    ],
)
def test_resources_take_the_whole_grammar_of_kubernetes(text: str | float, units: Fraction) -> None:
    assert RESOURCE.validate_python(text).in_units == units


@pytest.mark.parametrize("value", [True, -0.5, {}, [], None, float("nan")])
def test_other_values_are_no_amount_of_a_resource(value: object) -> None:
    with pytest.raises(ValidationError, match="must be a Kubernetes quantity such as"):
        RESOURCE.validate_python(value)


@given(st.integers(0, 10**6 - 1), st.integers(0, 10**6 - 1), st.integers(0, 10**6 - 1))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    duration = DURATION.validate_python(f"{hours}h{minutes}m{seconds}s")
    assert duration.in_seconds == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7d", 604_800),
        ("1.5d", 129_600),
        ("0.29d", 25_056),
        ("1.5h", 5400),
        ("0.01h", 36),
        ("1.5h30m", 7200),
        ("2.05m", 123),
        ("0.1m1s", 7),
        ("0s", 0),
    ],
)
def test_days_and_fractions_are_whole_seconds(text: str, seconds: int) -> None:
    assert DURATION.validate_python(text).in_seconds == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "5 m",
        "1w",
        "1.5s",
        "0.01m",
        "0.001h",
        "1d12h",
        ".5h",
        "1.h",
        "-5m",
        "5m1h",
        "100ms",
        "1234567h",
        300,
        None,
    ],
)
def test_what_is_no_duration_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(
        ValidationError, match=r"must be a duration of whole seconds such as 45s, 5m, 1h30m, 1\.5h or 7d"
    ):
        DURATION.validate_python(text)


@given(st.text(min_size=1, max_size=128))
def test_an_accepted_tenant_has_no_control_characters_and_no_white_space_at_its_ends(text: str) -> None:
    try:
        tenant = TENANT.validate_python(text)
    except ValidationError:
        return
    assert tenant == text == text.strip()
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", tenant)


@given(st.datetimes(timezones=st.just(timezone(timedelta(hours=5, minutes=30)))))
def test_a_timestamp_is_read_back_as_the_same_second(moment: datetime) -> None:
    adapter: TypeAdapter[datetime] = TypeAdapter(Timestamp)
    try:
        expected = moment.astimezone(UTC).replace(microsecond=0)
    except OverflowError:
        return
    if expected.year < 1000:
        return
    assert adapter.validate_python(format_timestamp(expected)) == expected
    assert adapter.dump_python(adapter.validate_python(moment), mode="json") == format_timestamp(expected)
