"""Warm-ups at the operator's port: under which keyspace, when not, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.pools import (
    POOL_PATH,
    WARM_PATH,
    PoolQuestion,
    PoolReport,
    Warmed,
    WarmOutcome,
    WarmRequest,
)
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.control import render as rendering
from kvstrata_sidecar.gate.control import render as rendering_service
from kvstrata_sidecar.gate.control import warm as warmer

from . import pki
from .test_rendering import CHAT, SECRET, TEXT, TokenizingEngine, asked, chat_text, posted, say
from .world import ACME, World, chat, entry, keyspace, post, until

UID = "uid-docs"
SPACE = keyspace("docs-1")
OTHER = PrefixSource(text="another text that is long enough for a few chunks of sixteen tokens each, and a bit")


class ComputingEngine(TokenizingEngine):
    """Also computes, and has the adapter store whole chunks."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.computing = asyncio.Event()
        self.computing.set()
        self.stores = True
        self.chat_status = 200
        self.preamble = ""
        """What requests begin with that are chats, but not in the eyes of /tokenize."""

    async def __call__(self, request: Any, writer: Any) -> None:
        if request.path.startswith("/v1/"):
            self.begun = True
            await self.computing.wait()
            if request.path == "/v1/chat/completions" and self.chat_status != 200:
                self.status = self.chat_status
        await super().__call__(request, writer)
        self.status = 200 if self.status == self.chat_status else self.status

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions" and "prompt" in body and isinstance(body["prompt"], list):
            if self.stores:
                names = self._world.adapter.named(b"".join(one.to_bytes(4, "little") for one in body["prompt"]))
                self._store(body["cache_salt"], names.hashes)
            return {"choices": [{}]}
        if path == "/v1/chat/completions":
            ids = self.tokenizer.ids(self.preamble + chat_text({**body, "add_generation_prompt": True}))
            return {"choices": [{}], "prompt_token_ids": ids}
        if path == "/v1/completions":
            return {"choices": [{}], "usage": {}}
        return super().answer(path, body)

    def _store(self, salt: str, hashes: bytes) -> None:
        chunks = {hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)}
        self._world.adapter.held.setdefault(salt, set()).update(chunks)

    @property
    def salts(self) -> set[str]:
        return {said["cache_salt"] for said in self.asked if "cache_salt" in said}


def engine_of(world: World) -> ComputingEngine:
    assert isinstance(world.engine.handler, ComputingEngine)
    return world.engine.handler


@pytest.fixture
async def pod(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A gate in force with a pool of two prefixes that is to be warmed."""
    monkeypatch.setattr(rendering, "PAUSE_S", 0.0)
    monkeypatch.setattr(warmer, "STORED_WITHIN_S", 0.5)
    world.engine.handler = ComputingEngine(world)
    await world.publish([entry("acme")])
    async with world.started(render_id="f" * 16):
        await world.acked(1)
        await until(lambda: world.gate.keys.ring and world.gate.engine_ready)
        named = [await asked(world, source) for source in (TEXT, CHAT)]
        chunks = {
            made.hashes[at : at + CHUNK_HASH_BYTES]
            for made in named
            for at in range(0, len(made.hashes), CHUNK_HASH_BYTES)
        }
        version = PoolVersion(SPACE, "f" * 16, PoolState.WARMING, pack_hashes(sorted(chunks)), ("shared",))
        world.shard = PoolShard("docs", UID, (version,))  # type: ignore[attr-defined]
        await world.acked(await world.publish([entry("acme")], pools={0: world.shard}))  # type: ignore[attr-defined]
        engine_of(world).asked.clear()
        yield world


def version_of(world: World) -> PoolVersion:
    return world.shard.versions[0]  # type: ignore[attr-defined, no-any-return]


def question(world: World, source: PrefixSource, **changes: str) -> WarmRequest:
    return replace(WarmRequest(UID, SPACE[:SCOPE_DIGITS], version_of(world).manifest, source), **changes)  # type: ignore[arg-type]


async def warmed(world: World, source: PrefixSource, **changes: str) -> WarmOutcome:
    answer = await say(world, posted(WARM_PATH, question(world, source, **changes).encode()))
    assert answer.status == 200, answer.body
    told = Warmed.decode(answer.body)
    assert (told.gate_boot, told.cache_boot) == (world.gate.boot, world.adapter.boot)
    return told.outcome


async def without_pool(world: World) -> int:
    return await world.publish([entry("acme")], pools={})


@pytest.mark.parametrize("source", [TEXT, CHAT])
async def test_a_prefix_is_computed_under_the_keyspace_of_the_version_and_no_further(
    pod: World, source: PrefixSource
) -> None:
    assert await warmed(pod, source) is WarmOutcome.STORED
    assert engine_of(pod).salts == {SPACE}
    (computed,) = [said for said in engine_of(pod).asked if said["path"] == "/v1/completions"]
    assert len(computed["prompt"]) % 16 == 0
    assert (computed["max_tokens"], computed["model"]) == (1, "tiny")
    assert pod.adapter.held[SPACE] <= set(chunks_of(version_of(pod).hashes))
    assert pod.gate.enforcement.in_flight == {}


def chunks_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]


async def test_token_ids_are_warmed_as_they_are(pod: World) -> None:
    ids = tuple(engine_of(pod).tokenizer.ids(SECRET * 2)[:40])
    made = await asked(pod, PrefixSource(token_ids=ids))
    version = replace(version_of(pod), hashes=pack_hashes(sorted(chunks_of(made.hashes))))
    await pod.acked(await pod.publish([entry("acme")], pools={0: PoolShard("docs", UID, (version,))}))
    source = PrefixSource(token_ids=ids)
    assert await warmed(pod, source, manifest=version.manifest) is WarmOutcome.STORED


async def test_what_a_tier_does_not_store_is_told(pod: World) -> None:
    engine_of(pod).stores = False
    assert await warmed(pod, TEXT) is WarmOutcome.INCOMPLETE


async def test_a_prefix_outside_of_the_manifest_is_not_computed(pod: World) -> None:
    assert await warmed(pod, OTHER) is WarmOutcome.DISAGREE
    assert engine_of(pod).salts == set()


async def test_a_pod_that_makes_other_tokens_now_computes_nothing(pod: World) -> None:
    engine_of(pod).tokenizer._names["t"] = 7_000_000
    assert await warmed(pod, TEXT) is WarmOutcome.DISAGREE
    assert engine_of(pod).salts == set()


async def test_a_cache_server_that_is_another_one_meanwhile_is_no_disagreement(
    pod: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pod disagrees about stays wrong until a person changes it; this is over in a moment."""
    assert await warmed(pod, TEXT) is WarmOutcome.STORED
    tokens_of = rendering_service.tokens_of

    async def while_it_starts_anew(*asked: Any) -> Any:
        pod.adapter.boot = "boot-2"
        return await tokens_of(*asked)

    monkeypatch.setattr(rendering_service, "tokens_of", while_it_starts_anew)
    answer = await say(pod, posted(WARM_PATH, question(pod, TEXT).encode()))
    assert answer.status == 503


@pytest.mark.parametrize("changes", [{"pool_uid": "uid-other"}, {"scope": "0" * 12}, {"manifest": "0" * 64}])
async def test_a_version_that_the_bundle_does_not_have_is_not_warmed(pod: World, changes: dict[str, str]) -> None:
    assert await warmed(pod, TEXT, **changes) is WarmOutcome.NO_VERSION
    assert engine_of(pod).salts == set()


async def test_with_reuse_off_nothing_is_warmed(pod: World) -> None:
    await pod.acked(await pod.publish([entry("acme")], Rules(drain_timeout_s=1, reuse="Disabled")))
    assert await warmed(pod, TEXT) is WarmOutcome.NO_VERSION


async def test_under_a_stale_policy_no_keyspace_is_used(pod: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod.gate.enforcement, "fresh", lambda: False)
    assert await warmed(pod, TEXT) is WarmOutcome.STALE
    assert engine_of(pod).salts == set()


async def test_a_chat_that_requests_begin_otherwise_is_a_mismatch(pod: World) -> None:
    engine_of(pod).preamble = "<developer>"
    assert await warmed(pod, CHAT) is WarmOutcome.MISMATCH


async def test_an_engine_that_fails_or_refuses_is_told(pod: World) -> None:
    engine_of(pod).chat_status = 500
    assert await warmed(pod, CHAT) is WarmOutcome.ENGINE
    engine_of(pod).chat_status = 400
    assert await warmed(pod, CHAT) is WarmOutcome.REFUSED


async def test_a_chat_with_tools_is_refused_when_it_is_with_and_without_their_choice(pod: World) -> None:
    assert CHAT.chat is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    source = PrefixSource(chat={**CHAT.chat, "tools": tools})
    made = await asked(pod, source)
    version = replace(version_of(pod), hashes=pack_hashes(sorted(chunks_of(made.hashes))))
    await pod.acked(await pod.publish([entry("acme")], pools={0: PoolShard("docs", UID, (version,))}))
    engine_of(pod).chat_status = 400
    assert await warmed(pod, source, manifest=version.manifest) is WarmOutcome.REFUSED
    engine_of(pod).chat_status = 200
    assert await warmed(pod, source, manifest=version.manifest) is WarmOutcome.STORED
    engine_of(pod).preamble = "<developer>"
    assert await warmed(pod, source, manifest=version.manifest) is WarmOutcome.MISMATCH


async def begun(world: World) -> asyncio.Task[WarmOutcome]:
    """A warm-up that the engine computes for as long as it is let."""
    engine_of(world).computing.clear()
    task = asyncio.create_task(warmed(world, TEXT))
    await until(lambda: world.gate.enforcement.in_flight)
    return task


async def test_a_version_that_is_removed_ends_its_warm_up_and_holds_back_the_acknowledgement(pod: World) -> None:
    enforcement, too_early = pod.gate.enforcement, list[bool]()
    task = await begun(pod)
    revision = enforcement.revision + 1
    enforcement.changed.append(lambda: too_early.append(enforcement.acked == revision and bool(enforcement.in_flight)))
    assert await without_pool(pod) == revision
    assert await asyncio.wait_for(task, 60) is WarmOutcome.ABORTED
    await pod.acked(revision)
    assert not any(too_early)


async def test_a_version_that_stays_is_warmed_on_whatever_else_changes(pod: World) -> None:
    task = await begun(pod)
    published = replace(version_of(pod), state=PoolState.PUBLISHED)
    revision = await pod.publish([entry("globex")], pools={0: PoolShard("docs", UID, (published,))})
    await pod.acked(revision)
    engine_of(pod).computing.set()
    assert await asyncio.wait_for(task, 20) is WarmOutcome.STORED


async def test_a_pod_that_drains_ends_its_warm_ups_and_begins_with_none(pod: World) -> None:
    task = await begun(pod)
    pod.engine.socket_path.with_name("draining").touch()
    assert await asyncio.wait_for(task, 20) is WarmOutcome.ABORTED
    await until(lambda: pod.engine.socket_path.with_name("drained").exists())
    assert await warmed(pod, TEXT) is WarmOutcome.ABORTED


async def test_a_caller_that_leaves_ends_its_warm_up(pod: World) -> None:
    engine_of(pod).computing.clear()
    connection = await pod.connect("control", pki.client_context(pod.operator_tls, present=True))
    await connection.send(posted(WARM_PATH, question(pod, TEXT).encode()))
    await until(lambda: pod.gate.enforcement.in_flight)
    connection.writer.transport.abort()
    await until(lambda: not pod.gate.enforcement.in_flight)


async def test_no_tenant_is_given_a_pools_keyspace(pod: World) -> None:
    published = replace(version_of(pod), state=PoolState.PUBLISHED)
    tenants = [entry("acme", pools=("docs",))]
    await pod.acked(await pod.publish(tenants, pools={0: PoolShard("docs", UID, (published,))}))
    assert (await pod.ask(post("/v1/completions", {"prompt": SECRET}, key=ACME))).status == 200
    forged = chat(cache_salt=SPACE)
    assert (await pod.ask(post("/v1/chat/completions", forged, key=ACME))).status == 400
    assert engine_of(pod).salts == {keyspace("acme")}


async def test_the_operator_learns_what_tiers_hold_of_each_version(pod: World) -> None:
    async def told(uid: str) -> PoolReport:
        answer = await say(pod, f"GET {POOL_PATH}?uid={uid} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
        assert answer.headers["kvstrata-ack-token"] == "the-pods-token"
        assert SPACE.encode() not in answer.body
        return PoolReport.decode(answer.body)

    assert (await told("uid-other")).versions == ()
    await warmed(pod, TEXT)
    (version,) = (await told(UID)).versions
    assert (version.scope, version.manifest) == (SPACE[:SCOPE_DIGITS], version_of(pod).manifest)
    assert [(tier.name, tier.stored) for tier in version.tiers] == [("shared", len(pod.adapter.held[SPACE]))]


async def test_the_operator_learns_which_chunks_are_missing(pod: World) -> None:
    missing = ("ab" * CHUNK_HASH_BYTES,)
    holding = replace(pod.adapter.holding(PoolQuestion(SPACE)), missing=missing)
    pod.adapter.holding = lambda question: holding  # type: ignore[method-assign]
    answer = await say(pod, f"GET {POOL_PATH}?uid={UID} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
    (version,) = PoolReport.decode(answer.body).versions
    assert (version.known, version.missing) == (True, missing)


@pytest.mark.parametrize("target", [POOL_PATH, f"{POOL_PATH}?uid="])
async def test_a_question_about_no_pool_is_refused(pod: World, target: str) -> None:
    assert (await say(pod, f"GET {target} HTTP/1.1\r\nHost: g\r\n\r\n".encode())).status == 400


async def test_without_a_cache_server_nobody_knows_what_tiers_hold(pod: World) -> None:
    await pod.adapter.stop()
    assert (await say(pod, f"GET {POOL_PATH}?uid={UID} HTTP/1.1\r\nHost: g\r\n\r\n".encode())).status == 503


async def test_no_log_line_and_no_answer_holds_text_or_a_keyspace(
    pod: World, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = [await say(pod, posted(WARM_PATH, question(pod, source).encode())) for source in (TEXT, CHAT, OTHER)]
    engine_of(pod).chat_status = 400
    answers.append(await say(pod, posted(WARM_PATH, question(pod, CHAT).encode())))
    told = "".join(capfd.readouterr()) + "".join(answer.body.decode() for answer in answers)
    assert "was warmed" in told
    assert [word for word in ("marshal", "tower", SPACE) if word in told] == []
