"""Delivery of data keys from the operator to pods, where no Secret may hold them in the clear.

With a custody that keeps keys out of Secrets a bundle names keys only (`KeyReference`), and the operator delivers the
keys to gates over mutual TLS: no pod needs an address or credentials of the custody.

`GET /v1/keys` returns the keys that a pod lacks (`KeysLacking`). `POST /v1/keys` delivers keys (`pack_keys`) and
returns the same. Both answers carry the header `Kvstrata-Ack-Token`.

Keys travel as bytes, never in JSON, so that each side reads them into a buffer that it can overwrite. A key's id is its
own digest, so a receiver takes the keys whose ids it knows, and no other key can take their place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from kvstrata.contract import ContractError
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, KeyId, key_id
from kvstrata.contract.wire import Items, Message, wired

KEYS_PATH = "/v1/keys"

MAX_KEYS = 32_768
"""Keys in one answer; no bundle of a supported size has as many."""

MAX_CARRIED = 4096
"""Keys in one message; more take several messages."""

MAX_KEYS_BYTES = 4 * 1024 * 1024
CONTENT_TYPE = "application/octet-stream"

_MAGIC = b"KVSK\x01"


def pack_keys(secrets: Iterable[bytes | bytearray]) -> bytearray:
    """Return the message that holds these keys; overwrite it after use. Raises ContractError for too many."""
    body = bytearray(_MAGIC)
    for count, secret in enumerate(secrets, start=1):
        if count > MAX_CARRIED:
            raise ContractError(f"a message brings {MAX_CARRIED} data keys at most")
        if len(secret) != DATA_KEY_BYTES or not any(secret):
            raise ContractError(f"a data key has {DATA_KEY_BYTES} random bytes")
        body += secret
    return body


def unpack_keys(body: bytes | bytearray, known: Iterable[str]) -> tuple[dict[str, bytearray], int]:
    """Return the keys of a message whose ids are `known`, by id, and the count of others. Raises ContractError, which
    quotes nothing of the message, if it is malformed."""
    if not body.startswith(_MAGIC):
        raise ContractError("a message of data keys begins with other bytes than those of this version")
    size, left = len(body) - len(_MAGIC), frozenset(known)
    if size % DATA_KEY_BYTES or size > MAX_CARRIED * DATA_KEY_BYTES:
        raise ContractError(f"a message of data keys holds {MAX_CARRIED} whole keys at most")
    taken: dict[str, bytearray] = {}
    strange = 0
    with memoryview(body) as view:
        for at in range(len(_MAGIC), len(body), DATA_KEY_BYTES):
            secret = bytearray(view[at : at + DATA_KEY_BYTES])
            name = key_id(secret)
            if name in left:
                taken[name] = secret
            else:
                overwrite(secret)
                strange += 1
    return taken, strange


def overwrite(secret: bytearray) -> None:
    secret[:] = bytes(len(secret))


@wired("a list of lacking data keys", versioned=True, complete=True, names={"ids": "lacking"})
class KeysLacking(Message):
    """The ids of the keys that a pod's bundle names and that the pod does not have."""

    ids: Annotated[tuple[KeyId, ...], Items(most=MAX_KEYS, distinct=True)] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(sorted(self.ids)))
