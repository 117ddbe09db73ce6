"""JSON with only one reading.

Engines accept repeated keys (the last counts), NaN, other encodings and lone surrogates; a proxy that reads these
differently can be made to forward values that it believes to have refused. So the gate parses everything, accepts only
values that every parser reads alike, and emits its own bytes.
"""

from __future__ import annotations

import json
import math
import re
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
    """Raises Refusal (400) for anything that parsers might read differently."""
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
    """Return the value of `data` if orjson would write it byte for byte like that, as most clients do; else None. Such
    bytes have only one reading: repeated keys, numbers out of range and other encodings would not survive."""
    if data.find(b'": ', 0, _SAMPLE_BYTES) >= 0 or data.find(b"\\u", 0, _SAMPLE_BYTES) >= 0:
        return None  # spaces or unneeded escapes: do not parse it twice
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
    """Raises Refusal for lone surrogates and integers beyond 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise bad_request(
            Reason.MALFORMED_JSON, "the body holds a lone surrogate or an integer of more than 64 bits"
        ) from None


def check_shape(data: bytes | bytearray) -> int:
    """Return an upper bound of the lists and objects in `data`, as far as nesting may be too deep. Raises Refusal for
    counts that would stall a parser."""
    # These counts include string contents: only bodies that may exceed a bound are checked closely. A string takes at
    # least three bytes with its separator; a list, an object or a value two.
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
    # Text has few brackets, and `find` is many times as fast as `count` from one to the next.
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
        seen: set[str] = set()
        for repeated, _ in pairs:
            if repeated in seen:
                break
            seen.add(repeated)
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
