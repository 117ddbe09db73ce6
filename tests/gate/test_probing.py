"""The isolation probe at the operator's port: what it finds, what it does not call found, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.erase import AdapterVerified, VerifiedTier, VerifyRequest
from kvstrata.contract.messages.pod_state import ACK_TOKEN_HEADER
from kvstrata.contract.messages.probe import ENGINE, PROBE_PATH, Probed, ProbedTier, ProbeOutcome, ProbeRequest
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Entry, Rules
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.control import probe as probing
from kvstrata_sidecar.gate.control.probe import cast

from . import pki
from .stand_ins import EngineRequest, whole
from .tokenizers import Merges
from .world import World, entry, keyspace, until

BLOCK_TOKENS = 4
PROBE = ProbeRequest(1).encode()


class CachingEngine:
    """An engine whose prefix cache goes by salts and blocks of four tokens; it stores whole chunks in the tier."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tokenizer = Merges([("t", "h")])
        self.salts: list[str] = []
        self.prompts: list[int] = []
        self.seen: dict[str, set[tuple[int, ...]]] = {}
        self.ignores_salts = False
        self.caches = True
        self.stores = True
        self.held = asyncio.Event()
        self.held.set()
        self.called: Any = lambda: None

    async def __call__(self, request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        if request.path != "/tokenize":
            await self.held.wait()
        await whole(writer, 200, json.dumps(self.answer(request.path, request.json)).encode())

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": self.tokenizer.ids(body["prompt"]), "max_model_len": 2048}
        self.called()
        ids, salt = body["prompt"], body["cache_salt"]
        self.salts.append(salt)
        self.prompts.append(len(ids))
        seen = self.seen.setdefault("" if self.ignores_salts else salt, set())
        blocks = [tuple(ids[:end]) for end in range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS)]
        cached = BLOCK_TOKENS * sum(block in seen for block in blocks) if self.caches else 0
        seen.update(blocks)
        if self.stores:
            self.store(salt, self._world.adapter.named(b"".join(one.to_bytes(4, "little") for one in ids)).hashes)
        return {"choices": [{}], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}

    def store(self, salt: str, hashes: bytes) -> None:
        """Store whole chunks in the stand-in tier."""
        self._world.adapter.held.setdefault(salt, set()).update(chunks(hashes))


def chunks(names: bytes) -> set[bytes]:
    return {names[at : at + CHUNK_HASH_BYTES] for at in range(0, len(names), CHUNK_HASH_BYTES)}


class Tier:
    """What the stand-in adapter's tier finds, which may be broken."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ignores_keyspaces = False
        self.ignores_names = False
        self.refused: set[str] = set()
        self.passing: list[str] = []
        """Keyspaces for which the memory that is no tier finds something, each once."""
        self.asked: list[str] = []
        world.adapter.verification = self.verification  # type: ignore[method-assign]

    def verification(self, question: VerifyRequest) -> AdapterVerified:
        adapter = self._world.adapter
        self.asked.append(question.keyspace)
        everybody: set[bytes] = set().union(*adapter.held.values())
        there = everybody if self.ignores_keyspaces else adapter.held.get(question.keyspace, set())
        found = int(bool(there) if self.ignores_names else chunks(question.chunks or b"") <= there)
        refusal = "Unknown" if question.keyspace in self.refused else ""
        row = VerifiedTier("shared", "Redis", 1, 0 if refusal else found, refusal, None)
        passes = question.keyspace in self.passing
        self.passing = [one for one in self.passing if one != question.keyspace]
        passage = VerifiedTier("", "CPU", 1, int(passes), "", 0)
        return AdapterVerified(adapter.boot, adapter.revision, adapter.term, True, True, 1, (row, passage))


def member(tenant: str, group: str) -> Entry:
    return replace(entry(tenant, group), scope=Scope(ScopeKind.GROUP, group))


def engine_of(world: World) -> CachingEngine:
    assert isinstance(world.engine.handler, CachingEngine)
    return world.engine.handler


@pytest.fixture
async def pod(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A gate in force for two tenants and a group, whose engine and tier keep them apart."""
    monkeypatch.setattr(probing, "STORED_WITHIN_S", 0.3)
    world.engine.handler = CachingEngine(world)
    world.tier = Tier(world)  # type: ignore[attr-defined]
    await world.publish([entry("acme"), entry("globex"), member("ann", "lab"), member("bob", "lab")])
    async with world.started():
        await world.acked(1)
        await until(lambda: world.gate.engine_ready)
        yield world


def tier_of(world: World) -> Tier:
    return world.tier  # type: ignore[attr-defined, no-any-return]


async def probed(world: World, request: bytes = PROBE) -> Probed:
    said = await world_says(world, request)
    await until(lambda: not world.gate.prober._tidying)
    return said


async def world_says(world: World, request: bytes) -> Probed:
    connection = await world.connect("control", pki.client_context(world.operator_tls, present=True))
    try:
        head = f"POST {PROBE_PATH} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        await connection.send(f"{head}Content-Length: {len(request)}\r\n\r\n".encode() + request)
        answer = await asyncio.wait_for(connection.answer(), 30)
    finally:
        connection.close()
    assert answer.status == 200, answer.body
    assert answer.headers[ACK_TOKEN_HEADER.lower()] == "the-pods-token"
    assert not any(keyspace(name).encode() in answer.body for name in ("acme", "globex", "lab"))
    return Probed.decode(answer.body)


async def test_others_miss_between_two_controls_that_hit_and_nothing_is_left(pod: World) -> None:
    said = await probed(pod)
    assert (said.outcome, said.scopes, said.looked) == (ProbeOutcome.ISOLATED, 3, 2)
    rows = {row.tier or row.medium: row for row in said.tiers}
    assert rows == {
        "shared": ProbedTier("shared", "Redis", 2, 2, 2, 0, 0, 1, 0),
        ENGINE: ProbedTier("", ENGINE, 2, 2, 1, 0, 0, 0, 0),
    }
    assert (said.gate_boot, said.cache_boot, said.revision) == (pod.gate.boot, "boot-1", 1)
    # The first and the last to look are of the scope that stored it.
    assert tier_of(pod).asked[0] == tier_of(pod).asked[-1] == engine_of(pod).salts[0]
    assert not any(pod.adapter.held.values())
    assert len(pod.adapter.forgotten) == 1


async def test_only_the_writers_first_prompt_makes_a_whole_chunk(pod: World) -> None:
    await probed(pod)
    size = pod.adapter.chunk_tokens
    assert [length >= size for length in engine_of(pod).prompts] == [True, False, False, False]


async def test_the_engine_generates_one_token_for_each_prompt(pod: World) -> None:
    await probed(pod)
    asked = [request.json for request in pod.engine.requests if request.path == "/v1/completions"]
    assert {(body["max_tokens"], body["temperature"], body["model"]) for body in asked} == {(1, 0, "tiny")}
    assert {len(body) for body in asked} == {5}


async def test_it_is_in_no_tenants_figures(pod: World) -> None:
    before = pod.gate.metrics_page()
    await probed(pod)
    after = pod.gate.metrics_page()
    names = (b"kvstrata_gate_requests", b"kvstrata_gate_prompt_tokens", b"kvstrata_gate_cached_tokens")
    for name in names:
        assert [line for line in after.splitlines() if line.startswith(name)] == [
            line for line in before.splitlines() if line.startswith(name)
        ]
    assert not pod.gate.enforcement.in_flight


async def test_a_tier_that_forgets_keyspaces_is_found(pod: World) -> None:
    tier_of(pod).ignores_keyspaces = True
    said = await probed(pod)
    assert said.outcome is ProbeOutcome.FOREIGN_HIT
    assert not said.clashes
    assert len(said.culprits) == 2
    assert {row.tier or row.medium: row.foreign_hits for row in said.tiers} == {"shared": 2, ENGINE: 0}


async def test_memory_that_is_no_tier_counts_only_for_those_who_must_find_nothing(pod: World) -> None:
    await pod.acked(await pod.publish([entry("acme"), entry("globex")]))
    engine = engine_of(pod)
    engine.called = lambda: tier_of(pod).passing.extend(engine.salts)
    said = await probed(pod)
    assert (said.outcome, said.proven, said.unproven) == (ProbeOutcome.ISOLATED, (ENGINE, "shared"), ())
    tier_of(pod).passing, engine.called = [keyspace("acme"), keyspace("globex")], lambda: None
    assert (await probed(pod)).outcome is ProbeOutcome.FOREIGN_HIT


async def test_an_engine_that_forgets_salts_is_found(pod: World) -> None:
    engine_of(pod).ignores_salts = True
    said = await probed(pod)
    assert said.outcome is ProbeOutcome.FOREIGN_HIT
    assert {row.tier or row.medium: row.foreign_hits for row in said.tiers} == {"shared": 0, ENGINE: 1}


async def test_a_tier_that_confuses_prompts_is_found(pod: World) -> None:
    tier_of(pod).ignores_names = True
    assert (await probed(pod)).outcome is ProbeOutcome.WRONG_HIT


async def test_two_of_many_scopes_with_one_keyspace_are_found_at_once(pod: World) -> None:
    many = [entry(f"tenant-{number}") for number in range(40)]
    await pod.acked(await pod.publish([*many, entry("twin", "tenant-7")]))
    said = await probed(pod)
    assert (said.outcome, said.clashes) == (ProbeOutcome.FOREIGN_HIT, True)
    assert set(said.culprits) == {"Tenant/tenant-7", "Tenant/twin"}
    assert all(row.foreign_hits for row in said.tiers)


async def test_two_scopes_with_one_keyspace_are_found_though_no_cache_answers(pod: World) -> None:
    await pod.acked(await pod.publish([entry("acme", "same"), entry("globex", "same")]))
    engine_of(pod).stores = engine_of(pod).caches = False
    assert (await probed(pod)).outcome is ProbeOutcome.FOREIGN_HIT


async def test_misses_where_nothing_was_stored_show_nothing(pod: World) -> None:
    engine_of(pod).stores = False
    said = await probed(pod)
    assert (said.outcome, said.proven, said.unproven) == (ProbeOutcome.ISOLATED, (ENGINE,), ("shared",))
    engine_of(pod).caches = False
    assert (await probed(pod)).outcome is ProbeOutcome.NO_CONTROL


async def looks_of_the_writer(pod: World) -> tuple[Probed, int]:
    """Probe two tenants, and return how often the tier was asked for the scope that stored."""
    await pod.acked(await pod.publish([entry("acme"), entry("globex")]))
    said = await probed(pod)
    return said, tier_of(pod).asked.count(engine_of(pod).salts[0])


async def test_a_chunk_that_is_stored_late_is_waited_for(pod: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "STORED_WITHIN_S", 60.0)
    monkeypatch.setattr(probing, "LOOK_S", 0.01)
    engine, tier = engine_of(pod), tier_of(pod)
    engine.stores = False
    real = tier.verification

    def verification(question: VerifyRequest) -> AdapterVerified:
        if len(tier.asked) == 2:
            engine.store(question.keyspace, question.chunks or b"")
        return real(question)

    pod.adapter.verification = verification  # type: ignore[method-assign]
    said, looks = await looks_of_the_writer(pod)
    row = next(row for row in said.tiers if row.tier)
    assert (said.outcome, row.controls, row.control_hits) == (ProbeOutcome.ISOLATED, 2, 2)
    assert looks == 3 + 1 + 1, "three until it was there, one for another prompt, one at the end"


async def test_what_is_there_at_once_or_turned_down_is_not_waited_for(
    pod: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "STORED_WITHIN_S", 3600.0)
    assert (await looks_of_the_writer(pod))[1] == 3
    tier_of(pod).asked.clear()
    tier_of(pod).refused = {keyspace("acme"), keyspace("globex")}
    engine_of(pod).salts.clear()
    assert (await looks_of_the_writer(pod))[1] == 3


async def test_what_is_not_stored_in_time_is_given_up(pod: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "LOOK_S", 0.01)
    engine_of(pod).stores = False
    begun = time.monotonic()
    said, _ = await looks_of_the_writer(pod)
    assert time.monotonic() - begun > 0.25
    assert said.unproven == ("shared",)


async def test_a_reader_that_is_turned_down_shows_nothing_of_names(pod: World) -> None:
    await pod.acked(await pod.publish([entry("acme"), entry("globex")]))
    tier_of(pod).refused = {keyspace("globex")}
    await pod.acked(
        await pod.publish([entry("acme"), replace(entry("globex"), budgets=(EnforcedBudget.denying("shared"),))])
    )
    said = await probed(pod)
    assert engine_of(pod).salts[0] == keyspace("acme"), "who is kept off a tier stores nothing there"
    assert said.unproven == ("shared",)
    assert next(row.refused for row in said.tiers if row.tier) == 1


async def test_who_has_no_limit_or_the_largest_one_stores(pod: World) -> None:
    def limited(tenant: str, limit_bytes: int | None) -> Entry:
        return replace(entry(tenant), budgets=(EnforcedBudget("shared", limit_bytes=limit_bytes),))

    await pod.acked(await pod.publish([limited("acme", 10), limited("globex", 1000), limited("initech", 100)]))
    await probed(pod)
    assert engine_of(pod).salts[0] == keyspace("globex")
    await pod.acked(await pod.publish([limited("acme", None), limited("globex", 1000)]))
    await probed(pod)
    assert keyspace("acme") in engine_of(pod).salts[4:5]


async def test_a_pool_that_the_writer_may_not_read_looks_too(pod: World) -> None:
    version = PoolVersion(keyspace("docs"), "r", PoolState.PUBLISHED, pack_hashes([bytes(32)]), ("shared",))
    await pod.acked(
        await pod.publish([entry("acme"), entry("globex")], pools={0: PoolShard("docs", "uid", (version,))})
    )
    said = await probed(pod)
    assert (said.outcome, said.looked) == (ProbeOutcome.ISOLATED, 2)
    assert keyspace("docs") in tier_of(pod).asked
    assert keyspace("docs") not in engine_of(pod).salts, "nobody asks the engine under a pool's keyspace"


@pytest.mark.parametrize(
    ("entries", "rules", "outcome"),
    [
        ([entry("acme")], Rules(), ProbeOutcome.ONE_SCOPE),
        ([entry("acme"), entry("globex", suspended=True)], Rules(), ProbeOutcome.ONE_SCOPE),
        ([entry("acme", suspended=True)], Rules(), ProbeOutcome.NO_REUSE),
        ([entry("acme"), entry("globex")], Rules(reuse="Disabled"), ProbeOutcome.NO_REUSE),
    ],
    ids=["one tenant", "one that is not suspended", "none", "reuse is off"],
)
async def test_where_nobody_can_be_told_apart_nothing_is_claimed_or_computed(
    pod: World, entries: list[Entry], rules: Rules, outcome: ProbeOutcome
) -> None:
    await pod.acked(await pod.publish(entries, rules))
    assert (await probed(pod)).outcome is outcome
    assert engine_of(pod).salts == []


async def test_a_stale_policy_is_not_probed(pod: World) -> None:
    await pod.acked(await pod.publish([entry("acme"), entry("globex")], Rules(stale_after_s=1)))
    pod.api.broken = True
    await until(lambda: not pod.gate.enforcement.fresh())
    assert (await probed(pod)).outcome is ProbeOutcome.NO_REUSE
    assert engine_of(pod).salts == []


async def test_a_policy_that_is_older_than_the_one_that_was_meant_is_not_probed(pod: World) -> None:
    assert (await probed(pod, ProbeRequest(2).encode())).outcome is ProbeOutcome.MOVED
    assert engine_of(pod).salts == []


async def test_an_epoch_that_rolls_in_the_middle_is_no_failure(pod: World) -> None:
    await pod.acked(await pod.publish([entry("acme"), entry("globex")]))
    engine_of(pod).held.clear()
    asking = asyncio.create_task(probed(pod))
    await until(lambda: pod.gate.calls._running)
    await pod.publish([entry("acme", "acme-2"), entry("globex", "globex-2")])
    await until(lambda: pod.gate.enforcement.revision == 3)
    engine_of(pod).held.set()
    assert (await asyncio.wait_for(asking, 30)).outcome is ProbeOutcome.MOVED


async def test_an_engine_that_does_not_answer_is_no_failure_and_nothing_is_left(pod: World) -> None:
    await pod.engine.stop()
    assert (await probed(pod)).outcome is ProbeOutcome.UNREADY
    assert not any(pod.adapter.held.values())


async def test_a_pod_without_its_cache_server_is_not_ready_to_be_probed(pod: World) -> None:
    await pod.adapter.stop()
    await until(lambda: not pod.gate.enforcement.cache_boot)
    said = await probed(pod)
    assert (said.outcome, said.cache_boot, said.revision, said.looked) == (ProbeOutcome.UNREADY, "", 1, 0)
    assert engine_of(pod).salts == []


async def test_a_pod_that_drains_is_not_probed(pod: World) -> None:
    pod.gate.drain.begin()
    assert (await probed(pod)).outcome is ProbeOutcome.UNREADY
    assert engine_of(pod).salts == []


async def test_nothing_of_a_probe_stays_in_the_gate(pod: World) -> None:
    await probed(pod)
    assert (pod.gate.calls._running, pod.gate.enforcement.in_flight) == (set(), {})


async def test_a_pod_that_drains_ends_its_probe(pod: World) -> None:
    engine_of(pod).held.clear()
    asking = asyncio.create_task(probed(pod))
    await until(lambda: pod.gate.calls._running)
    pod.gate.calls.abort_all()
    assert (await asyncio.wait_for(asking, 30)).outcome is ProbeOutcome.MOVED
    assert not pod.gate.enforcement.in_flight


async def test_a_caller_that_leaves_leaves_no_chunk_behind(pod: World) -> None:
    connection = await pod.connect("control", pki.client_context(pod.operator_tls, present=True))
    head = f"POST {PROBE_PATH} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
    engine_of(pod).called = connection.close
    await connection.send(f"{head}Content-Length: {len(PROBE)}\r\n\r\n".encode() + PROBE)
    await until(lambda: pod.adapter.forgotten and not pod.gate.prober._tidying)
    await until(lambda: not any(pod.adapter.held.values()))


@pytest.mark.parametrize("body", [b"", b"{}", b'{"contract":1}', ProbeRequest(1).encode().replace(b"8", b"99")])
async def test_a_body_that_is_no_request_is_refused(pod: World, body: bytes) -> None:
    connection = await pod.connect("control", pki.client_context(pod.operator_tls, present=True))
    head = f"POST {PROBE_PATH} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
    await connection.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert (await asyncio.wait_for(connection.answer(), 20)).status == 400
    connection.close()
    assert engine_of(pod).salts == []


async def test_every_pair_of_scopes_plays_sooner_or_later(pod: World) -> None:
    bundle = pod.gate.enforcement.bundle
    assert bundle is not None
    drawn = iter(range(10_000))
    pairs = set()
    for _ in range(200):
        made = cast(bundle, 1, lambda below: (next(drawn) * 7919) % below)
        assert made is not None
        pairs.add((made.scope, made.readers[0].scope))
        if made.scope == "Group/lab":
            assert {made.writer, made.second} == {"ann", "bob"}, "another tenant of the scope is the control"
    names = {"Tenant/acme", "Tenant/globex", "Group/lab"}
    assert pairs == {(one, other) for one in names for other in names if one != other}
