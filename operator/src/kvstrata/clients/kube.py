"""Client of the API server: requests by kubernetes.aio, answers as dictionaries, which cost a tenth of its models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio.client.api_client import ApiClient
from yarl import URL

from kvstrata.clients.kube_auth import authorization, find_api
from kvstrata.clients.resources import DEPLOYMENT, NAMESPACE, POD, TOKEN_REVIEW, Resource

REQUEST_TIMEOUT_S = 15.0
UNBOUNDED = aiohttp.ClientTimeout(total=None)
"""Requests are bounded by asyncio.timeout: aiohttp enters its own timer twice for each request, and a cancellation that
meets its end is lost."""

LIST_PAGE = 500
REVIEWS = TOKEN_REVIEW.path(None)  # a question that is asked by POST
NO_VERSION = "1"
"""A resourceVersion that no object has: an apply with it creates, or is a conflict. The API server compares it with
an existing object's version and ignores it where there is none; the Java Operator SDK relies on that, too."""

_REASONS = {status.value: status.phrase.title().replace(" ", "") for status in HTTPStatus if status >= 400}
"""Reasons for answers without one, which proxies or an overloaded API server send (`TooManyRequests`)."""
_NAMESPACE_ENDS = "NamespaceTerminating"
_NOT_OF_ITS_TYPE = "failed to create typed patch object"
"""Sent with status 500, for duplicate keys in a list or a field of the wrong type."""


class NotLeadingError(RuntimeError):
    """A write was attempted after the Lease was lost, or a served namespace was handed over."""


class KubeError(Exception):
    """`status` is 0 without an answer; `causes` are the machine-readable reasons."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        causes: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.causes = causes

    @property
    def is_conflict(self) -> bool:
        """Whether another writer was faster, or the object exists already."""
        return self.status == 409

    @property
    def is_refusal(self) -> bool:
        """Whether the request is invalid, not allowed, or above a quota."""
        return self.status in (400, 403, 422) or self.message.startswith(_NOT_OF_ITS_TYPE)

    @property
    def is_not_found(self) -> bool:
        """Whether there is no such object, or its kind is not installed."""
        return self.status == 404

    @property
    def is_of_ending_namespace(self) -> bool:
        return self.status == 403 and _NAMESPACE_ENDS in self.causes


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """The service account's user name, and the UID of the pod that the token is bound to, or empty."""

    username: str
    pod_uid: str


class Kube:
    """A client for one API server. Every call may raise KubeError, and each that writes NotLeadingError: `may_write`
    is asked when a request is given to the HTTP client, after all that was awaited to make it. So a leader that was
    frozen or replaced sends only requests that were given before: that waited for a connection, or are repeated because
    theirs broke. Each names the state that it was made for: a resourceVersion, or in applies and deletions the UID."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self.may_write: Callable[[], bool] = lambda: True

    @classmethod
    async def connect(cls) -> Kube:
        return cls(await find_api())

    def require_lead(self) -> None:
        if not self.may_write():
            raise NotLeadingError("this process no longer leads and must not write")

    async def close(self) -> None:
        await self._api.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[str, Any]:
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        return _decoded(await self._answer(method, path, headers, query, body, timeout_s))

    async def container_log(self, namespace: str, pod: str, container: str, limit_bytes: int) -> bytes:
        """Return a container's output on both its streams, at most `limit_bytes`."""
        query = {"container": container, "limitBytes": str(limit_bytes)}
        return await self._answer("GET", POD.path(namespace, pod, "log"), {"Accept": "*/*"}, query)

    async def _answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> bytes:
        configuration = self._api.configuration
        url = URL(f"{configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""), encoded=True)
        try:
            async with asyncio.timeout(timeout_s):
                sent = {**headers, **await authorization(configuration)}
                if method != "GET" and path != REVIEWS:
                    self.require_lead()
                answer = await self._api.call_api(method, url, sent, body, _request_timeout=UNBOUNDED)
                data = await answer.read()
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise KubeError(0, type(error).__name__, "the API server did not answer") from error
        if 200 <= answer.status <= 299:
            return bytes(data)
        raise _refusal(answer.status, data, answer.headers.get("Retry-After"))

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any] | None:
        """Return an object by a quorum read, or None."""
        try:
            return await self.request("GET", resource.path(namespace, name))
        except KubeError as error:
            if error.is_not_found:
                return None
            raise

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield every object of a collection, page by page, with apiVersion and kind added."""
        chosen = {"limit": str(LIST_PAGE), "labelSelector": label_selector, "fieldSelector": field_selector}
        query = {name: value for name, value in chosen.items() if value}
        while True:
            page = await self.request("GET", resource.path(namespace), query=query, timeout_s=60)
            items = page.get("items")
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                # Read as an empty list, it would mean that every object is gone.
                raise KubeError(0, "BadAnswer", "the API server's answer is no list of objects")
            for item in items:
                item["apiVersion"], item["kind"] = resource.api_version, resource.kind
                yield item
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises KubeError with `is_conflict` when the object exists."""
        return await self.request("POST", resource.path(namespace), body=body)

    async def replace(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Conditional when `body` carries a resourceVersion."""
        return await self.request("PUT", resource.path(namespace, body["metadata"]["name"]), body=body)

    async def apply(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], field_manager: str, uid: str | None
    ) -> dict[str, Any]:
        """Server-side apply, taking over fields of other managers. Changes the object with this UID, or creates one
        if it is None. Raises KubeError with `is_conflict` when the name belongs to another object, or to none."""
        metadata = {**body["metadata"], **({"uid": uid} if uid else {"resourceVersion": NO_VERSION})}
        try:
            return await self.request(
                "PATCH",
                resource.path(namespace, metadata["name"]),
                query={"fieldManager": field_manager, "force": "true"},
                body={**body, "metadata": metadata},
                content_type="application/apply-patch+yaml",
            )
        except KubeError as error:
            if f'metadata.uid: Invalid value: "{uid}"' in error.message:
                # The API server reports another UID as a change of an immutable field.
                raise KubeError(HTTPStatus.CONFLICT, "Conflict", error.message) from error
            raise

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any], resource_version: str
    ) -> dict[str, Any]:
        """Merge into an object's status if it is still at `resource_version`; None removes a field."""
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        return await self._merge(resource.path(namespace, name, "status"), "kvstrata-status", body)

    async def set_finalizers(
        self, resource: Resource, namespace: str, name: str, finalizers: Sequence[str], resource_version: str
    ) -> dict[str, Any]:
        """Set an object's finalizers if it is still at `resource_version`: other controllers may have set theirs."""
        body = {"metadata": {"resourceVersion": resource_version, "finalizers": list(finalizers)}}
        return await self._merge(resource.path(namespace, name), "kvstrata-finalizer", body)

    async def scale(self, namespace: str, deployment: str, replicas: int) -> None:
        """Set the replicas of a Deployment; does nothing if it is gone."""
        try:
            body = {"spec": {"replicas": replicas}}
            await self._merge(DEPLOYMENT.path(namespace, deployment, "scale"), "kvstrata-uninstall", body)
        except KubeError as error:
            if not error.is_not_found:
                raise

    async def _merge(self, path: str, manager: str, body: Mapping[str, Any]) -> dict[str, Any]:
        merge = "application/merge-patch+json"
        return await self.request("PATCH", path, query={"fieldManager": manager}, body=body, content_type=merge)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, version: str | None = None) -> None:
        """Delete the object with this UID, if it is there. If it is not at `version`, if given, that is a conflict."""
        body = {"preconditions": {"uid": uid, "resourceVersion": version}, "propagationPolicy": "Background"}
        try:
            await self.request("DELETE", resource.path(namespace, name), body=body)
        except KubeError as error:
            if not (error.is_not_found or (error.is_conflict and version is None)):
                raise

    async def is_ending(self, namespace: str) -> bool:
        """Whether a namespace is being deleted, or gone; False without the right to read it."""
        try:
            found = await self.request("GET", NAMESPACE.path(None, namespace))
        except KubeError as error:
            if error.is_not_found or error.is_refusal:
                return error.is_not_found
            raise
        return "deletionTimestamp" in found["metadata"]

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        """Return the token's identity, or None if it is not valid for `audience`."""
        spec = {"token": token, "audiences": [audience]}
        review = {"apiVersion": TOKEN_REVIEW.api_version, "kind": TOKEN_REVIEW.kind, "spec": spec}
        answer = await self.request("POST", TOKEN_REVIEW.path(None), body=review)
        status = answer.get("status") or {}
        if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
            return None
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        return TokenIdentity(user.get("username", ""), "".join(extra.get("authentication.kubernetes.io/pod-uid") or ()))


def _decoded(data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        decoded = orjson.loads(data)
    except ValueError as error:
        raise KubeError(0, "BadAnswer", f"the API server's answer is no JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise KubeError(0, "BadAnswer", "the API server's answer is no object")
    return decoded


def _refusal(status: int, data: bytes, retry_after: str | None) -> KubeError:
    reason, message, causes = _REASONS.get(status, "Unknown"), "", frozenset[str]()
    try:
        raw = orjson.loads(data)
        reason, message, causes = raw.get("reason") or reason, _in_order(raw) or message, _causes(raw)
    except (ValueError, AttributeError):
        message = data[:200].decode("utf-8", "replace")
    try:
        wait_s = float(retry_after or "nan")
    except ValueError:
        wait_s = math.nan
    return KubeError(status, reason, message, wait_s if 0 <= wait_s < math.inf else None, causes)


def _causes(raw: Any) -> frozenset[str]:
    try:
        return frozenset(str(cause["reason"]) for cause in raw["details"]["causes"])
    except (KeyError, TypeError):
        return frozenset()


def _in_order(raw: Any) -> str:
    """Return a refusal's message with its causes sorted. The API server lists some in the random order of a Go map,
    which would change a status each time."""
    message = str(raw.get("message") or "")
    if message.startswith(_NOT_OF_ITS_TYPE):
        first, *rest = message.splitlines()
        return "\n".join((first, *sorted(rest)))
    head, bracket, listed = message.partition(": [")
    try:
        causes = raw["details"]["causes"]
        texts = ", ".join(sorted({f"{cause['field']}: {cause['message']}" for cause in causes}))
    except (KeyError, TypeError):
        return message
    same = bracket and sorted(f"{texts}]") == sorted(listed)
    return f"{head}: [{texts}]" if same else message
