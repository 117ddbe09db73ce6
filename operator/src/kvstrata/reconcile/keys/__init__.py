"""Key custody: where a domain's data keys are kept, how pods get them, and how they end.

`erasure.keys` removes keys from Secrets that `reconcile.secrets` wrote. With a KMS, `kms_worker` does the
work that `plan.keys.kms` finds due: it draws, unwraps and ends keys by `kms_custody`. `key_ring` holds them in the
clear, `delivery` sends them to pods, and `kms_domains` ends the keys of deleted domains.

A custody reports a key's end only if it knows it; `contract.receipt.claims` derives the claims of receipts. Every
call can be repeated. Epochs are treated as secrets: no message, log or key name holds one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.objects import labels
from kvstrata.objects.secret import build_secret
from kvstrata.reconcile.claims import require_own


class CustodyError(Exception):
    """The custody failed or the outcome is unknown. The message holds no secret."""


@contextmanager
def custody_errors(message: str) -> Iterator[None]:
    """Turn a KubeError into a CustodyError that begins with `message`."""
    try:
        yield
    except KubeError as error:
        raise CustodyError(f"{message}: {error.status} {error.reason}") from error


class CustodySecrets:
    """Secrets of one `component` in the operator's namespace, so that they outlive the namespaces that they are about.
    Every call may raise CustodyError; one for a Secret of others, which is left alone, has the reason NameConflict."""

    def __init__(self, kube: Kube, namespace: str, component: str) -> None:
        self._kube, self._namespace, self._component = kube, namespace, component

    async def read(self, name: str) -> dict[str, Any] | None:
        with custody_errors(f"Secret {name} cannot be read"):
            found = await self._kube.get(SECRET, self._namespace, name)
            if found is not None:
                require_own(SECRET.kind, found, {"labels": labels.of_custody(self._component)})
            return found

    async def list(self) -> AsyncIterator[dict[str, Any]]:
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_custody(self._component).items()))
        with custody_errors(f"Secrets of {self._component} cannot be listed"):
            async for raw in self._kube.list(SECRET, self._namespace, selector):
                yield raw

    async def write(self, name: str, values: Mapping[str, bytes], version: str) -> None:
        """Replace the Secret that was read at this resourceVersion; create it if empty. A conflict is an error."""
        body = build_secret(name, self._namespace, labels.of_custody(self._component), None, values)
        with custody_errors(f"Secret {name} was not written"):
            if version:
                body["metadata"]["resourceVersion"] = version
                await self._kube.replace(SECRET, self._namespace, body)
            else:
                await self._kube.create(SECRET, self._namespace, body)

    async def delete(self, stored: Mapping[str, Any]) -> None:
        name, uid, version = (stored["metadata"][key] for key in ("name", "uid", "resourceVersion"))
        with custody_errors(f"Secret {name} was not removed"):
            await self._kube.delete(SECRET, self._namespace, name, uid, version)
