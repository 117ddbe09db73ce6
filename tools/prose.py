"""`python -m tools.prose [PATH]...`: refuses words of `prose.toml` in documents, docstrings, comments, messages, names.

Checks the tracked files below the given paths, by default below those listed as clean. In Python: docstrings, comments,
texts with a blank, and names; in Markdown: all but code and questions; elsewhere: comments. Quoted code is skipped.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("prose.toml")
COMMENTS = {".lua": "--", ".sh": "#", ".yaml": "#", ".toml": "#", ".in": "#", "Makefile": "#", "Dockerfile": "#"}
CODE = re.compile(r"^ *(```|~~~).*?^ *\1|`[^`\n]*`|\]\([^)\s]*\)|<!--.*?-->|https?://\S+", re.DOTALL | re.MULTILINE)
QUESTION = re.compile(r"[^.:;|#]*\?")
NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    instead: str
    unless: re.Pattern[str] | None = None

    @classmethod
    def read(cls, pattern: str, instead: str, unless: str = "") -> Rule:
        return cls(_whole(pattern), instead, _whole(unless) if unless else None)

    def hits(self, text: str) -> Iterator[re.Match[str]]:
        """Yield matches outside of every match of `unless`."""
        allowed = [one.span() for one in self.unless.finditer(text)] if self.unless else []
        for found in self.pattern.finditer(text):
            if not any(start <= found.start() and found.end() <= end for start, end in allowed):
                yield found


@dataclass(frozen=True)
class Rules:
    clean: tuple[str, ...]
    prose: tuple[Rule, ...]
    names: tuple[Rule, ...]

    @classmethod
    def read(cls, path: Path = LIST) -> Rules:
        data = tomllib.loads(path.read_text())
        prose, names = (tuple(Rule.read(**row) for row in data[key]) for key in ("prose", "names"))
        return cls(tuple(data["clean"]), prose, names)


@dataclass(frozen=True)
class Hit:
    line: int
    text: str
    instead: str


def in_file(name: str, text: str, rules: Rules) -> list[Hit]:
    """Return the refused words of a file, by line. Files of unknown kinds have none."""
    suffix = Path(name).suffix or Path(name).name
    if suffix == ".py":
        hits = [*_in_python(text, rules)]
    elif suffix == ".md":
        hits = [*_in_prose(QUESTION.sub(_blank, CODE.sub(_blank, text)), 1, rules.prose)]
    elif suffix in COMMENTS:
        hits = [*_in_comments(text, COMMENTS[suffix], rules.prose)]
    else:
        hits = []
    return sorted(hits, key=lambda hit: hit.line)


def _in_python(text: str, rules: Rules) -> Iterator[Hit]:
    for line, prose in _texts(ast.parse(text)):
        yield from _in_prose(prose, line, rules.prose)
    seen: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _in_prose(token.string, token.start[0], rules.prose)
        elif token.type == tokenize.NAME and token.string not in seen and not token.string.startswith("test_"):
            seen.add(token.string)
            parts = NAME_PARTS.findall(token.string)
            for rule in rules.names:
                if any(rule.pattern.fullmatch(part) for part in parts):
                    yield Hit(token.start[0], token.string, rule.instead)


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield strings that hold a blank; the constants of an f-string are one text."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in node.values]
            yield node.lineno, "".join(str(part) for part in parts)
            for one in node.values:
                if isinstance(one, ast.FormattedValue):
                    yield from _texts(one)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
        else:
            yield from _texts(node)


def _in_comments(text: str, mark: str, rules: Iterable[Rule]) -> Iterator[Hit]:
    comment = re.compile(rf"(?:^|\s){mark}\s(.*)$")
    for line, content in enumerate(text.splitlines(), 1):
        if found := comment.search(content):
            yield from _in_prose(found[1], line, rules)


def _in_prose(text: str, line: int, rules: Iterable[Rule]) -> Iterator[Hit]:
    text = CODE.sub(_blank, text)
    for rule in rules:
        for found in rule.hits(text):
            yield Hit(line + text.count("\n", 0, found.start()), " ".join(found[0].split()), rule.instead)


def _blank(found: re.Match[str]) -> str:
    """Return a placeholder that keeps the lines."""
    return "\n" * found[0].count("\n") or "``"


def _whole(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE)


def main(paths: list[str]) -> int:
    rules = Rules.read()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *(paths or rules.clean)],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    found = 0
    for name in filter(None, listed):
        path = REPOSITORY / name
        if path.is_file():
            for hit in in_file(name, path.read_text(errors="replace"), rules):
                print(f"{name}:{hit.line}: {hit.text!r}: rather {hit.instead}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
