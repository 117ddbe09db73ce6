"""Request ids and trace context: from a caller's head to the answer, the audit log and the engine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

_REQUEST_ID = re.compile(rb"[0-9A-Za-z._-]{1,128}")
_TRACE_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_KEY = rb"[a-z0-9][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}"
_TRACE_VALUE = rb"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACE_MEMBER = re.compile(rb"(?:%s)=%s" % (_TRACE_KEY, _TRACE_VALUE))


def request_id(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the caller's `x-request-id`; a random one for none, a malformed one, and one that is the caller's key."""
    given = headers.get(b"x-request-id", b"").strip()
    keys = b" ".join((headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))).split()
    return given if _REQUEST_ID.fullmatch(given) and given not in keys else secrets.token_hex(16).encode()


def engine_lines(request_id: bytes, headers: Mapping[bytes, bytes]) -> bytes:
    """Return lines of a head for the engine. Its ids are shared by all tenants, so each gets a random end."""
    return b"X-Request-Id: %b-%b\r\n%b" % (request_id, secrets.token_hex(8).encode(), _trace_lines(headers))


def _trace_lines(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the caller's trace context as lines of a head, without a header that is malformed and without a
    `tracestate` that has no `traceparent`: https://www.w3.org/TR/trace-context/."""
    parent, state = headers.get(b"traceparent", b""), headers.get(b"tracestate", b"")
    if _TRACE_PARENT.fullmatch(parent) is None:
        return b""
    lines = b"traceparent: %s\r\n" % parent
    members = [member for part in state.split(b",") if (member := part.strip(b" \t"))]
    if len(state) > 512 or not 0 < len(members) <= 32:
        return lines
    if not all(map(_TRACE_MEMBER.fullmatch, members)):
        return lines
    return lines + b"tracestate: %s\r\n" % b",".join(members)
