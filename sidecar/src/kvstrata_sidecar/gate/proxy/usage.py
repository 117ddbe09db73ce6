"""Token counts of answers, and removal of a usage event that the caller did not ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

_MAX_HELD_BYTES = 1 << 20


@dataclass(slots=True)
class Usage:
    """Tokens of one request as reported by the engine; -1 if not reported."""

    prompt: int = -1
    completion: int = -1
    cached: int = -1

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


class DocumentUsage:
    """Reads the usage of a JSON answer, which is forwarded unchanged; a copy is kept up to 1 MiB."""

    __slots__ = ("_held", "_size", "usage")

    def __init__(self) -> None:
        self.usage = Usage()
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        self._size += len(data)
        if self._size <= _MAX_HELD_BYTES:
            self._held.append(data)
        else:
            self._held.clear()
        return data

    def end(self) -> bytes:
        """Read the usage of the whole document; nothing is left to forward."""
        if self._held:
            try:
                self.usage.take(orjson.loads(b"".join(self._held)).get("usage"))
            except (orjson.JSONDecodeError, AttributeError):
                pass
        return b""


class EventUsage:
    """Reads usage from server-sent events. With `strip`, removes the event that holds usage and no choices. Whole
    events are forwarded as they come; an unfinished one is held back."""

    __slots__ = ("_held", "_strip", "usage")

    def __init__(self, strip: bool) -> None:
        self.usage = Usage()
        self._strip = strip
        self._held = b""

    @property
    def holds_back(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        if not self._held and data.endswith(b"\n\n"):
            return self._read(data) if b'"usage"' in data else data
        if self._held:
            data = self._held + data
            self._held = b""
        last = data.rfind(b"\n\n")
        end = last + 2 if last >= 0 else 0
        if len(data) - end <= _MAX_HELD_BYTES:
            self._held = data[end:]
            data = data[:end]
        if b'"usage"' not in data:
            return data
        return self._read(data)

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _read(self, data: bytes) -> bytes:
        kept: list[bytes] = []
        for event in data.split(b"\n\n"):
            if b'"usage"' in event and self._is_surplus(event):
                continue
            kept.append(event)
        return b"\n\n".join(kept)

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
        self.usage.take(usage)
        return self._strip and usage is not None and document.get("choices") == []


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
