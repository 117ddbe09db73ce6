"""Receipts and public keys out of a cluster, by kubectl: the caller's own rights and ways to log in."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.receipt.record import ReceiptError
from kvstrata.objects import labels, names
from kvstrata.objects.erasure.receipts import read_receipt_objects

TIMEOUT_S = 120


class StoreError(Exception):
    """kubectl is not there, or says no."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where receipts are: the operator's namespace, by kubectl's context and configuration, None for its own."""

    namespace: str
    context: str | None = None
    kubeconfig: str | None = None

    def get(self, *arguments: str) -> Any:
        """Return what `kubectl get` gives as JSON. Raises StoreError with its complaint."""
        flags = [f"--namespace={self.namespace}"]
        flags += [f"--context={self.context}"] if self.context else []
        flags += [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        try:
            done = subprocess.run(
                ["kubectl", "get", *arguments, "--output=json", *flags],
                capture_output=True, check=False, timeout=TIMEOUT_S,
            )  # fmt: skip
        except FileNotFoundError:
            raise StoreError("kubectl is not on the path") from None
        except subprocess.TimeoutExpired:
            raise StoreError(f"kubectl did not answer within {TIMEOUT_S} s") from None
        if done.returncode != 0:
            raise StoreError(done.stderr.decode(errors="replace").strip() or "kubectl failed")
        return json.loads(done.stdout)


def receipts(cluster: Cluster, domain: str | None = None) -> Iterator[tuple[str, bytes | ReceiptError]]:
    """Yield every receipt by the name of its object: its bytes, or what is wrong with it."""
    selector = f"{labels.NAME}={labels.of_receipts(labels.RECEIPT)[labels.NAME]}"
    selector += f",{labels.DOMAIN}={domain}" if domain else ""
    items = cluster.get("configmaps", f"--selector={selector}")["items"]
    yield from read_receipt_objects({item["metadata"]["name"]: item for item in items})


def public_keys(cluster: Cluster) -> Iterator[tuple[str, bytes]]:
    """Yield the published keys: key id and PEM."""
    data = cluster.get("configmap", names.RECEIPT_PUBLIC_KEYS).get("data") or {}
    for name, pem in sorted(data.items()):
        yield name.removesuffix(".pem"), pem.encode()
