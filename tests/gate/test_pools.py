"""Pools in the gate: read whole or not at all, given to the cache server as files, and minted for nobody."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Bundle, Entry, Root, Rules
from kvstrata.contract.policy.cache_view import MANIFESTS_DIRECTORY, POLICY_FILE, CacheView
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes, shard_name
from kvstrata.contract.wire import digest_bytes
from kvstrata_sidecar.gate.policy.grants import decide
from kvstrata_sidecar.gate.policy.volume import NamedFiles, PolicyVolume

from .test_real_adapter import runtime
from .world import BUNDLE, KEYS, World, chat, entry, keyspace, post, until

KEY = DataKey(1, b"k" * 32)


def hashes(*numbers: int) -> bytes:
    return pack_hashes(bytes([number]) * 32 for number in numbers)


def version(
    name: str, *chunks: int, state: PoolState = PoolState.PUBLISHED, keys: tuple[DataKey, ...] = ()
) -> PoolVersion:
    return PoolVersion(keyspace(name), "render", state, hashes(*chunks), ("shared",), keys=keys)


def pool(name: str, *versions: PoolVersion) -> PoolShard:
    return PoolShard(name, f"uid-{name}", versions)


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / MANIFESTS_DIRECTORY).iterdir()}


def view_of(world: World) -> CacheView:
    return CacheView.decode((world.directory / "policy" / POLICY_FILE).read_bytes())


async def test_a_pool_is_on_the_volume_before_the_policy_that_names_it_and_goes_after_it_was_applied(
    world: World,
) -> None:
    shard = pool("docs", version("docs-1", 1, 2, keys=(KEY,)))
    await world.publish([entry("acme", pools=("docs",))], pools={3: shard})
    async with world.started():
        await world.acked(1)
        policy = world.directory / "policy"
        assert listing(policy) == {shard.versions[0].manifest: hashes(1, 2)}
        assert (policy / KEYS_DIRECTORY / f"{keyspace('docs-1')}.1").read_bytes() == KEY.secret
        assert view_of(world).reads == {keyspace("acme"): (keyspace("docs-1"),)}
        world.adapter.gate.clear()
        revision = await world.publish([entry("acme")], pools={3: pool("docs", version("docs-2", 3))})
        await until(lambda: world.gate.enforcement.revision == revision)
        assert set(listing(policy).values()) == {hashes(1, 2), hashes(3)}
        assert not (policy / KEYS_DIRECTORY / f"{keyspace('docs-1')}.1").exists()
        world.adapter.gate.set()
        await world.acked(revision)
        assert set(listing(policy).values()) == {hashes(3)}


async def test_only_a_pool_that_changed_is_read(world: World) -> None:
    tenants = [entry("acme", pools=("docs", "tools"))]
    docs, tools = pool("docs", version("d", 1)), pool("tools", version("t", 2))
    await world.publish(tenants, pools={0: docs, 1: tools})
    async with world.started():
        await world.acked(1)
        world.api.gets.clear()
        revision = await world.publish(tenants, pools={0: docs, 1: pool("tools", version("t2", 2))})
        await world.acked(revision)
        assert [name for name in world.api.gets if name not in (BUNDLE, KEYS)] == [shard_name(BUNDLE, 1, "b")]


async def test_a_root_whose_pool_is_missing_is_not_adopted_until_it_is_there(world: World) -> None:
    await world.publish([entry("acme")])
    async with world.started():
        await world.acked(1)
        shard = pool("docs", version("d", 1))
        await world.publish([entry("acme", pools=("docs",))], pools={0: shard})
        await world.acked(2)
        gone = replace(world.root.pools[0], slot="b", digest="0" * 64)
        await world.api.put(BUNDLE, {ROOT_DATA_KEY: replace(world.root, revision=3, pools=(gone,)).encode()})
        await until(lambda: "does not exist" in world.gate.bundles.problem)
        assert world.gate.enforcement.revision == 2
        data = world.api.secrets[shard_name(BUNDLE, 0, "a")]
        world.api.secrets[shard_name(BUNDLE, 0, "b")] = data
        await world.api.put(BUNDLE, {ROOT_DATA_KEY: replace(world.root, revision=4, pools=(gone,)).encode()})
        await until(lambda: "digest" in world.gate.bundles.problem)
        assert world.gate.enforcement.revision == 2
        whole = replace(gone, digest=digest_bytes(shard.encode()))
        await world.api.put(BUNDLE, {ROOT_DATA_KEY: replace(world.root, revision=5, pools=(whole,)).encode()})
        await world.acked(5)


async def test_a_pool_in_a_tenants_keyspace_is_not_adopted(world: World) -> None:
    await world.publish([entry("acme")])
    async with world.started():
        await world.acked(1)
        await world.publish([entry("acme")], pools={0: pool("docs", version("acme", 1))})
        await until(lambda: "keyspace" in world.gate.bundles.problem)
        assert world.gate.enforcement.revision == 1


async def test_reuse_that_is_off_leaves_nothing_of_pools(world: World) -> None:
    shard = pool("docs", version("d", 1, keys=(KEY,)))
    await world.publish([entry("acme", pools=("docs",))], pools={0: shard})
    async with world.started():
        await world.acked(1)
        revision = await world.publish([entry("acme", pools=("docs",))], Rules(reuse="Disabled", drain_timeout_s=1))
        await world.acked(revision)
        policy = world.directory / "policy"
        assert (listing(policy), list((policy / KEYS_DIRECTORY).iterdir())) == ({}, [])
        assert (view_of(world).keyspaces, view_of(world).pools, view_of(world).reads) == ({}, {}, {})


async def test_the_adapter_reads_what_the_gate_writes_of_pools(world: World) -> None:
    await world.adapter.stop()
    docs = pool("docs", version("d2", 2, 3, state=PoolState.WARMING), version("d1", 1, 2))
    await world.publish([entry("acme", pools=("docs",)), entry("globex")], pools={0: docs})
    async with world.started():
        adapter = await asyncio.to_thread(runtime, world)
        try:
            await world.acked(1)
            readable = adapter.enforcement.readable
            assert readable.candidates(keyspace("acme"), bytes([2]) * 32) == (keyspace("d1"),)
            assert readable.candidates(keyspace("globex"), bytes([2]) * 32) == ()
            assert readable.admits(keyspace("d2"), bytes([3]) * 32, "shared")
            revision = await world.publish([entry("acme", pools=("docs",))], pools={})
            await world.acked(revision)
            assert adapter.enforcement.readable.candidates(keyspace("acme"), bytes([2]) * 32) == ()
        finally:
            await asyncio.to_thread(adapter.close)


async def test_no_caller_gets_a_pools_keyspace_by_asking_for_it(world: World) -> None:
    await world.publish([entry("acme", pools=("docs",))], pools={0: pool("docs", version("d", 1))})
    async with world.started():
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        asked = await world.ask(post("/v1/chat/completions", chat(cache_salt=keyspace("d"))))
        assert asked.status == 400
        assert not world.engine.requests
        await world.ask(post("/v1/chat/completions", chat()))
        assert world.engine.requests[-1].json["cache_salt"] == keyspace("acme")


class TestNamedFiles:
    def test_what_a_predecessor_left_is_replaced_or_goes(self, tmp_path: Path) -> None:
        (tmp_path / MANIFESTS_DIRECTORY).mkdir()
        named, left = digest_bytes(hashes(1)), digest_bytes(hashes(9))
        for name in (named, left, ".draft"):
            (tmp_path / MANIFESTS_DIRECTORY / name).write_bytes(b"half")
        files = NamedFiles(tmp_path / MANIFESTS_DIRECTORY)
        files.add({named: hashes(1)})
        assert listing(tmp_path)[named] == hashes(1)
        files.retain()
        assert listing(tmp_path) == {named: hashes(1)}

    def test_a_bundle_without_pools_makes_no_directory(self, tmp_path: Path) -> None:
        files = NamedFiles(tmp_path / MANIFESTS_DIRECTORY)
        files.add({})
        files.retain()
        assert list(tmp_path.iterdir()) == []

    def test_a_manifest_that_comes_back_is_written_again(self, tmp_path: Path) -> None:
        files, named = NamedFiles(tmp_path / MANIFESTS_DIRECTORY), digest_bytes(hashes(1))
        for _ in range(2):
            files.add({named: hashes(1)})
            files.add({})
            files.retain()
            assert listing(tmp_path) == {}

    def test_a_policy_whose_manifests_cannot_be_written_is_not_written(self, tmp_path: Path) -> None:
        volume = PolicyVolume(tmp_path)
        (tmp_path / MANIFESTS_DIRECTORY).write_bytes(b"in the way")
        root = Root("d" * 16, "m", "u", 1, 1, Rules(), ())
        with pytest.raises(FileExistsError):
            volume.write_policy(Bundle.assemble(root, [], [pool("docs", version("d", 1))]))
        assert not (tmp_path / POLICY_FILE).exists()
        volume.close()


letters = st.sampled_from("abcdef")
entries = st.builds(
    lambda name, space, pools, suspended: entry(name, space, pools=tuple(pools), suspended=suspended),
    st.sampled_from(["t0", "t1", "t2"]), letters, st.lists(st.sampled_from(["p", "q"]), unique=True), st.booleans(),
)  # fmt: skip


@given(
    st.lists(entries, max_size=3, unique_by=lambda one: one.tenant),
    st.lists(st.tuples(letters, st.sampled_from(PoolState)), max_size=2, unique_by=lambda one: one[0]),
    st.sampled_from(["NoReuse", "Refuse"]),
    st.sampled_from(["Fence", "ServeStale"]),
    st.booleans(),
    st.sampled_from(["t0", "t1", "t2", "p", "q", "uid-p"]),
)
def test_no_tenant_is_granted_a_pools_keyspace(
    some: list[Entry], contents: list[tuple[str, PoolState]], unknown: str, stale: str, fresh: bool, who: str
) -> None:
    """Whatever a bundle holds that gates adopt: no request is sent with a pool's keyspace, whoever sends it."""
    shards = [pool(name, version(space, 1, state=state)) for name, (space, state) in zip("pq", contents, strict=False)]
    root = Root("d" * 16, "m", "u", 1, 1, Rules(unknown_tenants=unknown, on_stale=stale), ())
    try:
        bundle = Bundle.assemble(root, some, shards)
    except ContractError:
        assert {one.keyspace for one in some} & {keyspace(space) for space, _ in contents}
        return
    if unknown == "Refuse" and who not in bundle.entries:
        return
    assert decide(bundle, who, fresh, "", lambda: "random").salt not in bundle.pool_keyspaces
