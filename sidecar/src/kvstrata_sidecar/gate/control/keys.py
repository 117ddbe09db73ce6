"""Data keys that a bundle only names: the gate lists the missing ones, and the operator delivers them.

Keys that the bundle does not name are ignored. Without its keys a keyspace does not use encrypted tiers.
"""

from __future__ import annotations

from kvstrata.contract import ContractError
from kvstrata.contract.messages.key_delivery import KeysLacking, overwrite, unpack_keys
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.policy.enforcement import Enforcement
from kvstrata_sidecar.gate.policy.volume import PolicyVolume


class PodKeys:
    def __init__(self, enforcement: Enforcement, volume: PolicyVolume) -> None:
        self._enforcement = enforcement
        self._keys = volume.keys

    async def list_missing(self, _: bytes = b"") -> KeysLacking:
        return KeysLacking(tuple(self._keys.lacking))

    async def take(self, body: bytearray) -> KeysLacking:
        """Store the missing keys of a message, have the cache server read them, and overwrite the message. Raises
        Refusal (400) for a malformed message, and OSError if a file cannot be written."""
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
        return await self.list_missing()
