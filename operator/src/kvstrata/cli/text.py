"""Text for terminals."""

from __future__ import annotations

from collections.abc import Sequence


class CommandError(Exception):
    """A command cannot be carried out; the message has the reason and the remedy. `code` is the exit code, None that
    of the command for all errors."""

    code: int | None = None


def plain(text: str) -> str:
    """Replace unprintable characters: text from elsewhere must not control the terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def table(*rows: Sequence[str]) -> str:
    """Return rows of equal length in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)
