"""Pools in bundles and views: what is written is what is read, the version before understands both, and each reader is
given what all of its keyspace may read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules, ShardRef, decode_shard, encode_shard
from kvstrata.contract.policy.cache_view import CacheView, data_keys, effective_pools, manifests, reads_of
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.pools import (
    MAX_CHUNKS,
    MAX_ENTRY_POOLS,
    MAX_POOL_SHARD_BYTES,
    MAX_POOLS,
    PoolRef,
    PoolShard,
    PoolState,
    PoolVersion,
    chunk_hashes,
    pack_hashes,
    read_manifest,
    shard_name,
)
from kvstrata.contract.wire import canonical_json, digest_bytes, from_wire, to_wire
from tests.unit.contract.documents import budgets, counts, hex32, junk, names, roots

KEY = DataKey(1, bytes(range(1, 33)))
HASHES = pack_hashes(bytes([n]) * 32 for n in range(3))

hash_sets = st.sets(st.binary(min_size=32, max_size=32), min_size=1, max_size=5).map(pack_hashes)
versions = st.builds(
    PoolVersion, hex32, names, st.sampled_from(PoolState), hash_sets, st.lists(names, max_size=3).map(tuple),
    st.lists(budgets, max_size=2).map(tuple), st.sampled_from([(), (KEY,)]), st.integers(0, 120),
)  # fmt: skip
shards = st.builds(
    PoolShard, names, names, st.lists(versions, max_size=2, unique_by=lambda version: version.keyspace).map(tuple)
)
references = st.lists(
    st.builds(PoolRef, st.integers(0, MAX_POOLS - 1), st.sampled_from("ab"), hex32, counts),
    unique_by=lambda reference: reference.index,
    max_size=4,
).map(lambda found: tuple(sorted(found, key=lambda reference: reference.index)))


def version(letter: str, state: PoolState = PoolState.PUBLISHED, **fields: object) -> PoolVersion:
    return replace(PoolVersion(letter * 32, "r", state, HASHES, ("shared",)), **fields)  # type: ignore[arg-type]


def entry(tenant: str, keyspace: str, *pools: str, suspended: bool = False) -> Entry:
    scope = Scope(ScopeKind.TENANT, tenant)
    return Entry(tenant, keyspace * 32, scope, "uid", suspended=suspended, pools=pools)


def bundle(entries: list[Entry], pools: list[PoolShard], reuse: str = "Prefix") -> Bundle:
    return Bundle.assemble(Root("d" * 16, "m", "u", 3, 1, Rules(reuse=reuse), ()), entries, pools)


@given(shards)
def test_a_pools_shard_is_read_as_it_was_written(shard: PoolShard) -> None:
    data = shard.encode()
    assert PoolShard.decode(data, digest_bytes(data)) == shard


@given(roots, references)
def test_a_root_is_read_with_its_pools(root: Root, pools: tuple[PoolRef, ...]) -> None:
    whole = replace(root, pools=pools)
    assert Root.decode(whole.encode()) == whole


def test_a_root_and_an_entry_without_pools_are_written_as_the_version_before_wrote_them() -> None:
    plain = Root("0" * 16, "tiny", "uid-1", 5, 2, Rules(), (ShardRef(0, "a", "d"),), 1)
    assert set(json.loads(plain.encode())) == {
        "contract", "domain", "model", "modelUid", "revision", "term", "rules", "rulesSince", "shards"
    }  # fmt: skip
    assert "pools" not in to_wire(entry("acme", "a"))
    assert not {"pools", "reads"} & set(json.loads(CacheView.of(bundle([entry("acme", "a")], [])).encode()))


def test_what_the_version_before_wrote_has_no_pools() -> None:
    root = json.loads(replace(bundle([], []).root, pools=(PoolRef(0, "a", "d", 1),)).encode())
    del root["pools"]
    assert Root.decode(canonical_json(root)).pools == ()
    raw = to_wire(entry("acme", "a", "docs"))
    del raw["pools"]
    assert from_wire(Entry, raw).pools == ()
    view = json.loads(
        CacheView.of(bundle([entry("acme", "a", "docs")], [PoolShard("docs", "u", (version("b"),))])).encode()
    )
    del view["pools"], view["reads"]
    assert (CacheView.decode(canonical_json(view)).pools, CacheView.decode(canonical_json(view)).reads) == ({}, {})


def test_the_version_before_finds_all_that_it_reads() -> None:
    """A reader takes the fields that it knows by name: what it knew is there, unchanged, beside what is new."""
    new = replace(bundle([], []).root, pools=(PoolRef(0, "a", "d", 1),))
    raw, known = json.loads(new.encode()), json.loads(replace(new, pools=()).encode())
    assert {name: raw[name] for name in known} == known
    with_pools, without = to_wire(entry("acme", "a", "docs")), to_wire(entry("acme", "a"))
    assert {name: with_pools[name] for name in without} == without
    view = CacheView.of(bundle([entry("acme", "a", "docs")], [PoolShard("docs", "u", (version("b"),))]))
    told, before = json.loads(view.encode()), json.loads(replace(view, pools={}, reads={}).encode())
    assert {name: told[name] for name in before} == before


def test_pools_are_part_of_what_an_entry_enforces_and_of_its_digest() -> None:
    one, other = entry("acme", "a", "docs"), entry("acme", "a", "docs", "tools")
    assert not one.enforces_the_same_as(other)
    assert len({one.content_digest(), other.content_digest(), entry("acme", "a").content_digest()}) == 3
    data = encode_shard([one])
    assert decode_shard(data, digest_bytes(data)) == (one,)


@pytest.mark.parametrize("pools", ["docs", [1], [""], ["a", "a"], {}, [f"p{n}" for n in range(MAX_ENTRY_POOLS + 1)]])
def test_an_entry_with_malformed_pools_is_refused(pools: object) -> None:
    with pytest.raises(ContractError):
        from_wire(Entry, to_wire(entry("acme", "a")) | {"pools": pools})


def test_two_full_versions_fit_into_a_shard_and_one_chunk_more_is_refused() -> None:
    most = pack_hashes(n.to_bytes(32, "big") for n in range(MAX_CHUNKS))
    full = [version(letter, hashes=most, tiers=tuple(f"tier-{n}" for n in range(16))) for letter in "ab"]
    assert len(PoolShard("p" * 63, "u" * 36, tuple(full)).encode()) <= MAX_POOL_SHARD_BYTES
    with pytest.raises(ContractError, match=str(MAX_CHUNKS)):
        pack_hashes(n.to_bytes(32, "big") for n in range(MAX_CHUNKS + 1))
    with pytest.raises(ContractError, match="exceeds"):
        PoolShard("p", "u" * MAX_POOL_SHARD_BYTES, ()).encode()


@pytest.mark.parametrize(
    "hashes", [b"", b"a" * 31, b"b" * 32 + b"a" * 32, b"a" * 64, b"a" * 32 + b"b"], ids=len
)  # fmt: skip
def test_hashes_out_of_form_or_order_are_refused(hashes: bytes) -> None:
    with pytest.raises(ContractError):
        version("a", hashes=hashes)
    with pytest.raises(ContractError):
        read_manifest(hashes, digest_bytes(hashes))


def test_a_manifest_is_read_under_its_own_digest_only() -> None:
    assert read_manifest(HASHES, version("a").manifest) == chunk_hashes(HASHES)
    with pytest.raises(ContractError, match="name"):
        read_manifest(HASHES, digest_bytes(b""))


@pytest.mark.parametrize(
    "change",
    [{"keyspace": "acme"}, {"state": "Ready"}, {"hashes": "?"}, {"hashes": None}, {"tiers": [1]}, {"tiers": ["x"] * 17},
     {"keys": [{}]}, {"keys": [to_wire(KEY)] * 2}, {"beforeReadySeconds": 121}, {"beforeReadySeconds": True},
     {"renderID": 1}, {"budgets": [{}]}],
)  # fmt: skip
def test_a_malformed_version_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        from_wire(PoolVersion, to_wire(version("a")) | change)


def test_a_shard_of_another_digest_is_refused() -> None:
    data = PoolShard("docs", "u", (version("a"),)).encode()
    with pytest.raises(ContractError, match="digest"):
        PoolShard.decode(data, digest_bytes(b""))


@given(st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
def test_anything_else_than_a_pools_shard_is_a_contract_error(data: bytes) -> None:
    with pytest.raises(ContractError):
        PoolShard.decode(data, digest_bytes(data))


def test_a_pool_has_two_versions_at_the_most_in_keyspaces_of_their_own() -> None:
    with pytest.raises(ContractError):
        PoolShard("docs", "u", (version("a"), version("b"), version("c")))
    with pytest.raises(ContractError):
        PoolShard("docs", "u", (version("a"), version("a")))


@pytest.mark.parametrize(
    "pools",
    [[(1, "a"), (0, "a")], [(0, "a"), (0, "b")], [(MAX_POOLS, "a")], [(-1, "a")], [(0, "c")]],
)
def test_a_root_with_pools_out_of_order_or_in_unknown_slots_is_refused(pools: list[tuple[int, str]]) -> None:
    raw = json.loads(bundle([], []).root.encode())
    raw["pools"] = [{"index": i, "slot": s, "digest": "d", "since": 1} for i, s in pools]
    with pytest.raises(ContractError):
        Root.decode(json.dumps(raw).encode())


def test_a_pool_that_goes_leaves_a_gap_and_moves_no_other() -> None:
    root = replace(bundle([], []).root, pools=(PoolRef(0, "a", "d", 1), PoolRef(2, "b", "e", 2)))
    assert Root.decode(root.encode()) == root
    assert shard_name("kvs-tiny-bundle", 2, root.pools[1].other_slot) == "kvs-tiny-bundle-p2a"


@pytest.mark.parametrize(
    "pools",
    [
        [PoolShard("docs", "u", ()), PoolShard("docs", "v", ())],
        [PoolShard("docs", "u", (version("b"),)), PoolShard("tools", "v", (version("b"),))],
        [PoolShard("docs", "u", (version("a"),))],
    ],
)
def test_pools_that_share_a_name_or_a_keyspace_make_no_bundle(pools: list[PoolShard]) -> None:
    with pytest.raises(ContractError):
        bundle([entry("acme", "a")], pools)


def test_a_view_allows_pools_and_lets_readers_read_published_versions_in_order() -> None:
    docs = PoolShard("docs", "u", (version("c", keys=(KEY,)), version("b")))
    tools = PoolShard("tools", "v", (version("e", PoolState.WARMING),))
    more = PoolShard("more", "w", (version("f"),))
    some = bundle([entry("acme", "a", "more", "gone", "tools", "docs"), entry("globex", "d")], [docs, tools, more])
    view = CacheView.of(some)
    assert CacheView.decode(view.encode()) == view
    assert set(view.keyspaces) == {letter * 32 for letter in "abcdef"} == set(some.keyspaces)
    assert set(view.pools) == {letter * 32 for letter in "bcef"} == set(some.pool_keyspaces)
    assert view.reads == {"a" * 32: ("f" * 32, "c" * 32, "b" * 32)}
    assert view.generations == {"c" * 32: (1,)}
    assert data_keys(some) == {"c" * 32: (KEY,)}
    assert manifests(some) == {digest_bytes(HASHES): HASHES}


def test_nothing_of_a_pool_is_allowed_while_reuse_is_off() -> None:
    off = bundle([entry("acme", "a", "docs")], [PoolShard("docs", "u", (version("b", keys=(KEY,)),))], "Disabled")
    view = CacheView.of(off)
    assert (view.keyspaces, view.pools, view.reads, data_keys(off), manifests(off)) == ({}, {}, {}, {}, {})


@pytest.mark.parametrize(
    "change",
    [
        {"reads": {"a" * 32: ["c" * 32]}},
        {"reads": {"e" * 32: ["b" * 32]}},
        {"reads": {"b" * 32: ["b" * 32]}},
        {"reads": {"a" * 32: ["b" * 32] * 2}},
        {"reads": {"a" * 32: ["d" * 32]}},
        {"reads": []},
        {"pools": {"e" * 32: {"manifest": "0" * 64, "published": True, "tiers": []}}},
        {"pools": {"b" * 32: {"manifest": "../" + "0" * 61, "published": True, "tiers": []}}},
        {"pools": {"b" * 32: {"manifest": "0" * 64, "published": 1, "tiers": []}}},
    ],
)
def test_a_view_whose_pools_fit_nothing_in_it_is_refused(change: dict[str, object]) -> None:
    pools = [PoolShard("docs", "u", (version("b"), version("d", PoolState.WARMING)))]
    raw = json.loads(CacheView.of(bundle([entry("acme", "a", "docs")], pools)).encode())
    assert CacheView.decode(json.dumps(raw).encode()).reads == {"a" * 32: ("b" * 32,)}
    with pytest.raises(ContractError):
        CacheView.decode(json.dumps(raw | change).encode())


def test_no_hash_and_no_tenant_is_in_a_view() -> None:
    text = CacheView.of(bundle([entry("acme", "a", "docs")], [PoolShard("docs", "u", (version("b"),))])).encode()
    assert b"acme" not in text
    assert b"docs" not in text
    assert chunk_hashes(HASHES)[1].hex().encode() not in text


pool_lists = st.lists(st.sampled_from("pqrst"), unique=True, max_size=5)


@given(st.lists(st.tuples(st.sampled_from("ab"), pool_lists, st.booleans()), max_size=6))
def test_a_keyspace_reads_what_each_of_its_tenants_may(group: list[tuple[str, list[str], bool]]) -> None:
    entries = [entry(f"t{n}", k, *pools, suspended=gone) for n, (k, pools, gone) in enumerate(group)]
    found = effective_pools(entries)
    for keyspace in "ab":
        sharing = [set(pools) for k, pools, gone in group if k == keyspace and not gone]
        assert set(found.get(keyspace * 32, ())) == (set.intersection(*sharing) if sharing else set())
    for order in permutations(entries[:4]):
        assert effective_pools([*order, *entries[4:]]) == found


def test_a_suspended_tenant_reads_nothing() -> None:
    some = bundle([entry("acme", "a", "docs", suspended=True)], [PoolShard("docs", "u", (version("b"),))])
    assert reads_of(some) == {}
