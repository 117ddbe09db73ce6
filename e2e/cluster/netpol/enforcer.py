"""Keep nftables in step with the API server.

One thread per kind holds a watch and only signals that something changed; the main loop then lists everything and
replaces the table in one transaction, at most a few times a second. Listing again instead of applying events means that
no missed event can leave a wrong rule behind for longer than a watch lives.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from e2e.cluster.netpol.rules import TABLE, ruleset

PODS = "/api/v1/pods"
NAMESPACES = "/api/v1/namespaces"
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"

COALESCE_S = 0.1
RETRY_S = 0.5
WATCH_S = 60
MAX_IDLE_S = 30.0


class ApiServer:
    """The few requests that the enforcer makes, with the credentials of a JSON kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        server = urllib.parse.urlsplit(cluster["server"])
        self._host, self._port = server.hostname or "", server.port or 443
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._context = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(base64.b64decode(user["client-certificate-data"]))
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            self._context.load_cert_chain(pair.name)

    def list(self, path: str) -> Any:
        """The list object at ``path``. Raises OSError when the answer is no list."""
        connection = self._connect(timeout_s=10)
        try:
            return json.loads(self._open(connection, path).read())
        finally:
            connection.close()

    def watch(self, path: str, resource_version: str, changed: threading.Event) -> None:
        """Set ``changed`` at every event after ``resource_version``; return when the server ends the watch."""
        connection = self._connect(timeout_s=WATCH_S + 10)
        try:
            query = f"?watch=1&timeoutSeconds={WATCH_S}&resourceVersion={resource_version}"
            answer = self._open(connection, path + query)
            while answer.readline():
                changed.set()
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, context=self._context, timeout=timeout_s)

    @staticmethod
    def _open(connection: http.client.HTTPSConnection, path: str) -> http.client.HTTPResponse:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"GET {path}: {answer.status} {answer.read(200)!r}")
        return answer


def run(kubeconfig: Path) -> None:
    """Enforce without end. Errors of the API server and of nft are printed, and the update is tried again."""
    api = ApiServer(kubeconfig)
    changed = threading.Event()
    for path in (PODS, NAMESPACES, POLICIES):
        threading.Thread(target=_watch_for_ever, args=(api, path, changed), daemon=True).start()
    applied = ""
    while True:
        changed.wait(MAX_IDLE_S)
        time.sleep(COALESCE_S)
        changed.clear()
        try:
            started = time.monotonic()
            wanted = ruleset(*(api.list(path)["items"] for path in (PODS, NAMESPACES, POLICIES)))
            if wanted != applied:
                _replace_table(wanted)
                applied = wanted
                print(f"{time.strftime('%T')} applied in {time.monotonic() - started:.3f} s", flush=True)
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"{time.strftime('%T')} {error}; trying again", flush=True)
            changed.set()
            time.sleep(RETRY_S)


def _watch_for_ever(api: ApiServer, path: str, changed: threading.Event) -> None:
    while True:
        try:
            listed = api.list(f"{path}?limit=1")
            changed.set()
            api.watch(path, listed["metadata"]["resourceVersion"], changed)
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"{time.strftime('%T')} watch of {path}: {error}; trying again", flush=True)
            time.sleep(RETRY_S)


def _replace_table(wanted: str) -> None:
    """Replace the whole table in one transaction: no packet ever meets half a table."""
    transaction = f"table inet {TABLE} {{}}\ndelete table inet {TABLE}\n{wanted}"
    finished = subprocess.run(["nft", "-f", "-"], input=transaction, text=True, capture_output=True, check=False)
    if finished.returncode != 0:
        raise OSError(f"nft refused the table: {finished.stderr.strip()[:1000]}")
