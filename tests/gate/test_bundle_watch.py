"""Reading the bundle: only whole, only forward, and stale rather than wrong."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Bundle, Root, Rules
from kvstrata_sidecar.gate.policy.enforcement import Freshness
from kvstrata_sidecar.gate.policy.grants import decide
from kvstrata_sidecar.gate.policy.volume import PolicyVolume

from .stand_ins import plain_answer
from .world import BUNDLE, KEYS, World, entry, keyspace, post, until


async def test_only_shards_that_changed_are_read(world: World) -> None:
    tenants = [entry(f"tenant-{number}") for number in range(600)]
    revision = await world.publish(tenants)
    assert len(world.root.shards) > 1
    async with world.started():
        await world.acked(revision)
        world.api.gets.clear()
        revision = await world.publish([entry("tenant-0", "rolled"), *tenants[1:]])
        await world.acked(revision)
        read = [name for name in world.api.gets if name not in (BUNDLE, KEYS)]
        assert len(read) == 1
        assert read[0].endswith("b")
        assert len(world.gate.enforcement.bundle.entries) == 600  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [{"revision": 1}, {"revision": 9, "term": 0}], ids=["revision", "term"])
async def test_a_bundle_that_goes_back_is_refused(world: World, change: dict[str, int]) -> None:
    await world.publish([entry("acme")])
    revision = await world.publish([entry("acme", "acme-2")])
    async with world.started():
        await world.acked(revision)
        await world.publish([entry("acme", "acme")], **change)  # type: ignore[arg-type]
        await until(lambda: "went back" in world.gate.bundles.problem)
        assert world.gate.enforcement.bundle.entries["acme"].keyspace == keyspace("acme-2")  # type: ignore[union-attr]
        assert world.gate.enforcement.revision == revision
        assert "went back" in world.gate.state().problem


async def test_a_gate_that_restarts_refuses_what_its_pod_has_left_behind(world: World) -> None:
    await world.publish([entry("acme")], revision=7, term=3)
    async with world.started():
        await world.acked(7)
    await world.publish([entry("acme")], revision=6, term=3)
    async with world.started():
        await until(lambda: "went back" in world.gate.bundles.problem)
        assert world.gate.enforcement.bundle is None


async def test_a_shard_that_does_not_match_its_digest_changes_nothing(gate: World) -> None:
    before = gate.gate.enforcement.revision
    broken = replace(gate.root, revision=before + 1, shards=(replace(gate.root.shards[0], digest="0" * 64),))
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: broken.encode()})
    await until(lambda: "digest" in gate.gate.bundles.problem)
    assert gate.gate.enforcement.revision == before
    assert gate.gate.state().seen == before


async def test_a_shard_that_is_missing_changes_nothing_until_it_is_there(gate: World) -> None:
    before = gate.gate.enforcement.revision
    flipped = replace(gate.root.shards[0], slot="b")
    shard = gate.api.secrets[f"{BUNDLE}-0a"]
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: replace(gate.root, revision=before + 1).encode()})
    await gate.acked(before + 1)
    missing = replace(gate.root, revision=before + 2, shards=(replace(flipped, digest="1" * 64),))
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: missing.encode()})
    await until(lambda: "does not exist" in gate.gate.bundles.problem)
    assert gate.gate.enforcement.revision == before + 1
    gate.api.secrets[f"{BUNDLE}-0b"] = shard
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: replace(gate.root, revision=before + 3).encode()})
    await gate.acked(before + 3)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"contract":99}', b"\xff"])
async def test_a_malformed_root_changes_nothing(gate: World, data: bytes) -> None:
    before = gate.gate.enforcement.revision
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: data})
    await until(lambda: gate.gate.bundles.problem)
    assert gate.gate.enforcement.revision == before
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}))).status == 200


async def test_a_bundle_of_another_model_is_refused(gate: World) -> None:
    before = gate.gate.enforcement.revision
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: replace(gate.root, revision=before + 1, model="other").encode()})
    await until(lambda: "belongs to" in gate.gate.bundles.problem)
    assert gate.gate.enforcement.revision == before


async def test_a_replaced_model_object_is_refused(gate: World) -> None:
    before = gate.gate.enforcement.revision
    await gate.api.put(BUNDLE, {ROOT_DATA_KEY: replace(gate.root, revision=before + 1, model_uid="new").encode()})
    await until(lambda: "another CachedModel" in gate.gate.bundles.problem)
    assert not gate.gate.enforcement.fresh()


@pytest.mark.parametrize("on_stale", ["Fence", "ServeStale"])
async def test_a_gate_whose_bundle_was_deleted_fences_at_once(world: World, on_stale: str) -> None:
    """Regardless of `staleAfter` and `onStale`; running requests get their time, and a new bundle ends it."""
    rules = Rules(stale_after_s=86_400, on_stale=on_stale)
    revision = await world.publish([entry("acme")], rules)
    async with world.started():
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        enforcement, running = world.gate.enforcement, Running()
        enforcement.admit(running, "acme", keyspace("acme"))
        await world.api.delete(BUNDLE)
        await until(lambda: enforcement.gone)
        assert (await world.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
        assert world.engine.requests[-1].json["cache_salt"] != keyspace("acme")
        assert (world.directory / "policy" / "freshness").read_bytes() == bytes(8)
        assert not world.gate.state().fresh
        bounded = enforcement.in_flight[running].deadline - asyncio.get_running_loop().time()
        assert rules.stale_after_s < bounded <= rules.longest_s
        await world.acked(await world.publish([entry("acme")], rules))
        await world.ask(post("/v1/completions", {"prompt": "a"}))
        assert world.engine.requests[-1].json["cache_salt"] == keyspace("acme")
        await until(lambda: enforcement.in_flight[running].deadline == float("inf"))
        enforcement.release(running)
        assert not running.aborted


async def test_a_bundle_that_goes_back_or_that_may_not_be_read_is_not_deleted(gate: World) -> None:
    await gate.publish([entry("acme")], revision=0)
    await until(lambda: "went back" in gate.gate.bundles.problem)
    gate.api.token = "another"
    await gate.gate.bundles.refresh()
    assert "401" in gate.gate.bundles.problem
    assert gate.gate.enforcement.fresh()


class Running:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


STALE_AFTER_S = 60


def grow_stale(world: World, after_s: int = STALE_AFTER_S) -> None:
    """Let the policy be older than it may be by its own clock, and no time pass for anything else."""
    real = world.gate.freshness.now_ns
    world.gate.freshness.now_ns = lambda: real() + (after_s + 1) * 1_000_000_000
    assert not world.gate.enforcement.fresh()


async def test_without_the_api_server_the_gate_serves_and_then_fences(world: World) -> None:
    revision = await world.publish([entry("acme")], Rules(stale_after_s=STALE_AFTER_S, drain_timeout_s=1))
    async with world.started():
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        world.api.broken = True
        await world.ask(post("/v1/completions", {"prompt": "a"}))
        assert world.engine.requests[-1].json["cache_salt"] == keyspace("acme")
        grow_stale(world)
        assert (await world.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
        fenced = world.engine.requests[-1].json["cache_salt"]
        assert fenced != keyspace("acme")
        assert not world.gate.state().fresh
        world.api.broken = False
        assert await world.gate.bundles.refresh()
        await world.ask(post("/v1/completions", {"prompt": "a"}))
        assert world.engine.requests[-1].json["cache_salt"] == keyspace("acme")


async def test_what_the_api_server_says_of_an_error_is_told(gate: World) -> None:
    gate.api.broken = True
    await gate.gate.bundles.refresh()
    assert gate.gate.bundles.problem == "the API server answered 500: broken"


async def test_a_root_that_cannot_be_adopted_makes_the_policy_stale(world: World) -> None:
    await world.publish([entry("acme")], Rules(stale_after_s=2), revision=5)
    async with world.started():
        await world.acked(5)
        await world.publish([entry("acme")], revision=4)
        await until(lambda: not world.gate.enforcement.fresh())


async def test_a_request_outlives_a_policy_gone_stale_by_the_longest_duration_only(world: World) -> None:
    async def never(request, writer):  # type: ignore[no-untyped-def]
        await asyncio.Event().wait()

    world.engine.handler = never
    revision = await world.publish([entry("acme")], Rules(stale_after_s=STALE_AFTER_S, max_request_s=1))
    async with world.started():
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        running = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        world.api.broken = True
        grow_stale(world)
        answer = await asyncio.wait_for(running, 60)
        assert (answer.status, answer.error["code"]) == (503, "policy_changed")


async def test_a_stream_that_runs_when_the_api_server_goes_ends_whole(world: World) -> None:
    """With default rules: after five minutes without it new requests have no reuse, and running ones go on."""
    released = asyncio.Event()

    async def wait(request, writer):  # type: ignore[no-untyped-def]
        await released.wait()
        await plain_answer(request, writer)

    world.engine.handler = wait
    revision = await world.publish([entry("acme")], Rules())
    async with world.started():
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        running = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        world.api.broken = True
        grow_stale(world, Rules().stale_after_s)
        (hold,) = world.gate.enforcement.in_flight.values()
        await until(lambda: hold.deadline < float("inf"))
        assert hold.deadline - asyncio.get_running_loop().time() > 10 * 60
        released.set()
        assert (await running).status == 200


async def test_a_policy_confirmed_in_time_lets_requests_run_on(world: World) -> None:
    released = asyncio.Event()

    async def wait(request, writer):  # type: ignore[no-untyped-def]
        await released.wait()
        await plain_answer(request, writer)

    world.engine.handler = wait
    revision = await world.publish([entry("acme")], Rules(stale_after_s=STALE_AFTER_S, max_request_s=5))
    async with world.started():
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        running = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        world.api.broken = True
        grow_stale(world)
        (hold,) = world.gate.enforcement.in_flight.values()
        await until(lambda: hold.deadline < float("inf"))
        world.api.broken = False
        assert await world.gate.bundles.refresh()
        await asyncio.sleep(5.5)
        released.set()
        assert (await running).status == 200


async def test_a_new_kubernetes_token_is_taken_up(gate: World) -> None:
    gate.api.token = "renewed"
    (gate.directory / "kube-token").write_text("renewed")
    await gate.acked(await gate.publish([entry("acme", "acme-2")]))


async def test_serve_stale_goes_on_with_the_keyspace() -> None:
    bundle = Bundle(Root("d", "m", "u", 1, 1, Rules(on_stale="ServeStale"), ()), {"acme": entry("acme")})
    assert decide(bundle, "acme", False, "", lambda: "random").salt == keyspace("acme")


def test_fencing_starts_right_after_stale_after() -> None:
    now = [1_000_000_000]
    freshness = Freshness(lambda: now[0])
    bundle = Bundle(Root("d", "m", "u", 1, 1, Rules(stale_after_s=300), ()), {"acme": entry("acme")})
    assert not freshness.fresh(300)
    freshness.confirm(freshness.now_ns())
    now[0] += 300 * 1_000_000_000
    assert decide(bundle, "acme", freshness.fresh(300), "", lambda: "random").salt == keyspace("acme")
    now[0] += 1
    assert decide(bundle, "acme", freshness.fresh(300), "", lambda: "random").salt == "random"
    assert freshness.age_ms() == 300_000


def test_an_answer_that_overtakes_another_does_not_age_the_policy() -> None:
    freshness = Freshness(lambda: 100)
    freshness.confirm(90)
    freshness.confirm(50)
    assert freshness.sent_ns == 90


def test_a_clock_that_ran_backwards_is_not_fresh() -> None:
    now = [10**12]
    freshness = Freshness(lambda: now[0])
    freshness.confirm(now[0])
    now[0] -= 1
    assert not freshness.fresh(300)


async def test_freshness_counts_from_the_sending_of_the_read(world: World) -> None:
    await world.publish([entry("acme")])
    async with world.started():
        await world.acked(1)
        (written,) = struct.unpack("<Q", (world.directory / "policy" / "freshness").read_bytes())
        assert written == world.gate.freshness.sent_ns
        sent = world.gate.freshness.now_ns()
        original, asked = world.gate.api.get_secret, list[int]()

        async def slow(name: str):  # type: ignore[no-untyped-def]
            asked.append(world.gate.freshness.now_ns())
            value = await original(name)
            await asyncio.sleep(0.2)
            return value

        world.gate.api.get_secret = slow  # type: ignore[method-assign]
        await world.gate.bundles.refresh()
        assert sent <= world.gate.freshness.sent_ns <= asked[-1]


def test_a_new_gate_does_not_inherit_freshness(tmp_path: Path) -> None:
    (tmp_path / "freshness").write_bytes(struct.pack("<Q", 12345))
    PolicyVolume(tmp_path).close()
    assert (tmp_path / "freshness").read_bytes() == bytes(8)
