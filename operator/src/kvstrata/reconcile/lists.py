"""Lists of the watches, taken a page at a time.

kopf begins each watch with a list, and makes a task and several objects for every item of it: for thousands of them
that is most of what a start costs, and the same world would be listed and decoded once more by the operator. So kopf is
given an HTTP session of ours, which hands whole pages to the store and shows kopf empty lists; from the end of its list
on, a watch is kopf's alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import aiohttp
import kopf
import orjson

from kvstrata.clients.kube_auth import find_credentials
from kvstrata.clients.resources import Resource

log = logging.getLogger(__name__)

Take = Callable[[dict[str, Any]], None]


class Lists:
    """Takes the lists of `resources` in each of `namespaces` (none: cluster-wide) out of kopf's answers.

    `take` is called for each object, and `listed_anew` when a list begins that was begun before: what was deleted
    meanwhile is in no event. `complete` is set when all of them ended once.
    """

    def __init__(
        self,
        resources: Collection[Resource],
        namespaces: Collection[str],
        take: Take,
        listed_anew: Callable[[], None],
    ) -> None:
        self._resources = {resource.path(scope): resource for resource in resources for scope in namespaces or (None,)}
        self._take, self._listed_anew = take, listed_anew
        self._begun: set[str] = set()
        self._left = set(self._resources)
        self.complete = asyncio.Event()

    def page(self, url_path: str, first: bool, body: dict[str, Any]) -> None:
        """Take the objects of a page away from `body`; what cannot be taken is left for kopf to complain about."""
        resource = self._resources.get(url_path)
        items = body.get("items")
        if resource is None or not (items is None or isinstance(items, list)):
            return
        if first and url_path in self._begun:
            self._listed_anew()
        self._begun.add(url_path)
        body["items"] = [item for item in items or () if not self._taken(resource, item)]
        if not (body.get("metadata") or {}).get("continue"):
            self._left.discard(url_path)
            if not self._left:
                self.complete.set()

    def _taken(self, resource: Resource, item: Any) -> bool:
        try:
            item["apiVersion"], item["kind"] = resource.api_version, resource.kind
            self._take(item)
        except (AttributeError, KeyError, TypeError, ValueError):
            log.exception("an object of a list cannot be understood", extra={"kind": resource.kind})
            return False
        return True

    def response_class(self) -> type[aiohttp.ClientResponse]:
        """Return the class of a session's responses that brings lists here."""
        lists = self

        class Response(aiohttp.ClientResponse):
            """An answer to kopf."""

            async def json(self, **_: Any) -> Any:
                """Return the decoded body, without the objects of a list that was asked for."""
                decoded = await super().json(encoding="utf-8", loads=orjson.loads)
                if self.status == 200 and isinstance(decoded, dict):
                    lists.page(self.url.path, "continue" not in self.url.query, decoded)
                return decoded

        return Response

    def login(self) -> Callable[..., Awaitable[kopf.AiohttpSession | None]]:
        """Return kopf's login handler; it has nothing to offer while the credentials are those that were refused."""
        offered: list[tuple[str, dict[str, str]]] = []

        async def login(**_: Any) -> kopf.AiohttpSession | None:
            found = find_credentials()
            headers = dict(found.authorization())
            if (found.server, headers) in offered[-1:]:
                return None
            offered.append((found.server, headers))
            session = found.session(self.response_class(), connections=0, headers=headers)
            return kopf.AiohttpSession(server=found.server, aiohttp_session=session)

        return login
