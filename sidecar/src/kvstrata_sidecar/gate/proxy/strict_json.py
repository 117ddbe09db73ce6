"""JSON that has one reading only.

Engines take the last of repeated keys, NaN, other encodings and lone surrogates; a proxy that reads any of these
differently can be made to forward what it believes to have refused. So the gate parses everything, takes only what
every parser reads alike, and emits its own bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

import orjson

from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request

MAX_DEPTH = 64
MAX_CONTAINERS = 20_000
MAX_STRINGS = 50_000
MAX_VALUES = 1_000_000
_SAMPLE_BYTES = 512
_STRING_WITHOUT_ESCAPES = re.compile(rb'"[^"]*"?')
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return the object that `data` holds. Raises Refusal (400) for anything that parsers might read differently."""
    containers = check_shape(data)
    value = _as_written(data)
    if value is None:
        value = _parsed(data)
    if not isinstance(value, dict):
        raise bad_request(Reason.MALFORMED_JSON, "the body is not a JSON object")
    if containers > MAX_DEPTH:
        _check_depth(value)
    return value


def _as_written(data: bytes | bytearray) -> Any:
    """Return what `data` holds if it is, byte for byte, what the gate itself would write for that; else None.

    Most clients write JSON without spaces and with no escapes but the needed ones, as orjson does. Such bytes have one
    reading only: no key repeated, no number out of range, no other encoding would come out again as it went in.
    """
    if data.find(b'": ', 0, _SAMPLE_BYTES) >= 0 or data.find(b"\\u", 0, _SAMPLE_BYTES) >= 0:
        return None  # with spaces, or with escapes that are hardly ever needed: do not read it twice
    try:
        value = orjson.loads(data)
        return value if orjson.dumps(value) == data else None
    except (ValueError, TypeError):
        return None


def _parsed(data: bytes | bytearray) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(Reason.ENCODING, f"the body is not UTF-8 (byte {error.start})") from None
    if text.startswith("\ufeff"):
        raise bad_request(Reason.ENCODING, "the body starts with a byte order mark; send plain UTF-8")
    try:
        return _DECODER.decode(text)
    except Refusal:
        raise
    except json.JSONDecodeError as error:
        raise bad_request(Reason.MALFORMED_JSON, f"the body is not JSON: {error.msg} at {error.pos}") from None
    except ValueError:
        raise bad_request(Reason.MALFORMED_JSON, "the body holds a number that no engine can represent") from None
    except RecursionError:
        raise _too_deep() from None


def emit(value: dict[str, Any]) -> bytes:
    """Return `value` as JSON. Raises Refusal for lone surrogates and integers beyond 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise bad_request(
            Reason.MALFORMED_JSON, "the body holds a lone surrogate or an integer of more than 64 bits"
        ) from None


def check_shape(data: bytes | bytearray) -> int:
    """Return at most how many lists and objects `data` holds; raise Refusal for counts that would stall a parser.

    In a short body they are counted only until nesting may be too deep.
    """
    # What stands inside strings counts here too: only bodies that may be over a bound are worth a closer look. A
    # string takes three bytes with what separates it from the next, a list, an object or a value two.
    if len(data) <= 2 * MAX_CONTAINERS:
        return _openings(data, MAX_DEPTH + 1)
    containers = data.count(b"[") + data.count(b"{")
    if (
        containers <= MAX_CONTAINERS
        and (len(data) <= 3 * MAX_STRINGS or data.count(b'"') <= 2 * MAX_STRINGS)
        and (len(data) <= 2 * MAX_VALUES or data.count(b",") <= MAX_VALUES)
    ):
        return containers
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise bad_request(Reason.TOO_LARGE, f"the body holds more than {MAX_STRINGS} strings")
    skeleton = _STRING_WITHOUT_ESCAPES.sub(b"", unescaped)
    if skeleton.count(b",") > MAX_VALUES:
        raise bad_request(Reason.TOO_LARGE, f"the body holds more than {MAX_VALUES} values")
    if len(skeleton.translate(None, _ALL_BUT_BRACKETS)) > 2 * MAX_CONTAINERS:
        raise bad_request(Reason.TOO_LARGE, f"the body holds more than {MAX_CONTAINERS} lists and objects")
    return containers


def _openings(data: bytes | bytearray, enough: int) -> int:
    # In a body of text there are few, and from one to the next `find` is many times as fast as `count`.
    found = 0
    for bracket in (b"[", b"{"):
        at = data.find(bracket)
        while at >= 0:
            found += 1
            if found >= enough:
                return found
            at = data.find(bracket, at + 1)
    return found


def _check_depth(value: dict[str, Any]) -> None:
    depth = 1
    level: list[dict[str, Any] | list[Any]] = [value]
    while level := [
        inner
        for outer in level
        for inner in (outer.values() if type(outer) is dict else outer)
        if type(inner) is dict or type(inner) is list
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()


def _too_deep() -> Refusal:
    return bad_request(Reason.TOO_LARGE, f"the body is nested deeper than {MAX_DEPTH}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        name = repeated.encode("utf-8", "replace").decode()[:64]
        raise bad_request(Reason.MALFORMED_JSON, f"the key {name!r} is given more than once", name)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise bad_request(Reason.MALFORMED_JSON, "the body holds a number that is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise bad_request(Reason.MALFORMED_JSON, f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)
