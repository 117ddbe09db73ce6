"""The part of Docker's ``.dockerignore`` that decides which files of a build's context count."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ALWAYS_IGNORED = (".git", ".local")


def context_files(context: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Every file and link of a build's context that no pattern excludes, in a stable order."""
    rules = compile_patterns([*ALWAYS_IGNORED, *patterns])
    may_return = any(kept for _, kept in rules)
    yield from _walk(context, context, rules, may_return)


def read_patterns(ignore_file: Path) -> list[str]:
    """The patterns of an ignore file: its lines without comments and blanks; none when there is no file."""
    if not ignore_file.is_file():
        return []
    lines = (line.strip() for line in ignore_file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def compile_patterns(patterns: Sequence[str]) -> list[tuple[re.Pattern[str], bool]]:
    """Patterns as (expression, whether it takes files back in), in the order in which the last match wins."""
    compiled = []
    for pattern in patterns:
        kept = pattern.startswith("!")
        body = pattern.removeprefix("!").strip("/").removeprefix("./")
        compiled.append((re.compile(_expression(body) + r"(?:/.*)?\Z"), kept))
    return compiled


def is_ignored(name: str, rules: Sequence[tuple[re.Pattern[str], bool]]) -> bool:
    """Whether the path ``name``, relative to the context, is left out."""
    ignored = False
    for expression, kept in rules:
        if expression.match(name):
            ignored = not kept
    return ignored


def _walk(
    context: Path, folder: Path, rules: Sequence[tuple[re.Pattern[str], bool]], may_return: bool
) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        ignored = is_ignored(str(path.relative_to(context)), rules)
        if path.is_dir() and not path.is_symlink():
            # With a "!" pattern something inside an ignored folder may still count.
            if not ignored or (may_return and path.name not in ALWAYS_IGNORED):
                yield from _walk(context, path, rules, may_return)
        elif not ignored:
            yield path


def _expression(pattern: str) -> str:
    """One pattern as a regular expression: ``*`` and ``?`` stay within a name, ``**`` crosses folders."""
    expression, position = "", 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            expression += "(?:.*/)?"
            position += 3
        elif pattern.startswith("**", position):
            expression += ".*"
            position += 2
        else:
            character = pattern[position]
            expression += {"*": "[^/]*", "?": "[^/]"}.get(character, re.escape(character))
            position += 1
    return expression
