"""Keys travel as bytes, and are taken by their own digest only."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.key_delivery import (
    MAX_CARRIED,
    MAX_KEYS,
    MAX_KEYS_BYTES,
    KeysLacking,
    overwrite,
    pack_keys,
    unpack_keys,
)
from kvstrata.contract.messages.pools import MAX_REQUEST_BYTES
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, KEY_ID_DIGITS, KeyReference, key_id
from kvstrata.contract.wire import from_wire, to_wire

A, B, C = (bytes([n]) * DATA_KEY_BYTES for n in (1, 2, 3))
secrets = st.binary(min_size=DATA_KEY_BYTES, max_size=DATA_KEY_BYTES).filter(any)


@given(st.lists(secrets, unique=True, max_size=5), st.data())
def test_what_is_packed_comes_out_by_its_id_and_only_what_is_known(some: list[bytes], data: st.DataObject) -> None:
    known = data.draw(st.sets(st.sampled_from(some))) if some else set()
    taken, strange = unpack_keys(pack_keys(some), [key_id(one) for one in known])
    assert {name: bytes(secret) for name, secret in taken.items()} == {key_id(one): one for one in known}
    assert strange == len(some) - len(known)


def test_nobody_can_put_another_key_in_the_place_of_one_that_is_named() -> None:
    taken, strange = unpack_keys(pack_keys([B]), [key_id(A)])
    assert (taken, strange) == ({}, 1)


def test_a_message_is_keys_and_nothing_else_and_can_be_overwritten() -> None:
    body = pack_keys([A, B])
    assert body.endswith(A + B)
    taken, _ = unpack_keys(body, [key_id(A)])
    overwrite(body)
    assert not any(body)
    assert taken[key_id(A)] == A, "what was taken is a buffer of its own"


@pytest.mark.parametrize("body", [b"", b"KVSK\x02" + A, b"KVSK\x01" + A[:-1], b"{}", A])
def test_what_is_no_message_is_refused_and_not_quoted(body: bytes) -> None:
    with pytest.raises(ContractError) as caught:
        unpack_keys(body, [])
    assert A.decode() not in str(caught.value)


@pytest.mark.parametrize("secret", [bytes(DATA_KEY_BYTES), b"short"])
def test_what_is_no_key_is_not_packed(secret: bytes) -> None:
    with pytest.raises(ContractError):
        pack_keys([secret])


def test_the_largest_messages_fit() -> None:
    ids = tuple(f"{n:0{KEY_ID_DIGITS}x}" for n in range(MAX_KEYS))
    assert len(KeysLacking(ids).encode()) <= MAX_KEYS_BYTES
    assert len(pack_keys([A] * MAX_CARRIED)) <= MAX_REQUEST_BYTES
    with pytest.raises(ContractError):
        pack_keys([A] * (MAX_CARRIED + 1))


def test_an_id_is_what_a_receipt_says() -> None:
    assert key_id(A) == key_id(bytearray(A))


def test_a_reference_holds_no_key_and_is_read_as_written() -> None:
    reference = KeyReference(7, key_id(A))
    assert from_wire(KeyReference, to_wire(reference)) == reference
    assert A.hex() not in json.dumps(to_wire(reference))


@pytest.mark.parametrize("raw", [{}, {"generation": 256, "id": key_id(A)}, {"generation": 1, "id": "x"}, [], None])
def test_a_malformed_reference_is_refused(raw: object) -> None:
    with pytest.raises(ContractError):
        from_wire(KeyReference, raw)


def test_which_keys_lack_is_read_as_written() -> None:
    lacking = KeysLacking((key_id(A), key_id(B)))
    assert {*KeysLacking.decode(lacking.encode()).ids} == {*lacking.ids}


@pytest.mark.parametrize(
    "change",
    [
        {"contract": 9},
        {"lacking": "a" * KEY_ID_DIGITS},
        {"lacking": [key_id(A), key_id(A)]},
        {"lacking": [None]},
        {"lacking": None},
    ],
    ids=str,
)
def test_a_malformed_answer_is_refused(change: dict[str, object]) -> None:
    raw = json.loads(KeysLacking((key_id(A),)).encode())
    with pytest.raises(ContractError):
        KeysLacking.decode(json.dumps(raw | change).encode())
