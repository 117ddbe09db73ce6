"""Bounds of JSON schemas and patterns, which the engine compiles while other requests wait.

A `SchemaBudget` is for all schemas of a request, under all its keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson

from kvstrata_sidecar.gate.proxy import strict_json
from kvstrata_sidecar.gate.proxy.values import Bound, Json, text, texts, wrong

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMAS_BYTES = 1024 * 1024
"""Bytes of all schemas of a budget."""

MAX_SCHEMA_DEPTH = 32
MAX_ALTERNATIVES = 1000
MAX_PROPERTY_PAIRS = 250_000
"""The sum of squares of the numbers of properties of a budget's objects: compiling takes 4 µs for each."""

MAX_REGEX_CHARACTERS = 1024
MAX_WRITTEN_OUT = 100_000
"""Characters of all patterns of a budget with their repetitions written out: `(a{100}){100}` has 10,000. Each different
pattern with repetitions counts once at least ten times its length, so that counting takes 5 ms at most."""

_ALTERNATIVES = frozenset({"anyOf", "oneOf", "allOf", "enum"})
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keys of schemas for the same value as the schema around them."""

_SYMBOL = re.compile(r"\\.|\[\^?(?:\\.|[^][\\])*+\]|\{\s*+(\d*+)\s*+,?+\s*+(\d*+)\s*+\}|.", re.DOTALL)
"""No part backtracks, and no class holds the beginning of another: the time grows with the length alone."""

_AMBIGUOUS = re.compile(r"\[\^?\]|\[[^\]]*\[|\[(?:\\.|[^][\\])*+\[|\(\?[a-w]*x")
"""Classes and flags that engines read in different ways, and so the groups behind them."""


def written_out(pattern: str) -> int:
    """Return an upper bound of a pattern's characters with its repetitions written out."""
    if "{" not in pattern:
        return len(pattern)
    product, levels = 1, [[0]]
    for symbol in _SYMBOL.finditer(pattern):
        times = max(int(digits.lstrip("0")[:9] or 0) for digits in symbol.groups()) if symbol.lastindex else 0
        if times:
            product *= times
            levels[-1][-1] *= times
        elif symbol[0] == "(":
            levels.append([0])
        elif symbol[0] == ")":
            inner = sum(levels.pop())
            levels = levels or [[0]]
            levels[-1].append(inner)
        elif symbol[0] not in "*+?":
            levels[-1].append(1)
    return len(pattern) * product if _AMBIGUOUS.search(pattern) else sum(map(sum, levels))


@dataclass(slots=True)
class SchemaBudget:
    """Bounds each schema, and all that it takes together."""

    _bytes: int = 0
    _written_out: int = 0
    _pairs: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)

    def take(self, value: object, where: str) -> None:
        """Bounds a JSON schema, or an object that contains schemas."""
        if type(value) is not dict:
            raise wrong(where, "an object")
        data = strict_json.emit(value)
        if len(data) > MAX_SCHEMA_BYTES:
            raise wrong(where, f"a schema of at most {MAX_SCHEMA_BYTES} bytes")
        self._count(len(data), where)
        self._take_nodes(value, where)

    def take_text(self, value: object, where: str) -> None:
        """Bounds a schema as an object or as the text of one."""
        if type(value) is not str:
            self.take(value, where)
            return
        text(MAX_SCHEMA_BYTES)(value, where)
        self._count(len(value), where)
        try:
            parsed = orjson.loads(value)
        except ValueError:
            parsed = None
        if type(parsed) is not dict:
            raise wrong(where, "the JSON text of an object")
        self._take_nodes(parsed, where)

    def take_regex(self, value: Any, where: str) -> None:
        """Bounds a pattern alone."""
        text(MAX_REGEX_CHARACTERS)(value, where)
        self._take_pattern(value, where)

    def listed(self, count: int) -> Bound:
        """Return the bound of a list of schemas."""

        def check(value: object, where: str) -> None:
            if type(value) is not list or len(value) > count:
                raise wrong(where, f"a list of at most {count} objects")
            for index, item in enumerate(value):
                self.take(item, f"{where}[{index}]")

        return check

    def _count(self, more_bytes: int, where: str) -> None:
        self._bytes += more_bytes
        if self._bytes > MAX_SCHEMAS_BYTES:
            raise wrong(where, f"a schema that, with those before it, has at most {MAX_SCHEMAS_BYTES} bytes")

    def _take_nodes(self, value: Json, where: str) -> None:
        """Raise Refusal unless depth, alternatives, patterns and references of a schema are within the bounds."""
        alternatives, level, referring = 0, [value], []
        for _ in range(MAX_SCHEMA_DEPTH):
            below: list[Any] = []
            for node in level:
                if type(node) is dict and "$ref" in node:
                    referring.append(node)
                for key, inner in node.items() if type(node) is dict else enumerate(node):
                    kind = type(inner)
                    if kind is list or kind is dict:
                        below.append(inner)
                        alternatives += len(inner) if kind is list and key in _ALTERNATIVES else 0
                        self._pairs += len(inner) ** 2 if kind is dict and key == "properties" else 0
                        regexes: Iterable[Any] = inner if key == "patternProperties" else ()
                    else:
                        regexes = (inner,) if key == "pattern" else ()
                    for regex in regexes:
                        self._take_pattern(regex, where)
            if alternatives > MAX_ALTERNATIVES:
                raise wrong(where, f"a schema with at most {MAX_ALTERNATIVES} alternatives in all")
            if self._pairs > MAX_PROPERTY_PAIRS:
                raise wrong(where, "a value with at most 500 properties in an object, and fewer in many objects")
            if not below:
                break
            level = below
        else:
            raise wrong(where, f"a schema of at most {MAX_SCHEMA_DEPTH} levels")
        reference = _endless_reference(referring, value)
        if reference is not None:
            raise wrong(where, f"a schema without references that lead to themselves alone, as {reference[:64]!r} does")

    def _take_pattern(self, pattern: object, where: str) -> None:
        if type(pattern) is not str:
            return
        if len(pattern) > MAX_REGEX_CHARACTERS:
            raise wrong(where, f"a schema with patterns of at most {MAX_REGEX_CHARACTERS} characters")
        size = self._sizes.get(pattern)
        if size is None:
            size = self._sizes[pattern] = max(written_out(pattern), len(pattern))
            size = max(size, 10 * len(pattern)) if "{" in pattern else size
        self._written_out += size
        if self._written_out > MAX_WRITTEN_OUT:
            raise wrong(where, f"a value with patterns of at most {MAX_WRITTEN_OUT} characters written out")


@dataclass(frozen=True, slots=True)
class WithSchemas:
    """The bound of a key whose schemas count towards the budget of their request."""

    within: Callable[[SchemaBudget], Bound]

    def __call__(self, value: object, where: str) -> None:
        self.within(SchemaBudget())(value, where)


def choices(value: Any, where: str) -> None:
    texts(MAX_ALTERNATIVES, MAX_REGEX_CHARACTERS)(value, where)
    if sum(map(len, value)) > MAX_SCHEMA_BYTES:
        raise wrong(where, f"a list of at most {MAX_SCHEMA_BYTES} characters in all")


def _endless_reference(referring: Iterable[Json], root: Json) -> str | None:
    """Return a reference that leads back to itself without a step into the value, None if there is none. A tree that
    refers to itself under `items` or `properties` has an end."""
    under_way: dict[int, bool] = {}
    for start in referring:
        path = [(start, _in_place(start, root))] if id(start) not in under_way else []
        while path:
            node, inner = path[-1]
            under_way[id(node)] = True
            following = next(inner, None)
            if following is None:
                under_way[id(node)] = False
                path.pop()
            elif under_way.get(id(following)):
                return next(str(one["$ref"]) for one, _ in reversed(path) if "$ref" in one)
            elif id(following) not in under_way:
                path.append((following, _in_place(following, root)))
    return None


def _in_place(node: Json, root: Json) -> Iterator[Json]:
    """Yield the schemas that a value of `node` must fit, too."""
    found = [_target(node.get("$ref"), root)]
    for key in _IN_PLACE:
        inner = node.get(key)
        found += inner if type(inner) is list else [inner]
    return (one for one in found if type(one) is dict)


def _target(reference: object, root: Json) -> object:
    """Return the schema at a reference inside `root`, None for others."""
    if type(reference) is not str or (reference != "#" and not reference.startswith("#/")):
        return None
    node: Any = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if type(node) is list and step.isdecimal() and len(step) < 9 and int(step) < len(node):
            node = node[int(step)]
        else:
            node = node.get(step) if type(node) is dict else None
    return node
