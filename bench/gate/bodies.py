"""The requests of the benchmark: chats of a given size, as OpenAI's clients send them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MODEL = "tiny"
PATH = "/v1/chat/completions"
_TURN_BYTES = 1000
_TEXT = (
    'The cache holds data the engine has computed before; a "prefix" that comes again is read and not computed.\n'
    "Zwei Mandanten teilen sich nichts, solange ihre Schlüssel verschieden sind: 2 · 64 blocks, 0.5 s, 100 %.\n"
    "def block(tokens: list[int]) -> bytes:\n\treturn digest(previous + pack(tokens))\n"
)


def chat(size_bytes: int, **fields: Any) -> dict[str, Any]:
    """Return a chat of turns of about 1 kB, `size_bytes` long once encoded (within a few bytes)."""
    messages: list[Mapping[str, str]] = []
    body = {"model": MODEL, "messages": messages, "max_tokens": 64, "temperature": 0.7, **fields}
    while (missing := size_bytes - len(encode(body))) > 0:
        role = "user" if len(messages) % 2 == 0 else "assistant"
        text = (_TEXT * (min(missing, _TURN_BYTES) // len(_TEXT) + 1))[: max(1, min(missing - 40, _TURN_BYTES))]
        messages.append({"role": role, "content": text})
    return body


def encode(body: Mapping[str, Any]) -> bytes:
    """Return the body as the usual clients write it: compact UTF-8."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def post(body: Mapping[str, Any], key: str) -> bytes:
    """Return the whole request, with the headers of a usual client."""
    data = encode(body)
    return head(key, len(data)) + data


def head(key: str, length: int, path: str = PATH) -> bytes:
    """Return the head of a request with a body of `length` bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: llm.example\r\nAccept: application/json\r\nAccept-Encoding: identity\r\n"
        f"User-Agent: OpenAI/Python 2.54.0\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()
