"""The operator's HTTP server: health and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

Check = Callable[[], str | None]
"""Returns what is wrong, or None."""


def build_app(alive: Mapping[str, Check], ready: Mapping[str, Check]) -> web.Application:
    """Return an application with /livez, /readyz and /metrics; a failing check is named in a 503."""
    app = web.Application()

    def serve(checks: Mapping[str, Check]) -> Callable[[web.Request], web.Response]:
        def answer(_: web.Request) -> web.Response:
            problems = {name: problem for name, check in checks.items() if (problem := check())}
            text = "".join(f"{name}: {problem}\n" for name, problem in problems.items()) or "ok\n"
            return web.Response(text=text, status=503 if problems else 200)

        return answer

    async def livez(request: web.Request) -> web.Response:
        return serve(alive)(request)

    async def readyz(request: web.Request) -> web.Response:
        return serve(ready)(request)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
