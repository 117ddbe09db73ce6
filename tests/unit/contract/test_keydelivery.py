"""Keys travel as bytes, are taken by their own digest only, and a pod's word on them says what it says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.key_delivery import (
    MAX_CARRIED,
    MAX_KEYS,
    MAX_KEYS_BYTES,
    KeysHeld,
    KeysWanted,
    overwrite,
    pack_keys,
    unpack_keys,
)
from kvstrata.contract.messages.pools import MAX_REQUEST_BYTES
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, KEY_ID_DIGITS, KeyReference, key_fingerprint, key_id

A, B, C = (bytes([n]) * DATA_KEY_BYTES for n in (1, 2, 3))
secrets = st.binary(min_size=DATA_KEY_BYTES, max_size=DATA_KEY_BYTES).filter(any)


@settings(deadline=None)
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
    assert len(KeysHeld("g", "c", 1, ids).encode()) <= MAX_KEYS_BYTES
    assert len(KeysWanted(ids[:MAX_CARRIED]).encode()) <= MAX_REQUEST_BYTES
    assert len(pack_keys([A] * MAX_CARRIED)) <= MAX_REQUEST_BYTES
    with pytest.raises(ContractError):
        pack_keys([A] * (MAX_CARRIED + 1))
    with pytest.raises(ContractError):
        KeysWanted(ids[: MAX_CARRIED + 1]).encode()


def test_an_id_is_what_a_receipt_says() -> None:
    assert key_fingerprint(A) == key_id(A)
    assert key_id(A) == key_id(bytearray(A))


def test_a_reference_holds_no_key_and_is_read_as_written() -> None:
    reference = KeyReference(7, key_id(A))
    assert KeyReference.from_json(reference.to_json()) == reference
    assert A.hex() not in json.dumps(reference.to_json())


@pytest.mark.parametrize("raw", [{}, {"generation": 256, "id": key_id(A)}, {"generation": 1, "id": "x"}, [], None])
def test_a_malformed_reference_is_refused(raw: object) -> None:
    with pytest.raises(ContractError):
        KeyReference.from_json(raw)  # type: ignore[arg-type]


def test_a_word_on_keys_and_a_question_for_them_are_read_as_written() -> None:
    held = KeysHeld("gate-1", "cache-1", 4, (key_id(A),), (key_id(B),))
    assert KeysHeld.decode(held.encode()) == held
    wanted = KeysWanted((key_id(A),))
    assert KeysWanted.decode(wanted.encode()) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"contract": 9},
        {"gate_boot": 3},
        {"gate_boot": "x" * 129},
        {"revision": -1},
        {"revision": True},
        {"held": "a" * KEY_ID_DIGITS},
        {"held": [key_id(A), key_id(A)]},
        {"held": [key_id(A)], "lacking": [key_id(A)]},
        {"lacking": [None]},
    ],
    ids=str,
)
def test_a_malformed_word_is_refused(change: dict[str, object]) -> None:
    raw = json.loads(KeysHeld("gate-1", "cache-1", 4, (key_id(A),), (key_id(B),)).encode())
    with pytest.raises(ContractError):
        KeysHeld.decode(json.dumps(raw | change).encode())


class TestAPodSaysThatKeysAreGone:
    def test_by_both_processes_under_a_revision_that_does_not_name_them(self) -> None:
        assert KeysHeld("gate-1", "cache-1", 5, (key_id(B),)).says_gone([key_id(A)], 5)

    @pytest.mark.parametrize(
        "word",
        [
            KeysHeld("gate-1", "cache-1", 5, (key_id(A),)),
            KeysHeld("gate-1", "cache-1", 4, ()),
            KeysHeld("gate-1", "", 5, ()),
            KeysHeld("", "cache-1", 5, ()),
        ],
        ids=["it has it", "an older revision", "no cache server", "no gate"],
    )
    def test_and_otherwise_it_does_not(self, word: KeysHeld) -> None:
        assert not word.says_gone([key_id(A)], 5)
