"""Bounds of values: the kind of value that a key may hold, and its limit.

The limits keep one caller from occupying the engine. They are above ordinary use, and at or below the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request

Json = dict[str, Any]
Bound = Callable[[Any, str], None]
"""Raises Refusal that names the place, the second argument, for other values. Removes nulls and hints from objects."""

HINTS = frozenset(
    {"cache_control", "prompt_cache_breakpoint", "defer_loading", "eager_input_streaming", "include_obfuscation",
     "extra_content", "parsed", "parsed_arguments", "parsed_output"}
)  # fmt: skip
"""Keys about caching, loading and obfuscation, and those that clients and providers add to parts of answers: accepted
at every level, and not forwarded."""

MAX_BIASES = 300
MAX_NAME_CHARACTERS = 256
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
_NOTHING: Mapping[str, str] = {}


def wrong(where: str, rule: str) -> Refusal:
    """Return the refusal of a value that does not follow `rule`."""
    return bad_request(Reason.BAD_VALUE, f"'{where}' is {rule}", where)


def unserved(where: str, reason: str) -> Refusal:
    """Return the refusal of a key that is known but not served."""
    return bad_request(Reason.FORBIDDEN_KEY, f"'{where}' is not served: {reason}", where)


def shown(name: str) -> str:
    """Return a caller's own key for a refusal, bounded."""
    return name.encode("utf-8", "replace").decode()[:64]


def known_keys(value: object, allowed: Collection[str], where: str, refused: Mapping[str, str] = _NOTHING) -> Json:
    """Return an object without nulls and hints. Raises Refusal for keys not `allowed`; `refused` has known reasons."""
    if not isinstance(value, dict):
        raise wrong(where, "an object")
    for key in [key for key, inner in value.items() if inner is None or key in HINTS]:
        del value[key]
    for key in value:
        if key not in allowed:
            name = f"{where}.{shown(key)}"
            if key in refused:
                raise unserved(name, refused[key])
            reason = Reason.FORBIDDEN_KEY if key in ("uuid", "cache_salt") else Reason.UNKNOWN_KEY
            hint = ": it names an entry in a cache that all tenants share" if key == "uuid" else ""
            raise bad_request(reason, f"'{name}' is not accepted{hint}", name)
    return value


def kind_of(value: object, where: str, known: Collection[str], refused: Mapping[str, str] = _NOTHING) -> str:
    """Return the `type` of an object. Raises Refusal unless it is known; `refused` has the reasons of others."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str):
        if kind in known:
            return kind
        if kind in refused:
            raise unserved(f"{where}.type", f"{kind!r}: {refused[kind]}")
    raise wrong(f"{where}.type", f"one of {', '.join(known)}")


def _bound(holds: Callable[[Any], bool], rule: str) -> Bound:
    def check(value: object, where: str) -> None:
        if not holds(value):
            raise wrong(where, rule)

    return check


flag = _bound(lambda value: type(value) in (bool, int) and value in (0, 1), "true or false")
"""Also written as 1 or 0, as languages without truth values do, and as the engine reads it."""


def is_whole(value: object) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def are_whole(values: list[Any]) -> bool:
    """Whether all items are whole numbers; those that are written otherwise become integers in place."""
    if set(map(type, values)) <= {int}:
        return True
    if not all(map(is_whole, values)):
        return False
    values[:] = map(int, values)
    return True


def whole(low: int, high: int) -> Bound:
    """Also written as 2.0, as languages without whole numbers do, and as the engine reads it."""
    return _bound(lambda value: is_whole(value) and low <= value <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float) -> Bound:
    return _bound(lambda value: type(value) in (int, float) and low <= value <= high, f"a number from {low} to {high}")


def text(characters: int) -> Bound:
    rule = f"text of at most {characters} characters"
    return _bound(lambda value: type(value) is str and len(value) <= characters, rule)


def texts(count: int, characters: int, *, single: bool = False) -> Bound:
    """A list of texts; with `single`, also one text alone."""

    def holds(value: object) -> bool:
        items = [value] if single and type(value) is str else value
        if type(items) is not list or len(items) > count:
            return False
        return all(type(item) is str and len(item) <= characters for item in items)

    return _bound(holds, f"a list of at most {count} texts of at most {characters} characters")


def one_of(*words: str) -> Bound:
    return _bound(lambda value: value in words, f"one of {', '.join(words)}")


def token_ids(count: int) -> Bound:
    rule = f"a list of at most {count} token ids"
    return _bound(lambda ids: type(ids) is list and len(ids) <= count and are_whole(ids), rule)


def biases(value: object, where: str) -> None:
    """Biases by token id. An id has one spelling: a map of others can make the engine's own map collide."""
    if type(value) is not dict or len(value) > MAX_BIASES:
        raise wrong(where, f"an object of at most {MAX_BIASES} token ids")
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token) or not token.isascii():
            raise wrong(where, "an object whose keys are token ids, in plain digits")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong(where, "an object whose values are numbers from -100 to 100")


def record(keys: Mapping[str, Bound], refused: Mapping[str, str] = _NOTHING) -> Bound:
    def check(value: object, where: str) -> None:
        for key, inner in known_keys(value, keys, where, refused).items():
            keys[key](inner, f"{where}.{key}")

    return check


def by_type(kinds: Mapping[str, Bound], refused: Mapping[str, str] = _NOTHING) -> Bound:
    """An object whose `type` decides about its bound."""
    return lambda value, where: kinds[kind_of(value, where, kinds, refused)](value, where)


def word_or(words: Iterable[str], otherwise: Bound) -> Bound:
    """One of these words, or another kind of value."""
    word = one_of(*words)
    return lambda value, where: (word if isinstance(value, str) else otherwise)(value, where)
