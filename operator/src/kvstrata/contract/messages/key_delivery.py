"""Data keys on their way from the operator to pods and back, where no Secret may hold them.

With a custody that keeps keys out of Secrets a bundle names keys only (`KeyReference`), and the operator, which calls
gates over mutual TLS anyway, brings the keys themselves: no pod needs an address or credentials for asking.

`GET /v1/keys` tells which of the keys that its bundle names a pod holds (`KeysHeld`); the operator asks it whom to
bring keys, and, once a bundle names a key no more, whether it is gone. `POST /v1/keys` brings keys (`pack_keys`) and is
answered like the question. `POST /v1/keys/back` asks for keys by their ids (`KeysWanted`) and is answered with the
keys: an operator that was started anew finds them in pods that still hold them. Every answer carries the header
`Kvstrata-Ack-Token`, as states do.

Keys travel as bytes, never in JSON, so that each side reads them into a buffer that it can overwrite. They need no
names: a key's id is its own digest, so a side takes those keys that it knows the id of, and nobody can put another in
their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, ContractError, contract_errors, require_version
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, key_id, require_key_id
from kvstrata.contract.wire import canonical_json

KEYS_PATH = "/v1/keys"
KEYS_BACK_PATH = "/v1/keys/back"

MAX_KEYS = 32_768
"""How many keys a pod's word may name: no bundle of the size that this version is made for has as many."""

MAX_CARRIED = 4096
"""How many keys one message brings, or one question asks for; whoever has more sends several."""

MAX_KEYS_BYTES = 4 * 1024 * 1024
"""How large a pod's word on keys may be."""

CONTENT_TYPE = "application/octet-stream"
"""Of messages that hold keys."""

_MAGIC = b"KVSK\x01"
_BOOT = re.compile(r"[0-9A-Za-z._:-]{0,128}")


def pack_keys(secrets: Iterable[bytes | bytearray]) -> bytearray:
    """Return the message that holds these keys; overwrite it when it is sent. Raises ContractError for too many."""
    body = bytearray(_MAGIC)
    for count, secret in enumerate(secrets, start=1):
        if count > MAX_CARRIED:
            raise ContractError(f"a message brings {MAX_CARRIED} data keys at most")
        if len(secret) != DATA_KEY_BYTES or not any(secret):
            raise ContractError(f"a data key has {DATA_KEY_BYTES} random bytes")
        body += secret
    return body


def unpack_keys(body: bytes | bytearray, known: Iterable[str]) -> tuple[dict[str, bytearray], int]:
    """Return those keys of a message whose ids are `known`, by id, and how many others it has.

    Raises ContractError, which quotes nothing of it, for what is no such message.
    """
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
    """Make a key's buffer zeros, in place."""
    secret[:] = bytes(len(secret))


@dataclass(frozen=True, slots=True)
class KeysHeld:
    """A pod's word on keys: which it holds in its volume or its processes, and which its bundle names besides.

    It enforces `revision`. `gate_boot` and `cache_boot` name the processes that say so; a pod whose cache server does
    not answer (`cache_boot` empty) cannot say that a key is gone.
    """

    gate_boot: str
    cache_boot: str
    revision: int
    held: tuple[str, ...]
    lacking: tuple[str, ...] = ()

    def says_gone(self, ids: Iterable[str], revision: int) -> bool:
        """Whether it says that none of these keys is left in its pod, by processes that enforce `revision`."""
        return bool(self.gate_boot and self.cache_boot) and self.revision >= revision and not {*ids} & {*self.held}

    def encode(self) -> bytes:
        """Return the body."""
        fields = {name: getattr(self, name) for name in ("gate_boot", "cache_boot", "revision")}
        ids = {"held": sorted(self.held), "lacking": sorted(self.lacking)}
        return canonical_json({"contract": CONTRACT_VERSION, **fields, **ids})

    @classmethod
    def decode(cls, data: bytes) -> KeysHeld:
        """Read the body. Raises ContractError for anything malformed, of an unknown version, or without sense."""
        with contract_errors("a pod's word on keys"):
            raw = json.loads(data)
            require_version(raw, "a pod's word on keys")
            boots, revision = (raw["gate_boot"], raw["cache_boot"]), raw["revision"]
            if not all(isinstance(boot, str) and _BOOT.fullmatch(boot) for boot in boots):
                raise ContractError("a pod's word on keys does not say whose it is")
            if type(revision) is not int or revision < 0:
                raise ContractError("a pod's word on keys names a revision that is none")
            held, lacking = _ids(raw["held"]), _ids(raw["lacking"])
            if {*held} & {*lacking}:
                raise ContractError("a pod's word on keys says of one that it is there and lacking")
            return cls(*boots, revision, held, lacking)


@dataclass(frozen=True, slots=True)
class KeysWanted:
    """The operator asks for keys that it lost, by their ids. A gate gives those that its own bundle names."""

    ids: tuple[str, ...]

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for too many."""
        return canonical_json({"contract": CONTRACT_VERSION, "ids": sorted(_ids(list(self.ids), MAX_CARRIED))})

    @classmethod
    def decode(cls, data: bytes) -> KeysWanted:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a question for keys"):
            raw = json.loads(data)
            require_version(raw, "a question for keys")
            return cls(_ids(raw["ids"], MAX_CARRIED))


def _ids(raw: Any, most: int = MAX_KEYS) -> tuple[str, ...]:
    if type(raw) is not list or len(raw) > most:
        raise ContractError(f"a message names {most} data keys at most, in a list")
    for one in raw:
        require_key_id(one)
    if len({*raw}) != len(raw):
        raise ContractError("a message names a data key twice")
    return tuple(raw)
