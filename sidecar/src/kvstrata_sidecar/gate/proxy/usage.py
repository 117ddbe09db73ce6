"""Token counts of answers, and removal of reports that callers must not get: a usage event that only the gate asked
for, and cached tokens of several sequences, of which the engine reports those of one.

Answers are read while they pass, regardless of their size.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

_MAX_HELD_BYTES = 1 << 20
_MAX_USAGE_BYTES = 4096
_USAGE = re.compile(rb'(?<!\\)"usage"\s{0,8}:\s{0,8}(?=\{)')
_OVERLAP_BYTES = 32
"""More than a match of `_USAGE` is long."""

_DETAILS = re.compile(rb'"prompt_tokens_details"\s{0,8}:\s{0,8}\{[^{}]{2,256}(?:\{[^{}]{0,256}\}[^{}]{0,256})?\}')
_DETAILS_BYTES = 1024
"""More than a match of `_DETAILS` is long."""


def without_details(data: bytes) -> bytes:
    """Return a piece of JSON with null for details of prompt tokens, padded: an answer keeps its length. Strings cannot
    pass for them, because quotes in strings are escaped."""
    return _DETAILS.sub(lambda found: b'"prompt_tokens_details":null'.ljust(len(found[0])), data)


@dataclass(slots=True)
class Usage:
    """Tokens of one request as reported by the engine; -1 if not reported."""

    prompt: int = -1
    completion: int = -1
    cached: int = -1

    @property
    def is_known(self) -> bool:
        """Whether tokens of the prompt and of the answer were reported."""
        return self.prompt >= 0 and self.completion >= 0

    def take(self, raw: Any) -> None:
        """Read a `usage` object of OpenAI or Anthropic; absent counts are kept."""
        if not isinstance(raw, dict):
            return
        details = raw.get("prompt_tokens_details")
        cached = raw.get("cache_read_input_tokens")
        if isinstance(details, dict):
            cached = details.get("cached_tokens")
        prompt = raw.get("prompt_tokens")
        if prompt is None and raw.get("input_tokens") is not None:
            # Anthropic counts cached tokens apart from the input.
            prompt = raw["input_tokens"] + (cached or 0) + (raw.get("cache_creation_input_tokens") or 0)
        self.prompt = _count(prompt, self.prompt)
        self.completion = _count(raw.get("completion_tokens", raw.get("output_tokens")), self.completion)
        self.cached = _count(cached, self.cached)


@dataclass(slots=True, eq=False)
class DocumentUsage:
    """Reads the usage of a JSON answer: the last object under the key `usage`. Generated text cannot pass for it,
    because quotes in strings are escaped, and a tool's input comes before it. `_found` is the beginning of the document
    from the last such object on. `is_final`: the whole answer's was read. An answer of `several` sequences is forwarded
    without details of its prompt's tokens, any other unchanged."""

    several: bool = False
    usage: Usage = field(default_factory=Usage)
    events: int = 0
    is_final: bool = False
    _found: bytes = b""
    _tail: bytes = b""
    _held: bytes = b""

    def feed(self, data: bytes) -> bytes:
        window = self._tail + data
        # A match at the first byte of a full overlap was seen before, together with the byte before it.
        starts = [match.end() for match in _USAGE.finditer(window, len(self._tail) == _OVERLAP_BYTES)]
        if starts:
            self._found = window[starts[-1] : starts[-1] + _MAX_USAGE_BYTES]
        elif self._found:
            self._found += data[: _MAX_USAGE_BYTES - len(self._found)]
        self._tail = window[-_OVERLAP_BYTES:]
        if not self.several:
            return data
        data = without_details(self._held + data)
        self._held = data[-_DETAILS_BYTES:]
        return data[:-_DETAILS_BYTES]

    def end(self) -> bytes:
        """Read the usage of the whole document; return the part that is not forwarded yet."""
        with contextlib.suppress(ValueError):
            found, _ = json.JSONDecoder().raw_decode(self._found.decode("utf-8", "replace"))
            self.usage.take(found)
            self.is_final = self.usage.is_known
        return self._held


@dataclass(slots=True, eq=False)
class EventUsage:
    """Reads usage from server-sent events. With `strip`, removes the event that holds usage and no choices. Whole
    events are forwarded as they come, of `several` sequences without those details; an unfinished one is `held` back.
    `is_final`: the usage of the whole answer was read; earlier reports of a stream are of its beginning."""

    strip: bool
    several: bool = False
    usage: Usage = field(default_factory=Usage)
    events: int = 0
    is_final: bool = False
    held: bytes = b""

    def feed(self, data: bytes) -> bytes:
        self.events += data.count(b"\n\n")
        if not self.held and data.endswith(b"\n\n"):
            return self._read(data)
        data, self.held = self.held + data, b""
        whole, end, unfinished = data.rpartition(b"\n\n")
        if len(unfinished) <= _MAX_HELD_BYTES:
            data, self.held = whole + end, unfinished
        return self._read(data)

    def end(self) -> bytes:
        self.is_final = self.usage.is_known
        held, self.held = self.held, b""
        return held

    def _read(self, data: bytes) -> bytes:
        if b'"usage"' not in data:
            return data
        events = data.split(b"\n\n")
        data = b"\n\n".join(event for event in events if b'"usage"' not in event or not self._is_surplus(event))
        return without_details(data) if self.several else data

    def _is_surplus(self, event: bytes) -> bool:
        start = event.find(b"data:")
        try:
            document = orjson.loads(event[start + 5 :])
        except orjson.JSONDecodeError:
            return False
        if start < 0 or not isinstance(document, dict):
            return False
        usage = document.get("usage")
        if usage is None and isinstance(document.get("message"), dict):
            usage = document["message"].get("usage")
            # Anthropic's first event: its count of the answer is a beginning.
            usage = {**usage, "output_tokens": None} if isinstance(usage, dict) else usage
        self.usage.take(usage)
        ending = document.get("choices") == [] or document.get("type") == "message_delta"
        self.is_final = self.is_final or (ending and self.usage.is_known)
        return self.strip and usage is not None and document.get("choices") == []


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
