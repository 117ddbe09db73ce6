"""Prefixes of pools by the real engine: its tokens, its chat template, its cache server's names, and what is stored.

One engine whose tokenizer merges and whose template renders tools and dates serves all tests, before a real gate.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from e2e.engine.models import RANDOM_WITH_MERGES
from kvstrata.contract.messages.pools import (
    POOL_PATH,
    RENDER_PATH,
    WARM_PATH,
    PoolReport,
    Rendered,
    RenderRefusal,
    RenderRequest,
    Warmed,
    WarmOutcome,
    WarmRequest,
)
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, PoolShard, PoolState, PoolVersion, pack_hashes
from tests.dataplane.conftest import StartServer
from tests.dataplane.engine_process import CHUNK_TOKENS, MODEL, PATIENT, EngineProcess, engine_python
from tests.dataplane.lmcache_server import LMCacheServer
from tests.gate import pki
from tests.gate.stand_ins import whole_answer
from tests.gate.world import ACME, World, entry, keyspace, post, until
from tests.tiers.gate_stand_in import DOMAIN

pytestmark = [pytest.mark.lmcache]

SENTENCE = "You answer that the policy of the tenant is to cache the prefix and the block of the engine in the tier. "
SYSTEM = {"role": "system", "content": SENTENCE * 8}
DATE = {"date_string": "26 Jul 2024"}
SCHEMA = {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "find", "description": SENTENCE, "parameters": SCHEMA}}
TEXT = PrefixSource(text=SENTENCE * 8)
CHAT = PrefixSource(chat={"messages": [SYSTEM], "chat_template_kwargs": DATE})
TOOLS = PrefixSource(chat={"messages": [SYSTEM], "tools": [TOOL], "chat_template_kwargs": DATE})
SPACE = keyspace("docs-1")


@dataclass
class Folders:
    """What a server's parameters are made of, in the place of a gate that stands in."""

    policy_dir: Path
    link_dir: Path


@dataclass
class Pod:
    """The processes of a pod but for the gate, and what is around a gate."""

    world: World
    server: LMCacheServer
    engine: EngineProcess


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    with tempfile.TemporaryDirectory(prefix="pod") as name:
        world = World(Path(name))
        folders: Any = Folders(world.directory / "policy", world.directory / "link")
        directory = tmp_path_factory.mktemp("pool-engine")
        server = start_server(directory, folders, [None], CHUNK_TOKENS, memory={"tier": "dram"})
        engine = EngineProcess(
            python, directory, server.rpc_port, PATIENT, model=RANDOM_WITH_MERGES,
            socket_path=world.engine.socket_path,
        )  # fmt: skip
        try:
            engine.wait_until_connected()
            yield Pod(world, server, engine)
        finally:
            engine.stop()


@pytest.fixture
async def gate(pod: Pod) -> AsyncIterator[World]:
    world = pod.world
    world.root = replace(world.root, domain=DOMAIN)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.gate_tls / "tls.crt", world.gate_tls / "tls.key")
    await world.api.start(context)
    await world.publish_keys(acme=ACME)
    revision = await world.publish([entry("acme")])
    try:
        async with world.started(served_model=MODEL):
            await world.acked(revision)
            await until(lambda: world.gate.engine_ready and world.gate.keys.ring)
            yield world
    finally:
        await world.api.stop()


async def say(world: World, data: bytes) -> bytes:
    connection = await world.connect("control", pki.client_context(world.operator_tls, present=True))
    try:
        await connection.send(data)
        answer = await asyncio.wait_for(connection.answer(), 120)
        assert answer.status == 200, answer.body
        return answer.body
    finally:
        connection.close()


def posted(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def rendered(world: World, source: PrefixSource) -> Rendered:
    return Rendered.decode(await say(world, posted(RENDER_PATH, RenderRequest(source).encode())))


async def of_a_caller(world: World, path: str, body: dict[str, Any]) -> list[int]:
    """The tokens of a request that a tenant sends through the gate."""
    sent = {"model": MODEL, "max_tokens": 1, "return_token_ids": True, **body}
    answer = await asyncio.wait_for(world.ask(post(path, sent)), 120)
    assert answer.status == 200, answer.body
    said = json.loads(answer.body)
    ids = said.get("prompt_token_ids") or said["choices"][0]["prompt_token_ids"]
    return [int(one) for one in ids]


async def names(world: World, ids: list[int]) -> list[bytes]:
    told = await world.gate.link.hash(b"".join(one.to_bytes(4, "little") for one in ids))
    return chunks_of(told.hashes)


def chunks_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]


USER = {"role": "user", "content": "Which tier is it?"}
OTHER = {"role": "user", "content": "---- 7"}


@pytest.mark.parametrize(
    ("source", "path", "requests"),
    [
        (TEXT, "/v1/completions", [{"prompt": SENTENCE * 8 + rest} for rest in ("And", "\n\n", "tion", "")]),
        (
            CHAT,
            "/v1/chat/completions",
            [{"messages": [SYSTEM, *more], "chat_template_kwargs": DATE} for more in ([USER], [OTHER, SYSTEM, USER])],
        ),
        (
            TOOLS,
            "/v1/chat/completions",
            [
                {"messages": [SYSTEM, USER], "tools": [TOOL], "tool_choice": "none", "chat_template_kwargs": DATE},
                {"messages": [SYSTEM, OTHER], "tools": [TOOL], "tool_choice": "none", "chat_template_kwargs": DATE},
            ],
        ),
    ],
    ids=["text", "chat", "tools"],
)
async def test_every_request_that_begins_with_a_prefix_has_its_chunks(
    gate: World, source: PrefixSource, path: str, requests: list[dict[str, Any]]
) -> None:
    made = await rendered(gate, source)
    assert made.refused is None
    assert made.chunks >= 2
    assert made.chunk_tokens == CHUNK_TOKENS
    for request in requests:
        ids = await of_a_caller(gate, path, request)
        assert (await names(gate, ids))[: made.chunks] == chunks_of(made.hashes)


async def test_a_tool_whose_keys_are_in_another_order_is_another_prefix(gate: World) -> None:
    ordered = json.loads(json.dumps(TOOL, sort_keys=True))
    made = await rendered(gate, TOOLS)
    other = await rendered(gate, PrefixSource(chat={**(TOOLS.chat or {}), "tools": [ordered]}))
    assert made.chunks == other.chunks
    assert made.hashes != other.hashes


async def test_a_template_that_writes_todays_date_is_found_and_a_fixed_date_mends_it(gate: World) -> None:
    assert (await rendered(gate, PrefixSource(chat={"messages": [SYSTEM]}))).refused is RenderRefusal.DATED
    assert (await rendered(gate, CHAT)).refused is None


async def test_tokens_outside_of_the_vocabulary_are_refused(gate: World) -> None:
    inside = await rendered(gate, PrefixSource(token_ids=tuple(range(3, 3 + CHUNK_TOKENS))))
    assert inside.chunks == 1
    outside = PrefixSource(token_ids=(100_000, *range(3, 3 + CHUNK_TOKENS)))
    assert (await rendered(gate, outside)).refused is RenderRefusal.SOURCE_REFUSED


async def test_a_prefix_that_is_longer_than_the_model_takes_says_so(gate: World) -> None:
    made = await rendered(gate, PrefixSource(text="x" * 4000))
    assert made.too_long
    assert made.max_model_tokens == 2048


async def test_warming_stores_every_chunk_once_and_again_after_it_was_lost(gate: World, pod: Pod) -> None:
    sources = (TEXT, CHAT, TOOLS)
    made = [await rendered(gate, source) for source in sources]
    hashes = pack_hashes({chunk for one in made for chunk in chunks_of(one.hashes)})
    version = PoolVersion(SPACE, "r", PoolState.WARMING, hashes, ("dram",))
    await gate.acked(await gate.publish([entry("acme")], pools={0: PoolShard("docs", "uid", (version,))}))

    async def warm(source: PrefixSource) -> WarmOutcome:
        asked = WarmRequest("uid", SPACE[:SCOPE_DIGITS], version.manifest, source)
        return Warmed.decode(await say(gate, posted(WARM_PATH, asked.encode()))).outcome

    async def held() -> tuple[int, int]:
        question = f"GET {POOL_PATH}?uid=uid HTTP/1.1\r\nHost: g\r\n\r\n".encode()
        (told,) = PoolReport.decode(await say(gate, question)).versions
        assert told.known
        return told.tiers[0].stored, told.tiers[0].expected

    assert await held() == (0, version.chunks)
    for _ in range(2):
        assert [await warm(source) for source in sources] == [WarmOutcome.STORED] * 3
        assert await held() == (version.chunks, version.chunks)
        # Blocks of what only followed the prefix are taken out of the memory again.
        await until(
            lambda: (
                [row.blocks for row in gate.gate.link.state.usage if row.scope == SPACE[:SCOPE_DIGITS]]
                == [version.chunks]
            )
        )
        pod.server.forget_memory()
        async with asyncio.timeout(60):
            while await held() != (0, version.chunks):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def answered(world: World, path: str, **body: Any) -> dict[str, Any]:
    """What a tenant gets through the gate."""
    answer = await asyncio.wait_for(world.ask(post(path, {"model": MODEL, "max_tokens": 4, **body})), 120)
    assert answer.status == 200, answer.body
    return answer.json


async def test_a_conversation_goes_on_with_the_engines_own_answers(gate: World) -> None:
    path = "/v1/chat/completions"
    first = await answered(gate, path, messages=[USER])
    message = first["choices"][0]["message"]
    assert None in message.values()
    await answered(gate, path, messages=[USER, message, OTHER])
    # A message means the same to the engine with its nulls and without.
    said = {"role": message["role"], "content": message["content"]}
    turns = [{"messages": [USER, one, OTHER], "chat_template_kwargs": DATE} for one in (message, said)]
    assert len({tuple(await of_a_caller(gate, path, turn)) for turn in turns}) == 1

    path = "/v1/messages"
    first = await answered(gate, path, messages=[USER])
    await answered(gate, path, messages=[USER, {"role": first["role"], "content": first["content"]}, OTHER])


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/messages", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "Which tier is it?"}),
    ],
)
async def test_the_engine_of_the_gates_tests_answers_with_the_keys_of_the_real_one(
    pod: Pod, gate: World, path: str, asked: dict[str, Any]
) -> None:
    real, played = await answered(gate, path, **asked), whole_answer(path)
    assert real.keys() == played.keys()
    (choice,), (other) = real.get("choices", [{}]), played.get("choices", [{}])[0]
    assert choice.keys() == other.keys()
    assert choice.get("message", {}).keys() == other.get("message", {}).keys()
