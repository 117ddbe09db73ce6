"""Key custody: who keeps a domain's data keys, gives them out, takes them back, and says what is left of them.

What a custody says of a key's end is its own knowledge only (`Revocation`, `Destruction`); what pods hold is asked of
pods, and what a receipt may claim of both is derived elsewhere (`plan.keys.custody`).

Every call can be repeated: an operator that died in between asks for the same again and comes to the same end. Epochs
are secrets as far as these modules go: no message, log or name of a key holds one.

`SecretCustody` describes what `reconcile.secrets` does, and erasures revoke by it; `MemoryCustody` is what
`reconcile.memorykeys` and `reconcile.keys.delivery` work with, `KmsCustody` what `reconcile.keys.kms_worker` does.
`holders` keeps what `reconcile.keyholders` notes of operators' and pods' ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.model.keys import Destruction, Revocation


class CustodyError(Exception):
    """The custody cannot do it now: what is named was not done, or nobody knows. The message holds no secret."""


class KeyCustody(Protocol):
    """Where the data keys of one domain are kept."""

    @property
    def kind(self) -> Kind:
        """Which kind of custody it is."""

    async def draw(self, epochs: Iterable[str]) -> None:
        """Make a key for each epoch that has none. Raises CustodyError if somebody else is at it: ask again."""

    async def unlock(self, epochs: Iterable[str]) -> Mapping[str, bytes]:
        """Return the keys of these epochs, without those that have none. Raises CustodyError."""

    async def revoke(self, epochs: Iterable[str]) -> Mapping[str, Revocation]:
        """Give these keys to nobody any more; return for each epoch what became of it. Raises CustodyError."""

    async def destroy(self, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        """Make sure that no copy of these revoked keys exists, as far as the custody can; return what it knows.

        Raises CustodyError.
        """
