"""Kubernetes Events about objects, written once; no caller depends on them."""

from __future__ import annotations

import logging
import secrets

from kvstrata.api.base import Resource
from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import EVENT
from kvstrata.model.refs import GROUP_VERSION

from .background import utc_now

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 1024
COMPONENT = "kvstrata"


class Events:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def publish(self, about: Resource, reason: str, message: str, *, warning: bool = False) -> None:
        at = format_timestamp(utc_now())
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{about.name}.{secrets.token_hex(8)}", "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": GROUP_VERSION,
                "kind": about.INFO.kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:MAX_MESSAGE_CHARACTERS],
            "source": {"component": COMPONENT},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._kube.create(EVENT, about.namespace, body)
        except KubeError as error:
            log.warning("an event was not taken", extra={"event": reason, "about": about.name, "error": str(error)})
