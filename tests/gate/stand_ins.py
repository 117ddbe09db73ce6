"""What stands around a gate in these tests: an engine that records, an adapter that acknowledges; the API server is in
`stand_in_api`. Each is real on the wire and scripted behind it; the real engine and adapter run in the cluster tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    TOKEN_BYTES,
    AdapterAck,
    AdapterState,
    Answer,
    ApplyRequest,
    ChunkHashes,
    HashRequest,
    MetricsPage,
    MetricsRequest,
    PrefillCost,
    Request,
    ScopeUsage,
    StateRequest,
    TierState,
    decode_request,
    encode_answer,
    error_answer,
)
from kvstrata.contract.messages.erase import (
    REQUIRED,
    AdapterErased,
    AdapterVerified,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    VerifyRequest,
)
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion, PoolTierState
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from tests.tiers.gate_stand_in import FINGERPRINT

Handler = Callable[["EngineRequest", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class EngineRequest:
    """A request as the engine saw it, with the raw head."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def chat_message(**told: Any) -> dict[str, Any]:
    """An answer's message as vLLM 0.32 writes it: null for what is absent, but for tool calls."""
    absent = dict.fromkeys(("content", "refusal", "annotations", "audio", "function_call", "reasoning"))
    return {"role": "assistant", **absent, **told}


def whole_answer(path: str) -> dict[str, Any]:
    """What vLLM 0.32 answers to a request that is not streamed, with all its nulls."""
    if path == "/v1/messages/count_tokens":
        return {"input_tokens": 7, "context_management": {"original_input_tokens": 7}}
    if path.startswith("/v1/messages"):
        usage = {"input_tokens": 7, "output_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
        content = [{"type": "text", "text": "hi"}]
        head = {"id": "x", "type": "message", "role": "assistant", "content": content, "model": "tiny"}
        return {**head, "stop_reason": "end_turn", "usage": usage}
    choice = {"index": 0, **dict.fromkeys(("logprobs", "stop_reason", "token_ids", "routed_experts"))}
    answer = {"id": "x", "created": 1, "model": "tiny", "system_fingerprint": "vllm-0.32.0", "usage": USAGE}
    absent = ["service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"]
    if path.startswith("/v1/chat/completions"):
        choice |= {"message": chat_message(content="hi"), "finish_reason": "stop"}
        answer["object"] = "chat.completion"
        absent += ["prompt_logprobs", "prompt_token_ids", "prompt_text"]
    else:
        choice |= {"text": "hi", "finish_reason": "stop", **dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))}
        answer["object"] = "text_completion"
    return answer | dict.fromkeys(absent) | {"choices": [choice]}


async def plain_answer(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
    """Answer a request, streamed or whole, as vLLM frames it."""
    if not request.json.get("stream"):
        await whole(writer, 200, json.dumps(whole_answer(request.path)).encode())
        return
    await stream_head(writer)
    for text in ("he", "llo"):
        await event(writer, {"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]})
    if request.json.get("stream_options", {}).get("include_usage"):
        await event(writer, {"id": "x", "choices": [], "usage": USAGE})
    await chunk(writer, b"data: [DONE]\n\n")
    await chunk(writer, b"")


async def no_page(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
    await whole(writer, 404, b"{}")


async def whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-internal: 1\r\n\r\n%s"
        % (status, len(body), body)
    )
    await writer.drain()


async def stream_head(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def event(writer: asyncio.StreamWriter, value: object) -> None:
    await chunk(writer, b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


async def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


class RecorderEngine:
    """An engine on a unix socket that records every request and answers by `handler`."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.requests: list[EngineRequest] = []
        self.healthy = True
        self.handler: Handler = plain_answer
        self.models: object = {
            "object": "list",
            "data": [{"id": "tiny", "created": 1_700_000_000, "max_model_len": 2048}],
        }
        self.page: Handler = no_page
        """Answers scrapes, which are not recorded."""
        self.disconnects = 0
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket_path), limit=1 << 24)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()

    async def _answer(self, request: Request) -> bytes:
        answer: Answer
        match request:
            case MetricsRequest():
                answer = MetricsPage("# TYPE kvstrata_cache_policy_fresh gauge\nkvstrata_cache_policy_fresh 1\n")
            case HashRequest():
                answer = self.named(request.tokens)
            case PoolQuestion():
                answer = self.holding(request)
            case EraseRequest():
                answer = self.erasure(request)
                await self.erasing.wait()
            case VerifyRequest():
                answer = self.verification(request)
            case ForgetRequest():
                answer = self.forgetting(request)
            case ApplyRequest():
                self.applied.append(request.revision)
                await self.gate.wait()
                if self.refusals:
                    self.refusals -= 1
                    return error_answer("I/O on removed keyspaces has not ended yet")
                self.revision, self.term = self.acknowledges or request.revision, request.term
                if self.acknowledged_term is not None:
                    self.term = self.acknowledged_term
                answer = AdapterAck(self.revision, self.term, self.boot)
            case _:
                tiers = (TierState("shared", "Redis", self.breaker, **self.tier),)
                if self.memory is not None:
                    tiers += (TierState(self.memory.name, "CPU", "closed"),)
                answer = AdapterState(
                    self.boot, self.revision, self.term, True, 0, tiers, self.counters, self.usage,
                    tier_usage=self.tier_usage, ungoverned=self.ungoverned,
                    fingerprints=self.fingerprints,
                )  # fmt: skip
        return encode_answer(answer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                request = EngineRequest(head, await reader.readexactly(length), reader)
                if request.path == "/health":
                    await whole(writer, 200 if self.healthy else 503, b"{}")
                    continue
                if request.path == "/v1/models":
                    await whole(writer, 200, json.dumps(self.models).encode())
                    continue
                if request.path == "/metrics":
                    await self.page(request, writer)
                    continue
                self.requests.append(request)
                await self.handler(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.disconnects += 1
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self._tasks.discard(task)
            writer.close()


class StandInAdapter:
    """The policy adapter's end of the link."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.boot = "boot-1"
        self.chunk_tokens = 16
        self.held: dict[str, set[bytes]] = {}
        """The chunks that its one tier has, by keyspace."""
        self.pool_questions: list[PoolQuestion] = []
        self.applied: list[int] = []
        self.revision = 0
        self.term = 0
        self.breaker = "closed"
        self.memory: PoolTierState | None = None
        """What its own memory has of any pool; None for a server without a CPU tier."""
        self.tier: dict[str, Any] = {}
        """More of what its tier's state says."""
        self.usage: tuple[ScopeUsage, ...] = ()
        self.tier_usage: tuple[ScopeUsage, ...] = ()
        self.counters: dict[str, int] = {}
        self.ungoverned = ""
        self.fingerprints: tuple[str, ...] = (FINGERPRINT,)
        self.costs: tuple[PrefillCost, ...] = ()
        self.erasing = asyncio.Event()
        """Cleared: erasures are taken and not answered."""
        self.erasing.set()
        self.erasures: list[EraseRequest] = []
        self.erased: dict[str, Any] = {}
        """What its answers to erasures say, beside that nothing is left."""
        self.verifications: list[VerifyRequest] = []
        self.forgotten: list[ForgetRequest] = []
        self.links = 0
        self.refusals = 0
        """How many applications are still refused because I/O has not ended."""
        self.acknowledges = 0
        """Set: the revision that policy.json is said to hold, whatever was asked."""
        self.acknowledged_term: int | None = None
        self.gate = asyncio.Event()
        """Cleared: applications are taken and not acknowledged."""
        self.gate.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket_path), limit=MAX_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.close()
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()

    def holding(self, question: PoolQuestion) -> PoolHolding:
        """Say what the tier has of the chunks that are named, a thousand bytes each; or all that it has."""
        self.pool_questions.append(question)
        there = self.held.get(question.keyspace, set())
        size = CHUNK_HASH_BYTES
        asked = question.hashes if question.hashes is not None else b"".join(sorted(there))
        chunks = [asked[at : at + size] for at in range(0, len(asked), size)]
        missing = [chunk for chunk in chunks if chunk not in there]
        stored = len(chunks) - len(missing)
        tier = PoolTierState("shared", stored, len(chunks), 1000 * stored)
        memory = (self.memory,) if self.memory is not None else ()
        return PoolHolding(self.boot, True, (*memory, tier), tuple(chunk.hex() for chunk in missing))

    def erasure(self, question: EraseRequest) -> AdapterErased:
        """Say that nothing is left in its memory, or what a test wants it to say."""
        self.erasures.append(question)
        tier = ErasedTier("dram", "CPU", checked=tuple(REQUIRED["CPU"]))
        said: dict[str, Any] = {"outcome": EraseOutcome.COMPLETE, "tiers": (tier,), "elsewhere": ("shared",)}
        return AdapterErased(self.boot, self.revision, self.term, **(said | self.erased))

    def verification(self, question: VerifyRequest) -> AdapterVerified:
        """Say that it cannot tell names."""
        self.verifications.append(question)
        return AdapterVerified(self.boot, self.revision, self.term, False, False)

    def forgetting(self, question: ForgetRequest) -> Forgotten:
        """Drop chunks from what its tier has."""
        self.forgotten.append(question)
        there, size = self.held.get(question.keyspace, set()), CHUNK_HASH_BYTES
        gone = there & {question.chunks[at : at + size] for at in range(0, len(question.chunks), size)}
        there -= gone
        return Forgotten(self.boot, len(gone))

    def named(self, tokens: bytes) -> ChunkHashes:
        """Name whole chunks by a chain of digests, as the cache server does with another digest."""
        size, hashes = self.chunk_tokens * TOKEN_BYTES, [b""]
        for at in range(0, len(tokens) // size * size, size):
            hashes.append(hashlib.sha256(hashes[-1] + tokens[at : at + size]).digest())
        return ChunkHashes(self.boot, self.chunk_tokens, b"".join(hashes))

    async def restart(self, boot: str) -> None:
        await self.stop()
        self.boot, self.revision, self.term = boot, 0, 0
        await self.start()

    async def _answer(self, request: Request) -> bytes:
        answer: Answer
        match request:
            case MetricsRequest():
                answer = MetricsPage("# TYPE kvstrata_cache_policy_fresh gauge\nkvstrata_cache_policy_fresh 1\n")
            case HashRequest():
                answer = self.named(request.tokens)
            case PoolQuestion():
                answer = self.holding(request)
            case EraseRequest():
                answer = self.erasure(request)
                await self.erasing.wait()
            case VerifyRequest():
                answer = self.verification(request)
            case ForgetRequest():
                answer = self.forgetting(request)
            case ApplyRequest():
                self.applied.append(request.revision)
                await self.gate.wait()
                if self.refusals:
                    self.refusals -= 1
                    return error_answer("I/O on removed keyspaces has not ended yet")
                self.revision, self.term = self.acknowledges or request.revision, request.term
                if self.acknowledged_term is not None:
                    self.term = self.acknowledged_term
                answer = AdapterAck(self.revision, self.term, self.boot)
            case _:
                self.costs = getattr(request, "prefill", ())
                tiers = (TierState("shared", "Redis", self.breaker, **self.tier),)
                if self.memory is not None:
                    tiers += (TierState(self.memory.name, "CPU", "closed"),)
                answer = AdapterState(
                    self.boot, self.revision, self.term, True, 0, tiers, self.counters, self.usage,
                    tier_usage=self.tier_usage, ungoverned=self.ungoverned,
                    fingerprints=self.fingerprints,
                )  # fmt: skip
        return encode_answer(answer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        counted = False
        try:
            while line := await reader.readline():
                request = decode_request(line)
                if isinstance(request, (ApplyRequest, StateRequest)):
                    self.links += not counted
                    counted = True
                writer.write(await self._answer(request))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@contextlib.asynccontextmanager
async def running(*parts: Any) -> AsyncIterator[None]:
    """Start parts that take no arguments; stop them in reverse order."""
    started: list[Any] = []
    try:
        for part in parts:
            await part.start()
            started.append(part)
        yield
    finally:
        for part in reversed(started):
            await part.stop()
