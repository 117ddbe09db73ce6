"""Bundles: what is written is what is read, damage is refused, and nobody goes back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract import CONTRACT_VERSION, ContractError
from kvstrata.contract.policy.bundle import (
    MAX_SHARD_BYTES,
    Bundle,
    EnforcedBudget,
    Entry,
    Root,
    Rules,
    ShardRef,
    decode_shard,
    encode_shard,
    shard_of,
    split_into_shards,
)
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.rate import RateLimit
from kvstrata.contract.wire import digest_bytes, from_wire, to_wire
from tests.support.amounts import examples
from tests.unit.contract.documents import entries, junk, roots

ROOT = Root("0" * 16, "tiny", "uid-1", 5, 2, Rules(), (ShardRef(0, "a", "d"),), 1)


def tenants(count: int) -> list[Entry]:
    return [
        Entry(f"tenant-{n}", f"{n:032x}", Scope(ScopeKind.TENANT, f"tenant-{n}"), f"uid-{n}", n) for n in range(count)
    ]


@given(roots)
def test_a_root_is_read_as_it_was_written(root: Root) -> None:
    assert Root.decode(root.encode()) == root


@given(st.lists(entries, max_size=5, unique_by=lambda entry: entry.tenant))
def test_a_shard_is_read_as_it_was_written_whatever_the_order(group: list[Entry]) -> None:
    data = encode_shard(group)
    assert data == encode_shard(reversed(group))
    assert sorted(decode_shard(data, digest_bytes(data)), key=lambda e: e.tenant) == sorted(
        group, key=lambda e: e.tenant
    )


@given(entries)
def test_an_entry_that_pauses_is_a_suspended_one_to_every_reader_and_comes_back_as_it_was(entry: Entry) -> None:
    paused = entry.paused(True)
    assert to_wire(paused)["suspended"] is True
    assert from_wire(Entry, to_wire(paused)) == paused == paused.paused(True)
    assert paused.enforces_the_same_as(replace(entry, suspended=True)) is entry.suspended
    assert paused.paused(False) == entry


@given(st.lists(entries, min_size=1, max_size=3, unique_by=lambda entry: entry.tenant), st.data())
def test_a_shard_with_one_changed_byte_is_refused(group: list[Entry], data: st.DataObject) -> None:
    encoded = encode_shard(group)
    where = data.draw(st.integers(0, len(encoded) - 1))
    damaged = encoded[:where] + bytes([encoded[where] ^ 1]) + encoded[where + 1 :]
    with pytest.raises(ContractError, match="digest"):
        decode_shard(damaged, digest_bytes(encoded))


def test_a_shard_of_another_bundle_is_refused() -> None:
    with pytest.raises(ContractError):
        decode_shard(encode_shard(tenants(1)), digest_bytes(encode_shard(tenants(2))))


@pytest.mark.parametrize("count", [0, 1, 300, 3000])
def test_no_shard_exceeds_its_bound_and_no_tenant_is_lost(count: int) -> None:
    shards = split_into_shards(tenants(count))
    assert all(len(shard) <= MAX_SHARD_BYTES for shard in shards)
    assert len(shards) & (len(shards) - 1) == 0
    read = [e for shard in shards for e in decode_shard(shard, digest_bytes(shard))]
    assert sorted(e.tenant for e in read) == sorted(e.tenant for e in tenants(count))
    for index, shard in enumerate(shards):
        assert all(shard_of(e.tenant, len(shards)) == index for e in decode_shard(shard, digest_bytes(shard)))


def test_one_tenant_more_changes_one_shard_only() -> None:
    before = split_into_shards(tenants(1000))
    after = split_into_shards(tenants(1001), minimum_count=len(before))
    assert len(before) > 1
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_fewer_tenants_do_not_move_the_others() -> None:
    before = split_into_shards(tenants(1000))
    assert len(split_into_shards(tenants(10), minimum_count=len(before))) == len(before)


def test_a_tenant_that_exceeds_a_shard_is_refused_instead_of_splitting_for_ever() -> None:
    budgets = tuple(EnforcedBudget("x" * 60 + str(n), n, n, n) for n in range(1000))
    with pytest.raises(ContractError, match="single tenant"):
        split_into_shards([replace(tenants(1)[0], budgets=budgets), *tenants(3)[1:]])


def test_a_reader_goes_on_to_a_newer_revision_of_the_same_model() -> None:
    assert ROOT.supersedes(None)
    assert replace(ROOT, revision=6).supersedes(ROOT)
    assert replace(ROOT, revision=6, term=3).supersedes(ROOT)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"revision": 4},
        {"revision": 4, "term": 3},
        {"term": 3},
        {"revision": 6, "term": 1},
        {"revision": 6, "model_uid": "uid-2"},
    ],
)
def test_a_reader_never_goes_back_nor_to_another_models_root(change: dict[str, object]) -> None:
    assert not replace(ROOT, **change).supersedes(ROOT)  # type: ignore[arg-type]


@given(entries, entries)
def test_the_content_digest_ignores_only_since(one: Entry, other: Entry) -> None:
    assert one.content_digest() == replace(one, since=one.since + 1).content_digest()
    same = replace(one, since=0) == replace(other, since=0)
    assert (one.content_digest() == other.content_digest()) == same


def test_a_suspended_tenants_keyspace_may_not_be_used() -> None:
    group = [replace(tenants(1)[0], suspended=True), tenants(2)[1]]
    bundle = Bundle(ROOT, {e.tenant: e for e in group})
    assert bundle.keyspaces == {group[1].keyspace}


@pytest.mark.parametrize("slots", [[(1, "a")], [(0, "a"), (0, "b")], [(0, "c")], [(1, "a"), (0, "a")]])
def test_a_root_with_shards_out_of_order_or_in_unknown_slots_is_refused(slots: list[tuple[int, str]]) -> None:
    raw = json.loads(ROOT.encode()) | {"shards": [{"index": i, "slot": s, "digest": "d"} for i, s in slots]}
    with pytest.raises(ContractError):
        Root.decode(json.dumps(raw).encode())


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "9", 10**12 + 1])
def test_a_rate_limit_that_is_no_number_above_0_is_refused(value: object) -> None:
    raw = json.loads(ROOT.encode())
    raw["rules"]["rate"] = {"requestsPerMinute": value}
    with pytest.raises(ContractError, match=r"rate"):
        Root.decode(json.dumps(raw).encode())


def test_an_entry_without_rate_limits_is_written_as_before_and_with_them_enforces_something_else() -> None:
    plain = Entry("acme", "0" * 32, Scope(ScopeKind.TENANT, "acme"), "uid")
    limited = replace(plain, rate=RateLimit(tokens_per_minute=5))
    assert "rate" not in to_wire(plain)
    assert to_wire(limited)["rate"] == {"tokensPerMinute": 5}
    assert from_wire(Entry, to_wire(limited)) == limited
    assert not limited.enforces_the_same_as(plain)
    assert limited.content_digest() != plain.content_digest()


@pytest.mark.parametrize("mode", ["onStale", "unknownTenants", "reuse"])
def test_a_mode_that_the_reader_does_not_know_is_refused(mode: str) -> None:
    raw = json.loads(ROOT.encode())
    raw["rules"][mode] = "Guess"
    with pytest.raises(ContractError, match="mode"):
        Root.decode(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        (CONTRACT_VERSION, True),
        (CONTRACT_VERSION - 1, True),
        (CONTRACT_VERSION + 1, False),
        (CONTRACT_VERSION - 2, False),
    ],
)
def test_a_reader_takes_its_own_version_and_the_one_before(version: int, accepted: bool) -> None:
    raw = json.dumps(json.loads(ROOT.encode()) | {"contract": version}).encode()
    if accepted:
        assert Root.decode(raw) == ROOT
    else:
        with pytest.raises(ContractError, match="version"):
            Root.decode(raw)


@given(st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
def test_anything_else_than_a_root_is_a_contract_error(data: bytes) -> None:
    with pytest.raises(ContractError):
        Root.decode(data)
    with pytest.raises(ContractError):
        decode_shard(data, digest_bytes(data))


@settings(max_examples=examples(200))
@given(roots, st.sampled_from(sorted(json.loads(ROOT.encode()))), junk)
def test_a_root_with_one_wrong_field_is_read_or_a_contract_error(root: Root, field: str, value: object) -> None:
    raw = json.loads(root.encode()) | {field: value}
    try:
        Root.decode(json.dumps(raw).encode())
    except ContractError:
        pass


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"contract":1,"shards":[{"index":1e999}]}'])
def test_deep_and_infinite_documents_are_contract_errors(data: bytes) -> None:
    with pytest.raises(ContractError):
        Root.decode(data)


def test_who_is_kept_off_a_tier_may_keep_nothing_there_whatever_else_is_said() -> None:
    row = EnforcedBudget.denying("fast", 60)
    assert to_wire(row) == {"tier": "fast", "limitBytes": 0, "retentionSeconds": 60, "denied": True}
    wrong = to_wire(row) | {"limitBytes": 1 << 30, "guaranteedBytes": 1 << 20}
    assert from_wire(EnforcedBudget, to_wire(row)) == from_wire(EnforcedBudget, wrong) == row
    assert "denied" not in to_wire(EnforcedBudget("fast", limit_bytes=0))
