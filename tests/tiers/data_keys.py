"""Data keys for tests, and what a process holds of them."""

from __future__ import annotations

from pathlib import Path

from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.gate.policy.volume import KeyFiles
from tests.tiers.gate_stand_in import KEYSPACE_A

FIRST, SECOND = (
    DataKey(1, b"first key of keyspace a: 32 bytes"[:32]),
    DataKey(2, b"second key of this keyspace: 32 b"[:32]),
)
OTHER = DataKey(1, b"the key of another keyspace: 32 b"[:32])


def held(tmp_path: Path, *keys: DataKey, keyspace: str = KEYSPACE_A) -> DataKeys:
    """Return the keys of a process that follows what a gate wrote into `tmp_path`."""
    KeyFiles(tmp_path).write({keyspace: keys})
    own = DataKeys()
    own.follow(tmp_path / KEYS_DIRECTORY, {keyspace: tuple(key.generation for key in keys)})
    return own
