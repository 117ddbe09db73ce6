"""Looks on at erasures with nothing of the operator's: what CacheInvalidations say, by a watch of its own, and what is
so in Redis, in pods' memory and files, in gates' policies and in Secrets.

A condition that is True stands for a fact that holds since before. So whatever is read after the condition was seen has
to agree; what does not is kept as a contradiction. Steps of the erasures are held for seconds each: a condition that
came a step too early would stand beside what belies it for as long.
"""

from __future__ import annotations

import base64
import http
import http.client
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

LOOK_EVERY_S = 0.25
RETRY_S = 0.2

Fact = Callable[[str], str | None]
"""What belies a condition, given the receipt's digest in the status; empty if nothing does. None: nobody can look
now."""


@dataclass(slots=True)
class Sight:
    """What was seen of one erasure: what is True now, what ever was, facts that were seen to be otherwise."""

    facts: Mapping[str, Fact]
    now: frozenset[str] = frozenset()
    digest: str = ""
    ever: set[str] = field(default_factory=set)
    otherwise: set[str] = field(default_factory=set)
    confirmed: set[str] = field(default_factory=set)
    contradictions: list[str] = field(default_factory=list)


class Observer:
    """Watches the CacheInvalidations of all namespaces, and looks at the facts of those that it was told of."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        self._server = urlsplit(config["clusters"][0]["cluster"]["server"])
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._tls = ssl.create_default_context(cadata=_text(cluster, "certificate-authority"))
        folder = kubeconfig.parent
        certificate, key = folder / "observer.crt", folder / "observer.key"
        certificate.write_text(_text(user, "client-certificate"))
        key.write_text(_text(user, "client-key"))
        self._tls.load_cert_chain(certificate, key)
        self._sights: dict[str, Sight] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._watch, self._look)]
        self.problems: list[str] = []

    def __enter__(self) -> Observer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(20)

    def attend(self, namespace: str, facts: Mapping[str, Fact]) -> Sight:
        """Look from now on at the only invalidation of a namespace, by what each condition stands for."""
        sight = Sight(facts)
        for condition, fact in facts.items():
            self._compare(sight, condition, fact)
        with self._lock:
            self._sights[namespace] = sight
        return sight

    def _watch(self) -> None:
        while not self._over.is_set():
            # A watch that ends begins anew with all that there is.
            try:
                self._follow()
            except (OSError, http.client.HTTPException):
                continue
            except Exception as error:  # whatever it is, the test shows it
                self.problems.append(f"the watch: {error!r}")
            self._over.wait(RETRY_S)

    def _follow(self) -> None:
        host, port = str(self._server.hostname), self._server.port
        connection = http.client.HTTPSConnection(host, port, context=self._tls, timeout=5)
        try:
            connection.request("GET", "/apis/kvstrata.io/v1alpha1/cacheinvalidations?watch=1&timeoutSeconds=240")
            answer = connection.getresponse()
            while answer.status == http.HTTPStatus.OK and not self._over.is_set() and (line := answer.readline()):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                self._hear(event["object"])
        finally:
            connection.close()

    def _hear(self, found: Mapping[str, Any]) -> None:
        status = found.get("status") or {}
        with self._lock:
            sight = self._sights.get(found.get("metadata", {}).get("namespace", ""))
            if sight is None:
                return
            sight.now = frozenset(one["type"] for one in status.get("conditions") or () if one["status"] == "True")
            sight.digest = status.get("receiptDigest") or ""
            sight.ever |= sight.now

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            with self._lock:
                sights = dict(self._sights)
            for namespace, sight in sights.items():
                for condition, fact in sight.facts.items():
                    try:
                        self._compare(sight, condition, fact)
                    except Exception as error:  # whatever it is, the test shows it
                        self.problems.append(f"{namespace}: {condition}: {error!r}")

    def _compare(self, sight: Sight, condition: str, fact: Fact) -> None:
        with self._lock:
            stands, digest = condition in sight.now, sight.digest  # before the fact is looked at
        belied = fact(digest)
        if belied:
            sight.otherwise.add(condition)
            if stands:
                sight.contradictions.append(f"{condition} was True, and {belied}")
        elif belied is not None and stands:
            sight.confirmed.add(condition)


def _text(section: Mapping[str, str], name: str) -> str:
    if f"{name}-data" in section:
        return base64.b64decode(section[f"{name}-data"]).decode()
    return Path(section[name]).read_text()
