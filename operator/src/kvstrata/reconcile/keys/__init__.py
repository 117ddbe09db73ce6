"""Key custody: where a domain's data keys are kept, how pods get them, and how they end.

`secret_custody` removes keys from Secrets that `reconcile.secrets` wrote. With a KMS, `kms_worker` does the
work that `plan.keys.kms` finds due: it draws, unwraps and ends keys by `kms_custody`. `key_ring` holds them in the
clear, `delivery` sends them to pods, and `kms_domains` ends the keys of deleted domains.

A custody reports a key's end only if it knows it; `contract.receipt.claims` derives the claims of receipts. Every
call can be repeated. Epochs are treated as secrets: no message, log or key name holds one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.clients.kube import KubeError


class CustodyError(Exception):
    """The custody failed or the outcome is unknown. The message holds no secret."""


@contextmanager
def custody_errors(message: str) -> Iterator[None]:
    """Turn a KubeError into a CustodyError that begins with `message`."""
    try:
        yield
    except KubeError as error:
        raise CustodyError(f"{message}: {error.status} {error.reason}") from error
