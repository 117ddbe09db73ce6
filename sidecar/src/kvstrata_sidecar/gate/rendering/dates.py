"""Today's date in what a template made: a prefix that is another one tomorrow is no prefix to keep."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, timedelta

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def written_as(day: date) -> frozenset[str]:
    """Return how templates and people write a day, in English names of months whatever the locale."""
    year, month, number = day.year, day.month, day.day
    name = _MONTHS[month - 1]
    short = name[:3]
    return frozenset(
        {
            f"{year}-{month:02}-{number:02}",
            f"{year}/{month:02}/{number:02}",
            f"{year}.{month:02}.{number:02}",
            f"{year}{month:02}{number:02}",
            f"{number:02}/{month:02}/{year}",
            f"{month:02}/{number:02}/{year}",
            f"{number:02}.{month:02}.{year}",
            f"{number:02}-{month:02}-{year}",
            f"{number:02} {short} {year}",
            f"{number} {short} {year}",
            f"{number:02} {name} {year}",
            f"{number} {name} {year}",
            f"{name} {number:02}, {year}",
            f"{name} {number}, {year}",
            f"{short} {number:02}, {year}",
            f"{short} {number}, {year}",
            f"{number:02}-{short}-{year}",
            f"{year}年{month}月{number}日",
        }
    )


def dated(made: str, said: Iterable[str], today: date) -> bool:
    """Whether `made` holds a date of today, or of the day before or after, that nothing of `said` holds.

    The engine's clock may be in another time zone. A date that the prefix's author wrote stays what it is.
    """
    days = (today + timedelta(days=offset) for offset in (-1, 0, 1))
    found = {text for day in days for text in written_as(day) if text in made}
    sources = tuple(said)
    return any(not any(text in source for source in sources) for text in found)
