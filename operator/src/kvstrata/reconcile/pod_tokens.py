"""Whose word an answer is: the API server says to which pod the token in it is bound."""

from __future__ import annotations

import hashlib
import time

from kvstrata.clients.kube import Kube
from kvstrata.contract.messages.pod_state import ACK_AUDIENCE
from kvstrata.model.pods import Pod
from kvstrata.objects import names

TOKEN_CACHE_S = 60.0


class PodTokens:
    """Reviews the tokens that gates send with their answers."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[str, tuple[float, str, str]] = {}

    async def doubt(self, namespace: str, pod: Pod, token: str) -> str | None:
        """Return why a token is not that of `pod`, or None. Raises KubeError if the API server cannot tell."""
        username, bound_to = await self._identity(token)
        if username != f"system:serviceaccount:{namespace}:{names.model_child(pod.model)}":
            return "WrongAccount"
        if bound_to != pod.uid:
            return "ForeignToken"
        return None

    async def _identity(self, token: str) -> tuple[str, str]:
        """Return whose token this is, asking the API server at most once a minute for each token."""
        now = time.monotonic()
        digest = hashlib.sha256(token.encode()).hexdigest()
        cached = self._known.get(digest)
        if cached and cached[0] > now:
            return cached[1], cached[2]
        identity = await self._kube.review_token(token, ACK_AUDIENCE)
        if identity is None:
            return "", ""
        self._known = {d: entry for d, entry in self._known.items() if entry[0] > now}
        self._known[digest] = (now + TOKEN_CACHE_S, identity.username, identity.pod_uid)
        return identity.username, identity.pod_uid
