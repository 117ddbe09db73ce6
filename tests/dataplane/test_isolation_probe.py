"""The isolation probe by the real engine, cache server, Redis and files, through the gate's own port; that engine's
prefix cache, emptied at the same port; and requests of callers in pairs, of which one must hit and one must miss.

`KVSTRATA_ENGINE_PAIRS` says how many pairs there are.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from e2e.engine.models import RANDOM_WITH_MERGES
from kvstrata.contract.messages.engine_reset import RESET_PATH, EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.probe import PROBE_PATH, Probed, ProbeOutcome, ProbeRequest
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.control.engine_calls import judged, request_bytes
from kvstrata_sidecar.gate.http.engine_client import WholeAnswer
from tests.dataplane import engine_process
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.engine_pairs import EnginePairs, Seen
from tests.dataplane.engine_process import CHUNK_TOKENS, MODEL, EngineProcess, engine_python
from tests.dataplane.moving_scopes import Fault, Play
from tests.dataplane.test_pool_engine import Folders, posted, say
from tests.gate.stand_in_api import StandInApi
from tests.gate.world import World, entry, keyspace, until
from tests.support.amounts import ENGINE_PAIRS, SEED
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

TIERS = ("Engine", "disk", "dram", "shared")
LONG = 800
"""Tokens of an answer that is still being computed when requests that run are told to make way."""

NEARLY = 0.05
"""Difference of two log probabilities that rounding may turn around."""

PAIRS = int(ENGINE_PAIRS)
KINDS = {
    *(f"{who} / {whose}" for who in ("Tenant", "Group") for whose in ("Tenant", "Group", "Pool")),
    *(f"Former epoch / {whose}" for whose in ("Tenant", "Group")),
}
"""Who asks, and whose prompt it is."""

_KEYS: dict[str, tuple[DataKey, ...]] = {}


@dataclass
class Pod:
    """What is around a gate: an engine with a prefix cache of its own, and three tiers, of which two encrypt."""

    world: World
    engine: EngineProcess
    redis: RedisProcess

    def stored(self) -> int:
        """How many blocks the shared tier has, of anybody."""
        return sum(len(name.split(b":")) == 7 for name in self.redis.admin().scan_iter(count=1000))


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    directory = tmp_path_factory.mktemp("probe")
    redis = RedisProcess(directory)
    redis.start()
    with tempfile.TemporaryDirectory(prefix="pod") as name:
        world = World(Path(name))
        folders: Any = Folders(world.directory / "policy", world.directory / "link")
        (directory / "files").mkdir()
        tiers = [
            file_tier(directory / "files", encryption="Required", **PATIENT_FILES),
            tier(redis.port, encryption="Required", **PATIENT),
        ]
        server = start_server(directory, folders, tiers, CHUNK_TOKENS, memory={"tier": "dram"})
        engine = EngineProcess(
            python, directory, server.rpc_port, engine_process.PATIENT, model=RANDOM_WITH_MERGES,
            socket_path=world.engine.socket_path, prefix_caching=True,
        )  # fmt: skip
        try:
            engine.wait_until_connected()
            yield Pod(world, engine, redis)
        finally:
            engine.stop()
            redis.kill()


@pytest.fixture
async def gate(pod: Pod) -> AsyncIterator[World]:
    world = pod.world
    # An API server of each test's own event loop; revisions go on.
    world.api, world.root = StandInApi(), replace(world.root, domain=DOMAIN, shards=(), pools=())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.gate_tls / "tls.crt", world.gate_tls / "tls.key")
    await world.api.start(context)
    await world.publish_keys()
    try:
        async with world.started(served_model=MODEL):
            await until(lambda: world.gate.engine_ready and world.gate.link.state.tiers)
            link = world.gate.link
            await until(lambda: all(one.breaker == "closed" and not one.recovering for one in link.state.tiers))
            yield world
    finally:
        await world.api.stop()


def keyed(tenant: str, space: str | None = None, scope: Scope | None = None, **fields: Any) -> Entry:
    name = space or tenant
    keys = _KEYS.setdefault(name, (DataKey(1, os.urandom(32)),))
    made = entry(tenant, name, keys=keys, **fields)
    return replace(made, scope=scope or made.scope)


async def publish(world: World, *tenants: Entry, pools: dict[int, PoolShard] | None = None) -> int:
    """Put tenants in force."""
    revision = await world.publish(tenants, pools=pools or {})
    await world.acked(revision)
    return revision


async def probed(world: World, revision: int) -> Probed:
    return Probed.decode(await say(world, posted(PROBE_PATH, ProbeRequest(revision).encode())))


async def test_every_tier_and_the_engine_are_shown_to_keep_tenants_groups_and_pools_apart(
    gate: World, pod: Pod
) -> None:
    group = Scope(ScopeKind.GROUP, "lab")
    tenants = [keyed("acme"), keyed("globex"), keyed("ann", "lab-1", group), keyed("bob", "lab-1", group)]
    hashes = pack_hashes([bytes([1]) * 32])
    pool_keys = (DataKey(1, os.urandom(32)),)
    pool = PoolVersion(keyspace("docs-1"), "r", PoolState.PUBLISHED, hashes, ("shared",), keys=pool_keys)
    revision = await publish(gate, *tenants, pools={0: PoolShard("docs", "uid", (pool,))})
    for _ in range(3):
        said = await probed(gate, revision)
        assert (said.outcome, said.culprits) == (ProbeOutcome.ISOLATED, ()), said
        assert (said.proven, said.unproven) == (TIERS, ())
        assert (said.scopes, said.looked) == (3, 3)
        assert {(row.foreign, row.altered) for row in said.tiers if row.tier} == {(3, 1)}
        assert said.controls == 2 * len(TIERS)
        # What it stored is gone again, from memory and tiers.
        await until(lambda: not gate.gate.prober._tidying and pod.stored() == 0 and not gate.gate.link.state.usage)


async def test_two_tenants_that_were_given_one_keyspace_are_found_in_every_tier(gate: World) -> None:
    revision = await publish(gate, keyed("acme", "same"), keyed("globex", "same"))
    said = await probed(gate, revision)
    assert said.outcome is ProbeOutcome.FOREIGN_HIT
    assert said.clashes
    assert set(said.culprits) == {"Tenant/acme", "Tenant/globex"}
    assert {row.tier or row.medium: row.foreign_hits for row in said.tiers} == dict.fromkeys(TIERS, 1)


async def test_a_tier_that_is_away_is_not_said_to_be_isolated(gate: World, pod: Pod) -> None:
    revision = await publish(gate, keyed("acme"), keyed("globex"))
    await asyncio.to_thread(pod.redis.kill)
    try:
        said = await probed(gate, revision)
    finally:
        await asyncio.to_thread(pod.redis.start)
    assert said.outcome is ProbeOutcome.ISOLATED
    assert (said.proven, said.unproven) == (("Engine", "disk", "dram"), ("shared",))


async def answer(world: World, prompt: str, salt: str, tokens: int) -> dict[str, Any]:
    """Have the engine answer, without a cache server that knows the salt."""
    whole = WholeAnswer(asyncio.get_running_loop())
    body = {
        "model": MODEL, "prompt": prompt, "cache_salt": salt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "logprobs": 2, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    whole.call = world.gate.engine.send(request_bytes("/v1/completions", body), whole)
    answered = judged(*await whole.future)
    assert answered["usage"]["completion_tokens"] == tokens
    return answered


async def completion(world: World, prompt: str, salt: str, tokens: int) -> tuple[str, int]:
    """Return the text of an answer, and how many tokens of the prompt the engine had in its own memory."""
    answered = await answer(world, prompt, salt, tokens)
    details = answered["usage"]["prompt_tokens_details"] or {}
    return str(answered["choices"][0]["text"]), int(details.get("cached_tokens") or 0)


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two greedy answers have the same tokens up to one that was as likely as the next best: requests in one
    batch change the last bits of each other's results."""
    log = one["choices"][0]["logprobs"]
    pairs = zip(log["tokens"], other["choices"][0]["logprobs"]["tokens"], strict=True)
    parted = next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if parted is None:
        return True
    best, next_best = sorted(log["top_logprobs"][parted].values(), reverse=True)[:2]
    return parted > 0 and best - next_best < NEARLY


async def reset(world: World, wait_s: float = 0.0) -> ResetOutcome:
    return EngineResetAnswer.decode(
        await say(world, posted(RESET_PATH, ResetRequest(round(1000 * wait_s)).encode()))
    ).outcome


async def test_an_engine_that_is_told_to_forget_finds_nothing_of_before_and_answers_what_runs(gate: World) -> None:
    await publish(gate, keyed("acme"))
    salt, prompt = keyspace("in no policy"), "a prompt that is long enough for some blocks " * 8
    alone = await answer(gate, "tell me more", keyspace("alone"), LONG)
    for _ in range(5):  # a busy machine may ask when a long answer is over
        running = asyncio.create_task(answer(gate, "tell me more", keyspace("beside"), LONG))
        while (said := await reset(gate)) is not ResetOutcome.BUSY and not running.done():
            pass
        if said is ResetOutcome.BUSY:
            break
        await running
    assert said is ResetOutcome.BUSY
    first, _ = await completion(gate, prompt, salt, 4)
    assert (await completion(gate, prompt, salt, 4))[1] > 0
    assert await reset(gate, wait_s=60) is ResetOutcome.RESET
    assert await completion(gate, prompt, salt, 4) == (first, 0)
    assert is_same(alone, await running)


async def test_no_caller_of_an_engine_finds_what_another_scope_has_while_policies_change(gate: World) -> None:
    play = Play(random.Random(1 + SEED))
    pairs = EnginePairs(gate, play, random.Random(1 + SEED))

    def done(seen: Seen) -> bool:
        varied = {*seen.pairs, *seen.first} >= KINDS and min(play.moved.values(), default=0) > 1
        return varied and seen.pairs.total() >= PAIRS

    seen = await pairs.run(done, 3 * PAIRS)
    assert (+seen.foreign, +seen.missed, seen.unanswered) == (Counter(), Counter(), 0)
    assert {*seen.pairs, *seen.first} >= KINDS
    assert min(play.moved.values()) > 1, play.moved


async def test_a_caller_that_was_given_anothers_keyspace_is_seen_by_its_hits(gate: World) -> None:
    play = Play(random.Random(2), fault=Fault.ONE_KEYSPACE)
    pairs = EnginePairs(gate, play, random.Random(2), ("plain", "other", "ann"))
    seen = await pairs.run(lambda seen: "Tenant / Tenant" in +seen.foreign, 1000)
    assert "Tenant / Tenant" in +seen.foreign
    assert +seen.missed == Counter()
