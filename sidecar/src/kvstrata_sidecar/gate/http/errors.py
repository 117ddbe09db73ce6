"""Refusals: one exception, one JSON shape, one list of reasons.

The shape is OpenAI's (`{"error": {"message", "type", "param", "code"}}`), with `"type": "error"` added for Anthropic's
clients.
"""

from __future__ import annotations

import json
from enum import StrEnum


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
    CONNECTIONS = "too_many_connections"
    ENGINE = "engine"
    POLICY_CHANGED = "policy_changed"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Refusal(Exception):  # noqa: N818  (it is an answer, not a fault)
    """A request that the gate answers itself. `param` names the offending key of the body, `retry_after_s` becomes a
    header."""

    def __init__(
        self,
        status: int,
        reason: Reason,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.param = param
        self.code = code or str(reason)
        self.retry_after_s = retry_after_s
        self.allow = allow

    def body(self) -> bytes:
        """Return the JSON answer; Anthropic's clients need the top-level `type`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"type": "error", "error": error}, ensure_ascii=False, separators=(",", ":")).encode()

    def headers(self) -> bytes:
        lines = b""
        if self.retry_after_s is not None:
            lines += b"Retry-After: %d\r\n" % self.retry_after_s
        if self.allow is not None:
            lines += b"Allow: %s\r\n" % self.allow.encode()
        if self.status == 401:
            lines += b'WWW-Authenticate: Bearer realm="kvstrata"\r\n'
        return lines


def bad_request(reason: Reason, message: str, param: str | None = None) -> Refusal:
    return Refusal(400, reason, message, param=param)
