"""A full and a minimal value of every message, with its encoder and its decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from kvstrata.contract.messages import erase_report as erasereport
from kvstrata.contract.messages.adapter import (
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
    RestoreState,
    ScopeUsage,
    StateRequest,
    TierState,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    error_answer,
)
from kvstrata.contract.messages.audit import (
    AUDIT_VERSION,
    LOGGER,
    Action,
    Emitter,
    Happened,
    Line,
    Source,
    instant,
)
from kvstrata.contract.messages.engine_identity import EngineIdentity
from kvstrata.contract.messages.engine_reset import EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.erase import (
    AdapterErased,
    AdapterVerified,
    Amount,
    Check,
    Erased,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    LeftKeys,
    Verified,
    VerifiedTier,
    VerifyRequest,
)
from kvstrata.contract.messages.key_delivery import KeysLacking
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.messages.pools import (
    PoolHolding,
    PoolQuestion,
    PoolReport,
    PoolTierState,
    PoolVersionState,
    Rendered,
    RenderRefusal,
    RenderRequest,
    Warmed,
    WarmOutcome,
    WarmRequest,
)
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten, Probed, ProbedTier, ProbeOutcome, ProbeRequest
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import (
    Entry,
    Root,
    Rules,
    ShardRef,
    decode_shard,
    encode_shard,
)
from kvstrata.contract.policy.cache_view import CacheView, PoolView
from kvstrata.contract.policy.data_key import DataKey, KeyReference, key_id
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind
from kvstrata.contract.policy.pools import PoolRef, PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata.contract.policy.rate import RateLimit
from kvstrata.contract.policy.tiers import AllowedServers, Server, TierAccess, TierRules
from kvstrata.contract.receipt.facts import Amount as Keys
from kvstrata.contract.receipt.facts import Component, Copies, Fence, Revoked, Target
from kvstrata.contract.receipt.record import (
    HandOver,
    HandOverKind,
    Head,
    Record,
    Signature,
    encode_receipt,
    read_receipt,
)
from kvstrata.contract.receipt.residue import Residue, ResidueItem
from kvstrata.contract.receipt.vocabulary import KeyCustody, PodMedium, RevokedKind, Standing
from kvstrata.contract.wire import canonical_json, digest_bytes
from kvstrata.model.erasure import facts as erasurefacts
from kvstrata.model.erasure.record import ErasedPrefix, Erasure, ErasureOrder, ErasureRecord, LeftEpoch, SharedTier
from kvstrata.reconcile.erasure import record_store
from tests.support import receipts
from tests.support.audit import read_line


@dataclass(frozen=True, slots=True)
class Case:
    """One message: what it says, and how it is written and read. `part` is the file that its bytes are in."""

    part: str
    name: str
    value: Any
    encode: Callable[[], bytes]
    decode: Callable[[bytes], Any]


A, B = "a" * 32, "b" * 32
SECRET = bytes(range(1, 33))
CHUNKS = pack_hashes(bytes([n]) * 32 for n in (1, 2))
TEXT = 'tier "one": späť\u2028'

LIMITS = EnforcedBudget("fast", limit_bytes=1 << 40, guaranteed_bytes=1 << 30, retention_s=3600)
DENIED = EnforcedBudget.denying("shared", 60)
ENTRY = Entry(
    "acme", A, Scope(ScopeKind.GROUP, "eu"), "policy-uid", since=4, suspended=True, budgets=(LIMITS, DENIED),
    keys=(DataKey(2, SECRET), DataKey(1, SECRET[::-1])), pools=("docs", "tools"), resumes=True,
    rate=RateLimit(600, 90_000),
)  # fmt: skip
NAMED = replace(ENTRY, tenant="globex", keys=(KeyReference(255, key_id(SECRET)),), pools=(), resumes=False)
BARE = Entry("public", B, PUBLIC_SCOPE, "policy-uid", budgets=(EnforcedBudget("fast"),))
RULES = Rules(60, 10, "ServeStale", "Refuse", "Disabled", audit_tenants=True, rate=RateLimit(tokens_per_minute=5000))
TIERS = (
    TierRules(
        "shared", (Server("redis.example.com", 6379),), 1000, 60,
        cluster=True, username="data", password=True, tls=True, encrypts=True,
    ),
    TierRules("far", (Server("::1", 1),), 1, allowed=AllowedServers(("*.far",), ("fd00::/8",), ("fd00::1",), True)),
)  # fmt: skip
ACCESS = {"shared": TierAccess(b"secret", b"-----BEGIN CERTIFICATE-----"), "far": TierAccess(b"other")}
ROOT = Root(
    "0123456789abcdef", "chat", "model-uid", 7, 2, RULES, (ShardRef(0, "a", "0" * 64), ShardRef(1, "b", "1" * 64)), 5,
    (PoolRef(0, "a", "2" * 64, 3), PoolRef(2, "b", "3" * 64, 7)), TIERS, ACCESS,
)  # fmt: skip
WARM = PoolVersion(
    A, "render-1", PoolState.WARMING, CHUNKS, ("fast", "shared"), (LIMITS,), (DataKey(1, SECRET),), before_ready_s=30
)
READ = PoolVersion(B, "render-0", PoolState.PUBLISHED, CHUNKS[:32])
POOL = PoolShard("docs", "pool-uid", (WARM, READ))
VIEW = CacheView(
    "0123456789abcdef", 7, 2, RULES, {A: (LIMITS, DENIED), B: ()}, {A: (2, 1)},
    {B: PoolView("4" * 64, True, ("fast",))}, {A: (B,)}, TIERS,
)  # fmt: skip

USAGE = (ScopeUsage("0123456789ab", "fast", 5, 1, 10, 2), ScopeUsage("", "fast", 3, 1))
RESTORES = RestoreState(1, 2, 3, 4, 5, 6, 7, 8, 9)
TIER = TierState(
    "shared",
    "Redis",
    "half-open",
    TEXT,
    1,
    2,
    3,
    4,
    True,
    True,
    5,
    6,
    7,
    8,
    9,
    12,
    True,
    True,
    True,
    RESTORES,
    True,
)
POD = PodState(
    "chat-0", "pod-uid", "team", "chat", "identity", "gate-boot", "cache-boot", 2, 6, 7, True, 125, True,
    "the cache server does not answer", (TIER,), USAGE, 3, USAGE[:1], 7, "5" * 64, "model-uid", 1,
    "f1" * 8, {"files": "5" * 64, "vllm": "0.32.0"}, "the engine has another", "no_fingerprint",
)  # fmt: skip
STATE = AdapterState(
    "cache-boot", 7, 2, True, 2, (TIER,), {"memory.enforced": 1}, USAGE, 3, USAGE[:1], "LMCache 0.5.7",
    ("f1" * 8,),
)  # fmt: skip

MEMORY = ErasedTier(
    "cpu", "CPU", True, Amount(5, 50), Amount(3, 30), Amount(2, 20), 1, 1, 1, 4096, 2,
    (Check.TABLES, Check.OVERWRITTEN), TEXT[:-1], "flash keeps earlier copies",
)  # fmt: skip
ERASED = AdapterErased("cache-boot", 7, 2, EraseOutcome.REMAINING, 3, 1, (MEMORY,), ("shared",))
CLEAN = AdapterErased("cache-boot", 7, 2, EraseOutcome.COMPLETE)
VERIFIED = AdapterVerified("cache-boot", 7, 2, True, False, 4, (VerifiedTier("cpu", "CPU", 4, 1, "revoked", 2),))

HELD = (PoolTierState("fast", 1, 2, 300),)
CHAT = PrefixSource(
    chat={
        "messages": [{"role": "system", "content": "Kurz, prosím."}],
        "tools": [{"type": "function", "a": 1}],
        "chat_template_kwargs": {"date_string": "today"},
    }
)
RENDERED = Rendered("gate-boot", "cache-boot", "render-1", 33, 40, 16, 512, CHUNKS)
PROBED = Probed(
    "gate-boot", "cache-boot", 7, 2, ProbeOutcome.FOREIGN_HIT, 4, 3,
    (ProbedTier("shared", "Redis", 2, 2, 3, 1, 1, 2, 0), ProbedTier("", "Engine", 1, 0)),
    ("Tenant/acme", "Tenant/globex"), True,
)  # fmt: skip

HAPPENED = Happened(
    action=Action.SERVER_DELETED, namespace="team", object="CacheInvalidation/forget", uid="order-uid", tier="shared",
    server="node-1", reason="Done", blocks=4, bytes=4000, remaining=0,
)  # fmt: skip
SERVED = Happened(
    action=Action.REQUESTS_SERVED, namespace="team", model="chat", tenant=TEXT, scope="0123456789ab", count=9,
    since=instant(1_700_000_000.0),
)  # fmt: skip

FENCED = receipts.pod(
    "pod-3", standing=Standing.FENCED, gate_boot="", cache_boot="", revision=0, at=None, tiers=(), engine_reset=None,
    probes=None, fence=Fence("2026-11-22T09:00:00Z", 300, 30, receipts.T2),
)  # fmt: skip
FULL = receipts.erasure(
    pods=(receipts.pod(), FENCED), residue=(ResidueItem(Residue.POD_UNREACHABLE, "chat", 1),)
)  # fmt: skip
HEAD = Head("0123456789abcdef", "team", 2, "6" * 64, "7" * 64)
SIGNED = (Signature("8" * 64, "9" * 128),)
RECORD = Record.of_erasure(HEAD, FULL)
ROTATED = Record(HEAD, hand_over=HandOver(HandOverKind.ROTATED, "a" * 64, receipts.T0))
LOST = Record(replace(HEAD, sequence=1, previous=None), hand_over=HandOver(HandOverKind.LOST, HEAD.signer, receipts.T0))

DELETED = erasereport.Erased(key_id(SECRET), "node-1", Keys(5, 50), Keys(4, 40), Keys(1, 10))
ENDED = erasereport.End(erasereport.Outcome.STOPPED, erasereport.StopReason.SERVER_AWAY, "node-1 is away", "b" * 64, 5)

AT, LATER = datetime(2026, 11, 22, 10, 0, tzinfo=UTC), datetime(2026, 11, 22, 10, 0, 1, 250_000, tzinfo=UTC)
ORDER = ErasureOrder(
    receipts.subject(), AT, (A, B), (SharedTier("shared", True),), ("cold",), ("Public",), 3600, True,
    ErasedPrefix("chat", ("c" * 64,), "d" * 64), (Component("operator", "0.1.0", 1),),
)  # fmt: skip
KEY = erasurefacts.HeldKey("a" * 64, "b" * 64, KeyCustody.KMS)
WITNESS = erasurefacts.Witness("chat", "pod-1", "chat-0", (erasurefacts.HeldTier("cpu", PodMedium.CPU, False, True),))
FACTS: tuple[erasurefacts.Fact, ...] = (
    erasurefacts.Rolled(
        AT, (Revoked(RevokedKind.TENANT, "acme", "b" * 64, None),), (Target("chat", 7),), (WITNESS,), (KEY,)
    ),
    erasurefacts.PodSeen(
        "pod-1", Standing.ACKED, AT, "gate-boot", "cache-boot", 7, Fence(receipts.T0, 1, 2, receipts.T2)
    ),
    erasurefacts.PodErased("pod-1", 1, "gate-boot", "cache-boot", LATER, {"cpu": Copies(3, 2, 1, 30)}),
    erasurefacts.EngineReset("pod-1", AT),
    erasurefacts.EngineKept("pod-2", AT),
    erasurefacts.PodProbed("pod-1", 1, "gate-boot", "cache-boot", AT, 3, 2, 2),
    erasurefacts.KeyRemoved("a" * 64, receipts.OPERATOR),
    erasurefacts.KeyDestroyed("a" * 64, receipts.OPERATOR),
    erasurefacts.KeyNotDestroyed("b" * 64, "the service is away", AT),
    erasurefacts.Deletion(
        "shared", "node-1", 1, "job-uid", erasurefacts.JobState.DONE, AT, 2, LATER, Keys(5, 50), Keys(4, 40),
        Keys(1, 10), 2, 1, TEXT,
    ),
    erasurefacts.Look("shared", "operator-pod-uid", AT, LATER, "5" * 64, "6" * 64, 2, {"node-1": Keys(1, 10)}),
    erasurefacts.ServersSeen("shared", "Valkey", "8.1.4", AT),
    erasurefacts.TierLost("cold", AT),
    erasurefacts.Verdict(False, "Abandoned", "a person gave it up", AT, "no time"),
    erasurefacts.ReceiptWritten("d" * 64),
)  # fmt: skip
KEPT = ErasureRecord(
    "team", "forget-acme", "0123456789abcdef", (LeftEpoch(ScopeKind.TENANT, "acme", "1" * 32, "2" * 32),), (KEY,),
    Erasure(ORDER).with_facts(*FACTS), {A: ("c" * 64,)}, ("shared",),
)  # fmt: skip
BEGUN = ErasureRecord("team", "x", "0123456789abcdef", (), (), Erasure(ErasureOrder(receipts.subject(), AT, (), ())))


def _own(part: str, name: str, value: Any) -> Case:
    return Case(part, name, value, value.encode, type(value).decode)


def _asked(name: str, request: Request) -> Case:
    return Case("link", name, request, partial(encode_request, request), decode_request)


def _answered(name: str, answer: Answer) -> Case:
    return Case("link", name, answer, partial(encode_answer, answer), partial(decode_answer, type(answer)))


def _shard(name: str, *entries: Entry) -> Case:
    def decode(data: bytes) -> tuple[Entry, ...]:
        return decode_shard(data, digest_bytes(data))

    return Case("bundle", name, entries, partial(encode_shard, entries), decode)


def _pool(name: str, shard: PoolShard) -> Case:
    return Case("pools", name, shard, shard.encode, lambda data: PoolShard.decode(data, digest_bytes(data)))


def _receipt(name: str, record: Record, *signatures: Signature) -> Case:
    def decode(data: bytes) -> tuple[Record, tuple[Signature, ...]]:
        receipt = read_receipt(data)
        return receipt.record, receipt.link.signatures

    return Case("receipt", name, (record, signatures), partial(encode_receipt, record.encode(), signatures), decode)


def _reported(name: str, line: erasereport.Line) -> Case:
    return Case("erasereport", name, line, partial(erasereport.encode_line, line), erasereport.decode_line)


def _told(name: str, happened: Happened) -> Case:
    teller = Emitter(Source.OPERATOR, "kvstrata-0", "boot-1")
    head = {"time": instant(1.5), "source": Source.OPERATOR, "pod": "kvstrata-0", "boot": "boot-1", "sequence": 3}
    head |= {"logger": LOGGER, "version": AUDIT_VERSION}
    told = {name: getattr(happened, name) for name in (field.name for field in fields(Happened))}
    line = Line(**told, **head, event=happened.action.event)  # type: ignore[arg-type]
    return Case("audit", name, line, lambda: teller.line(3, 1.5, happened), read_line)


def cases() -> Iterator[Case]:
    """Yield all of them."""
    yield _own("bundle", "Root full", ROOT)
    yield _own("bundle", "Root minimal", Root("0123456789abcdef", "chat", "model-uid", 1, 1, Rules(), ()))
    yield _shard("Shard full", ENTRY, NAMED)
    yield _shard("Shard minimal", BARE)
    yield _shard("Shard empty")
    yield _pool("PoolShard full", POOL)
    yield _pool("PoolShard named", replace(POOL, versions=(replace(READ, keys=(KeyReference(3, key_id(SECRET)),)),)))
    yield _pool("PoolShard minimal", PoolShard("docs", "", ()))
    yield _own("cacheview", "CacheView full", VIEW)
    yield _own("cacheview", "CacheView minimal", CacheView("0123456789abcdef", 1, 1, Rules(), {}))

    yield _own("ack", "PodState full", POD)
    yield _own("ack", "PodState minimal", PodState("p", "u", "n", "m", "i", "g", "", 0, 0, 0, False, 0, False))

    yield _own("identity", "EngineIdentity full", EngineIdentity("f1" * 8, {"vllm": "0.32.0", "files": "5" * 64}))
    yield _own("identity", "EngineIdentity minimal", EngineIdentity(problem="LMCache 0.5.7", ungoverned=True))

    yield _own("ack", "PodState unread minimal", replace(POD, revision=0, fresh_age_ms=-1, tiers=(), usage=()))

    yield _asked("apply", ApplyRequest(7, 2))
    yield _asked("state", StateRequest())
    yield _asked("state with costs", StateRequest((PrefillCost(1024, 2_000_000), PrefillCost(4096, 3_000_000))))
    yield _asked("metrics", MetricsRequest())
    yield _asked("hash", HashRequest(b"\1\0\0\0\2\0\0\0"))
    yield _asked("hash nothing", HashRequest(b""))
    yield _asked("pool", PoolQuestion(A, CHUNKS, "f1" * 8))
    yield _asked("pool whole", PoolQuestion(A))
    yield _asked("erase", EraseRequest((A, B), ("cpu",), 2500))
    yield _asked("erase all", EraseRequest((A,)))
    yield _asked("verify", VerifyRequest(A, CHUNKS))
    yield _asked("verify erased", VerifyRequest(A))
    yield _asked("forget", ForgetRequest(A, CHUNKS))
    yield _answered("AdapterAck full", AdapterAck(7, 2, "cache-boot"))
    yield _answered("AdapterState full", STATE)
    yield _answered("AdapterState minimal", AdapterState("cache-boot", 0, 0, False, 0))
    yield _answered("metrics page", MetricsPage("# HELP a b\na 1\n"))
    yield _answered("ChunkHashes full", ChunkHashes("cache-boot", 16, CHUNKS))
    yield _answered("ChunkHashes minimal", ChunkHashes("cache-boot", 16, b""))
    yield _answered("PoolHolding full", PoolHolding("cache-boot", True, HELD, ("c" * 64,)))
    yield _answered("PoolHolding minimal", PoolHolding("cache-boot", False))
    yield _answered("AdapterErased full", ERASED)
    yield _answered("AdapterErased minimal", CLEAN)
    yield _answered("AdapterVerified full", VERIFIED)
    yield _answered("AdapterVerified minimal", AdapterVerified("cache-boot", 0, 0, False, False))
    yield _answered("Forgotten full", Forgotten("cache-boot", 3, 1))
    yield _answered("Forgotten minimal", Forgotten("cache-boot", 0))

    yield _own("erase", "EraseRequest full", EraseRequest((A, B), ("cpu",), 2500))
    yield _own("erase", "EraseRequest minimal", EraseRequest((A,)))
    yield _own("erase", "Erased full", Erased("gate-boot", 6, ERASED, 2, LeftKeys(1, 2)))
    yield _own("erase", "Erased minimal", Erased("gate-boot", 6, CLEAN))
    yield _own("erase", "Erased away", Erased("gate-boot", 6, AdapterErased("", 0, 2, EraseOutcome.CACHE_AWAY)))
    yield _own("erase", "VerifyRequest full", VerifyRequest(A, CHUNKS))
    yield _own("erase", "VerifyRequest minimal", VerifyRequest(A))
    yield _own("erase", "Verified full", Verified("gate-boot", 6, True, VERIFIED))
    yield _own("enginereset", "ResetRequest full", ResetRequest(1500))
    yield _own("enginereset", "ResetRequest minimal", ResetRequest())
    yield _own("enginereset", "EngineResetAnswer full", EngineResetAnswer("gate-boot", ResetOutcome.RESET))
    yield _own("probe", "ProbeRequest full", ProbeRequest(7, 3))
    yield _own("probe", "ProbeRequest minimal", ProbeRequest(1))
    yield _own("probe", "Probed full", PROBED)
    yield _own("probe", "Probed minimal", Probed("gate-boot", "", 0, 0, ProbeOutcome.UNREADY))

    yield _own("warm", "RenderRequest chat", RenderRequest(CHAT))
    yield _own("warm", "RenderRequest text", RenderRequest(PrefixSource(text=TEXT)))
    yield _own("warm", "RenderRequest tokens", RenderRequest(PrefixSource(token_ids=(1, 2))))
    yield _own("warm", "Rendered full", RENDERED)
    yield _own("warm", "Rendered minimal", Rendered("gate-boot", "cache-boot", "", refused=RenderRefusal.DATED))
    yield _own("warm", "WarmRequest full", WarmRequest("pool-uid", "0123456789ab", "d" * 64, CHAT))
    yield _own("warm", "Warmed full", Warmed("gate-boot", "cache-boot", WarmOutcome.STORED))
    held = PoolVersionState("0123456789ab", "d" * 64, True, HELD, ("c" * 64,))
    yield _own("warm", "PoolReport full", PoolReport("gate-boot", "cache-boot", (held,), "f1" * 8))
    yield _own("warm", "PoolReport minimal", PoolReport("gate-boot", ""))

    yield _own("keydelivery", "KeysLacking full", KeysLacking(("e" * 64, "f" * 64)))
    yield _own("keydelivery", "KeysLacking minimal", KeysLacking())

    yield _told("Line full", HAPPENED)
    yield _told("Line of a tenant", SERVED)
    yield _told("Line minimal", Happened(action=Action.EVENTS_DROPPED, count=1))
    yield _reported("Erased full", DELETED)
    yield _reported("Erased sum", replace(DELETED, keyspace=None))
    yield _reported("PrimaryEnd full", erasereport.PrimaryEnd("node-1", 2, 1, 3))
    yield _reported("End full", ENDED)
    yield _reported(
        "End minimal", erasereport.End(erasereport.Outcome.ERASED, erasereport.StopReason.NONE, "", None, 0)
    )
    yield _receipt("Erasure full", RECORD, *SIGNED)
    yield _receipt("Erasure minimal", Record.of_erasure(HEAD, receipts.lazy()), *SIGNED)
    yield _receipt("HandOver rotated", ROTATED, *SIGNED, *SIGNED)
    yield _receipt("HandOver lost", LOST, *SIGNED)

    yield Case("record", "ErasureRecord full", KEPT, partial(record_store.encode, KEPT), record_store.decode)
    yield Case("record", "ErasureRecord minimal", BEGUN, partial(record_store.encode, BEGUN), record_store.decode)


def error() -> bytes:
    """The line with which an adapter refuses."""
    return error_answer(TEXT)


def canonical(value: Any) -> bytes:
    """How a changed message is written again: receipts have no other form."""
    return canonical_json(value)
