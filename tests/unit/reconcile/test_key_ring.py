"""Keys in the clear, in the operator's memory."""

from __future__ import annotations

from kvstrata.contract.messages.key_delivery import pack_keys, unpack_keys
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, key_id
from kvstrata.reconcile.keys.key_ring import KeyRing

ACME, GLOBEX = "a" * 32, "b" * 32
A, B = b"A" * DATA_KEY_BYTES, b"B" * DATA_KEY_BYTES


def ring() -> KeyRing:
    made = KeyRing()
    made.add("team-a", ACME, A)
    made.add("team-a", GLOBEX, B)
    return made


def test_the_first_key_of_an_epoch_stays_and_is_printed_nowhere() -> None:
    made = ring()
    made.add("team-a", ACME, B)
    assert made.ids("team-a", [ACME, "c" * 32]) == {ACME: key_id(A)}
    assert repr(A)[2:-1] not in repr(made._keys)


def test_keys_are_given_by_their_ids_within_their_namespace() -> None:
    made = ring()
    ids = [key_id(A), key_id(B)]
    taken, strange = unpack_keys(pack_keys(made.secrets("team-a", ids)), ids)
    assert (taken, strange) == ({key_id(A): A, key_id(B): B}, 0)
    assert made.secrets("team-b", ids) == []
    assert made.namespaces == ("team-a",)


def test_a_removed_key_is_overwritten_and_given_to_no_pod() -> None:
    made = ring()
    (buffer,) = made.secrets("team-a", [key_id(A)])
    made.remove("team-a", [ACME, "c" * 32])
    assert buffer == bytes(DATA_KEY_BYTES)
    assert made.secrets("team-a", [key_id(A)]) == []
    assert made.ids("team-a", [ACME, GLOBEX]) == {GLOBEX: key_id(B)}
    made.remove("team-a", [GLOBEX])
    assert made.namespaces == ()
