"""Refusals: one exception, one JSON shape, one list of reasons.

The shape is OpenAI's (`{"error": {"message", "type", "param", "code"}}`), with `"type": "error"` added for Anthropic's
clients. On their path the inner `type` is one of Anthropic's.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """The label of `kvstrata_gate_refusals_total`."""

    MALFORMED_HTTP = "malformed_http"
    PIPELINING = "pipelining"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    ENCODING = "encoding"
    NOT_FOUND = "not_found"
    METHOD = "method"
    UNAUTHENTICATED = "unauthenticated"
    MALFORMED_JSON = "malformed_json"
    FORBIDDEN_KEY = "forbidden_key"
    UNKNOWN_KEY = "unknown_key"
    BAD_VALUE = "bad_value"
    MODEL = "model"
    UNKNOWN_TENANT = "unknown_tenant"
    NO_POLICY = "no_policy"
    OVERLOADED = "overloaded"
    TENANT_OVERLOADED = "tenant_overloaded"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    PARSING = "parsing"
    CONNECTIONS = "too_many_connections"
    ENGINE = "engine"
    POLICY_CHANGED = "policy_changed"


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_PATH = b"/v1/messages"
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


@dataclass(eq=False)
class Refusal(Exception):  # noqa: N818  (it is an answer, not a fault)
    """A request that the gate answers itself. `param` names the offending key of the body, `retry_after_s` becomes a
    header, and `extra` are further lines of the head. `code` is the reason unless it is given."""

    status: int
    reason: Reason
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str = ""
    retry_after_s: int | None = None
    allow: str | None = None
    extra: bytes = b""

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.code = self.code or str(self.reason)

    def body(self, path: bytes = b"") -> bytes:
        if path.startswith(_ANTHROPIC_PATH):
            kind = _anthropic_type(self.status)
        else:
            kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return _envelope({"message": self.message, "type": kind, "param": self.param, "code": self.code})

    def headers(self) -> bytes:
        lines = self.extra
        if self.retry_after_s is not None:
            lines += b"Retry-After: %d\r\n" % self.retry_after_s
        if self.allow is not None:
            lines += b"Allow: %s\r\n" % self.allow.encode()
        if self.status == 401:
            lines += b'WWW-Authenticate: Bearer realm="kvstrata"\r\n'
        return lines


def engine_error(path: bytes, status: int, body: bytes) -> bytes:
    """Return an engine's error as the clients of `path` read it: Anthropic's in their envelope, others unchanged unless
    they are no JSON."""
    value: Any = None
    message = None
    with contextlib.suppress(ValueError):
        value = json.loads(body)
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        message = value.get("error", value)["message"]
    if not isinstance(message, str):
        message = f"the engine answered {status}"
    if not path.startswith(_ANTHROPIC_PATH):
        return body if isinstance(value, dict) else Refusal(status, Reason.ENGINE, message).body(path)
    return _envelope({"type": _anthropic_type(status), "message": message})


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _envelope(error: dict[str, str | None]) -> bytes:
    return json.dumps({"type": "error", "error": error}, ensure_ascii=False, separators=(",", ":")).encode()


def bad_request(reason: Reason, message: str, param: str | None = None) -> Refusal:
    return Refusal(400, reason, message, param=param)
