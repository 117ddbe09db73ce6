"""Data keys that a bundle only names: the operator asks which are here, brings those that lack, or asks for them back.

What its bundle does not name the pod does not take, and does not give. Where keys are named, a pod that was brought
none serves as before, but for tiers that hold ciphertext: the cache server does not use them for a keyspace whose key
it has not.
"""

from __future__ import annotations

from kvstrata.contract import ContractError
from kvstrata.contract.messages.key_delivery import KeysHeld, KeysWanted, overwrite, pack_keys, unpack_keys
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.policy.enforcement import Enforcement
from kvstrata_sidecar.gate.policy.freshness import PolicyVolume


class PodKeys:
    """Answers the operator. `boot` is the gate's."""

    def __init__(self, *, boot: str, enforcement: Enforcement, volume: PolicyVolume) -> None:
        self._boot = boot
        self._enforcement = enforcement
        self._keys = volume.keys

    async def tell(self, _: bytes) -> bytes:
        """Answer which keys are here and which lack."""
        return self._word().encode()

    async def take(self, body: bytearray) -> bytes:
        """Take the keys of a message that lack here, have the cache server read them, and overwrite the message.

        Raises Refusal (400) for what is no such message, and OSError where a file cannot be written.
        """
        try:
            secrets, strange = unpack_keys(body, self._keys.lacking)
        except ContractError:
            raise bad_request(Reason.BAD_VALUE, "the body is no message of data keys") from None
        finally:
            overwrite(body)
        try:
            written = self._keys.bring(secrets)
        finally:
            for secret in secrets.values():
                overwrite(secret)
        if written:
            log.info("data keys were brought", keys=written, left_aside=strange, lacking=len(self._keys.lacking))
            self._enforcement.keys_came()
        return self._word().encode()

    async def give_back(self, body: bytes) -> bytearray:
        """Answer a question for keys with those that are here.

        Raises Refusal (400) for what is no such question.
        """
        try:
            wanted = KeysWanted.decode(body)
        except ContractError:
            raise bad_request(Reason.BAD_VALUE, "the body is no question for data keys") from None
        found = self._keys.read(wanted.ids)
        try:
            return pack_keys(found)
        finally:
            for secret in found:
                overwrite(secret)

    def _word(self) -> KeysHeld:
        enforcement, keys = self._enforcement, self._keys
        lacking = keys.lacking
        # A key may be dropped under one name and lack under another.
        held = keys.held - lacking
        return KeysHeld(self._boot, enforcement.cache_boot, enforcement.acked, tuple(held), tuple(lacking))
