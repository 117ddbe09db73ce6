"""Data keys travel in shards, are named by generation everywhere else, and are printed nowhere."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import AdapterState, TierState, decode_answer, encode_answer
from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules, decode_shard, encode_shard
from kvstrata.contract.policy.cache_view import CacheView, data_keys
from kvstrata.contract.policy.data_key import DataKey, file_name, parse_file_name
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.wire import digest_bytes, from_wire, to_wire
from kvstrata.plan.actions import CommitBundle

SECRET = bytes(range(1, 33))
KEYSPACE = "a" * 32
ENTRY = Entry(
    "acme", KEYSPACE, Scope(ScopeKind.TENANT, "acme"), "uid", keys=(DataKey(2, SECRET), DataKey(1, b"o" * 32))
)

keys = st.lists(
    st.builds(DataKey, st.integers(0, 255), st.binary(min_size=32, max_size=32).filter(any)),
    max_size=3,
    unique_by=lambda key: key.generation,
).map(tuple)


def bundle(*entries: Entry, reuse: str = "Prefix") -> Bundle:
    root = Root("d" * 16, "m", "u", 1, 1, Rules(reuse=reuse), ())
    return Bundle(root, {entry.tenant: entry for entry in entries})


def traces(secret: bytes) -> tuple[str, ...]:
    """How a key could show in text."""
    return (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1], secret.decode("latin-1"))


@given(keys)
def test_an_entry_is_read_with_the_keys_that_it_was_written_with(some: tuple[DataKey, ...]) -> None:
    entry = replace(ENTRY, keys=some)
    data = encode_shard([entry])
    assert decode_shard(data, digest_bytes(data)) == (entry,)


def test_an_entry_without_keys_is_written_as_the_version_before_wrote_it_and_read() -> None:
    raw = to_wire(replace(ENTRY, keys=()))
    assert "keys" not in raw
    assert from_wire(Entry, raw).keys == ()


def test_nothing_that_is_printed_shows_a_key() -> None:
    whole = bundle(ENTRY)
    texts = [repr(ENTRY.keys[0]), str(ENTRY), repr(whole), f"{ENTRY.keys}", CacheView.of(whole).encode().decode()]
    texts += [repr(CacheView.of(whole)), ENTRY.content_digest()]
    texts.append(repr(CommitBundle("m", whole.root, whole.entries, {0: encode_shard([ENTRY])}, None, {})))
    for text in texts:
        assert not any(trace in text for trace in traces(SECRET))
    assert "***" in repr(ENTRY)


def test_the_digest_in_status_knows_generations_and_not_keys_but_enforcement_tells_keys_apart() -> None:
    other = replace(ENTRY, keys=(DataKey(2, b"x" * 32), ENTRY.keys[1]))
    assert other.content_digest() == ENTRY.content_digest()
    assert not other.enforces_the_same_as(ENTRY)
    assert replace(ENTRY, keys=ENTRY.keys[1:]).content_digest() != ENTRY.content_digest()


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"generation": 256, "key": base64.b64encode(SECRET).decode()},
        {"generation": True, "key": base64.b64encode(SECRET).decode()},
        {"generation": 1, "key": base64.b64encode(SECRET[1:]).decode()},
        {"generation": 1, "key": base64.b64encode(bytes(32)).decode()},
        {"generation": 1, "key": base64.b64encode(SECRET).decode() + "?"},
        {"generation": 1, "key": 5},
    ],
)
def test_a_malformed_key_is_refused_without_quoting_it(raw: dict[str, object]) -> None:
    with pytest.raises(ContractError) as refused:
        from_wire(DataKey, raw)
    assert not any(trace in str(refused.value) for trace in traces(SECRET))
    assert refused.value.__cause__ is None


def test_two_keys_of_one_generation_are_refused() -> None:
    raw = to_wire(ENTRY)
    raw["keys"] = [raw["keys"][0]] * 2
    with pytest.raises(ContractError):
        from_wire(Entry, raw)


def test_the_view_names_the_generations_of_allowed_keyspaces_in_order() -> None:
    view = CacheView.of(bundle(ENTRY, replace(ENTRY, tenant="globex", keyspace="b" * 32, suspended=True)))
    assert view.generations == {KEYSPACE: (2, 1)}
    assert CacheView.decode(view.encode()) == view
    assert data_keys(bundle(ENTRY, reuse="Disabled")) == {}


def test_a_view_of_the_version_before_names_no_generations() -> None:
    raw = json.loads(CacheView.of(bundle(ENTRY)).encode())
    del raw["generations"]
    assert CacheView.decode(json.dumps(raw).encode()).generations == {}


@pytest.mark.parametrize("generations", [{KEYSPACE: [256]}, {KEYSPACE: [-1]}, {KEYSPACE: ["1"]}, [], {KEYSPACE: 1}])
def test_a_malformed_generation_makes_the_view_malformed(generations: object) -> None:
    raw = json.loads(CacheView.of(bundle(ENTRY)).encode())
    with pytest.raises(ContractError):
        CacheView.decode(json.dumps(raw | {"generations": generations}).encode())


def test_file_names_are_read_as_they_are_written_and_nothing_else_is() -> None:
    assert parse_file_name(file_name(KEYSPACE, 255)) == (KEYSPACE, 255)
    for name in (".draft", f"{KEYSPACE}.256", f"{KEYSPACE}.01", f"{KEYSPACE}.1.tmp", f"../{KEYSPACE}.1", KEYSPACE):
        assert parse_file_name(name) is None


def test_a_tiers_state_is_read_from_earlier_and_later_versions() -> None:
    told = TierState("shared", "Redis", "closed", encrypted=True, keyless=3, capacity_bytes=1 << 40)
    line = encode_answer(AdapterState("b", 1, 1, True, 1, (told,)))
    assert decode_answer(AdapterState, line) == AdapterState("b", 1, 1, True, 1, (told,))
    raw = json.loads(line)
    (tier,) = raw["state"]["tiers"]
    tier["later"] = 1
    del tier["encrypted"], tier["keyless"], tier["capacity_bytes"]
    answer = decode_answer(AdapterState, json.dumps(raw).encode())
    assert answer.tiers == (TierState("shared", "Redis", "closed"),)
