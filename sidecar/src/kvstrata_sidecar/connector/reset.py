"""The engine's endpoint that empties its prefix cache.

    --middleware kvstrata_sidecar.connector.reset.EngineReset

`POST /kvstrata/reset` is answered by 200 with `{"success": …}`, by 501 if this engine cannot; `?preempt` recomputes
running requests. vLLM has such an endpoint in development mode only, together with others that execute code.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvstrata_sidecar.output import shorten_keyspaces
from kvstrata_sidecar.upstream.prefix_cache import reset_of

from .failures import logger

ENGINE_RESET_PATH = "/kvstrata/reset"
PREEMPT = "preempt"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class EngineReset:
    """ASGI middleware of vLLM's API server; other paths pass through."""

    def __init__(self, app: App) -> None:
        shorten_keyspaces()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ENGINE_RESET_PATH:
            await self._app(scope, receive, send)
            return
        status, answer = (405, {}) if scope["method"] != "POST" else await _reset(scope)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _reset(scope: Scope) -> tuple[int, dict[str, Any]]:
    """Return status and answer; the status is 503 if the engine failed."""
    reset = reset_of(scope["app"])
    if reset is None:
        return 501, {"error": "this engine has no prefix cache to reset"}
    try:
        done = await reset(scope.get("query_string") == PREEMPT.encode())
    except TypeError:
        return 501, {"error": "this engine's version resets its prefix cache in another way"}
    except Exception as error:
        # While requests wait for blocks from elsewhere, the engine raises and continues.
        logger.warning("The prefix cache was not reset: %s", type(error).__name__)
        return 503, {"error": "the engine failed to reset its prefix cache"}
    if not isinstance(done, bool):
        return 501, {"error": "this engine's version does not report whether it reset its prefix cache"}
    return 200, {"success": done}
