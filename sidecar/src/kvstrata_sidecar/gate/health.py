"""The pod's own pages for kubelet and Prometheus: /livez, /readyz, /metrics. Nothing secret, no TLS."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.http.messages import Connection, Limits, Request

LIMITS = Limits(body_bytes=0, head_s=5.0, body_s=5.0, idle_s=5.0, stalled_write_s=5.0)
"""Of a port without authentication that kubelet must always get through to: nobody keeps a connection for long."""


class HealthService:
    """Live while the event loop turns; ready when `not_ready` has nothing to say."""

    def __init__(self, not_ready: Callable[[], str], metrics_page: Callable[[], bytes]) -> None:
        self._not_ready = not_ready
        self._metrics_page = metrics_page

    def check_head(self, request: Request) -> None:
        """Refuse everything but a GET of the three pages."""
        if request.path not in (b"/livez", b"/readyz", b"/metrics"):
            raise Refusal(404, Reason.NOT_FOUND, "the pages here are /livez, /readyz and /metrics")
        if request.method != b"GET":
            raise Refusal(405, Reason.METHOD, "use GET here", allow="GET")

    def serve(self, request: Request, connection: Connection) -> None:
        """Answer in plain text; readiness says what is missing."""
        if request.path == b"/livez":
            connection.reply(200, b"ok\n", b"text/plain")
        elif request.path == b"/readyz":
            missing = self._not_ready()
            connection.reply(503 if missing else 200, (missing or "ok").encode() + b"\n", b"text/plain; charset=utf-8")
        else:
            connection.reply(200, self._metrics_page(), b"text/plain; version=0.0.4; charset=utf-8")

    def refused(self, request: Request, refusal: Refusal) -> None:
        """Nothing to note."""
