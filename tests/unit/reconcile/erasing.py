"""A world in which an eager invalidation is carried out: the real operator over a memory API server; pods, a server,
Jobs and a chain that do what they say, and that can be made to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.clients.gate import GateError, GateFailure
from kvstrata.clients.kube import KubeError, NotLeadingError, TokenIdentity
from kvstrata.clients.redis.probe import Access, Failure
from kvstrata.clients.redis.verifier import NodeLook, TierLook
from kvstrata.contract.messages.engine_reset import EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.erase import (
    REQUIRED,
    AdapterErased,
    AdapterVerified,
    Check,
    Erased,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    Verified,
    VerifiedTier,
    VerifyRequest,
)
from kvstrata.contract.messages.erase import Amount as Blocks
from kvstrata.contract.messages.erase_report import End, Line, Outcome, PrimaryEnd, StopReason, keyspace_digest
from kvstrata.contract.messages.erase_report import Erased as ErasedLine
from kvstrata.contract.receipt.claims import claims, contradiction
from kvstrata.contract.receipt.facts import Amount, Erasure
from kvstrata.contract.receipt.record import Head, Link
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.store.redis_keys import BlockKey
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.erasure.facts import JobState
from kvstrata.objects import names
from kvstrata.objects.erasure.delete_job import TierDeletion
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.erasure.receipt_chain import ChainConflictError, ChainState
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.keys import KeyRevoker
from kvstrata.reconcile.erasure.pods import Pods
from kvstrata.reconcile.erasure.record_store import PREFIX, RecordStore
from kvstrata.reconcile.erasure.tasks import Erasures
from kvstrata.reconcile.erasure.tiers import Looks
from kvstrata.reconcile.events import Events
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE
from tests.support.worlds import Simulation

KIND = "CacheInvalidation"
OPERATOR_NAMESPACE = "kvstrata-system"
SIZE = 100
SLOTS = "5" * 64
CHUNK = bytes(range(32))


class Server:
    """One Redis server: names of values by keyspace, and how many were ever deleted."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.values: dict[str, set[str]] = {}
        self.deleted: dict[str, int] = {}
        self.slots = SLOTS
        self.problem = ""
        self.looks = 0

    def fill(self, domain: str, *keyspaces: str, blocks: int = 3, chunks: tuple[bytes, ...] = ()) -> None:
        """Store some blocks of keyspaces, besides those of `chunks`."""
        named = [*(bytes([n]) + CHUNK[1:] for n in range(blocks)), *chunks]
        for keyspace in keyspaces:
            self.values[keyspace] = {str(BlockKey(domain, keyspace, "1d" * 8, 1, 0, chunk)) for chunk in named}

    def names(self, keyspaces: Iterable[str], chunks: Iterable[str] = ()) -> list[str]:
        """Names of blocks of keyspaces; of these chunks alone, if there are any."""
        meant = set(chunks)
        found = (name for keyspace in keyspaces for name in self.values.get(keyspace, ()))
        return sorted(name for name in found if not meant or name.rpartition(":")[2] in meant)


class Verifier:
    """What the operator sees when it looks at the server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def _seen(self, keyspaces: Any, chunks: Any = ()) -> TierLook:
        server = self._server
        if server.problem:
            return TierLook((), (Failure("Timeout", server.problem),), "", "")
        found = server.names(keyspaces, chunks)
        others = len(server.names(keyspaces)) - len(found)
        size = SIZE * len(found)
        node = NodeLook(server.node, "redis:6379", True, len(found), size, names=tuple(found), unsought=others)
        return TierLook((node,), (), server.slots, server.slots)

    async def servers(self, domain: str, keyspaces: Any) -> TierLook:
        """Which servers there are."""
        return replace(self._seen(()), nodes=tuple(replace(one, values=0) for one in self._seen(()).nodes))

    async def look(self, domain: str, keyspaces: Any, chunks: Any = ()) -> TierLook:
        """What they have."""
        self._server.looks += 1
        await asyncio.sleep(0)
        return self._seen(keyspaces, chunks)


@dataclass
class Jobs:
    """Jobs that delete from the server when they are looked at for the second time."""

    server: Server
    ran: list[TierDeletion] = field(default_factory=list)
    runs: dict[tuple[str, str, int], DeletionRun] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    fails: int = 0
    unfinished: int = 0
    """How many Jobs are left suspended by who makes them."""
    late: list[Callable[[], None]] = field(default_factory=list)
    """What happens right after the first deletion, and so on."""

    async def start(self, order: TierDeletion) -> DeletionRun:
        """Make the Job, once."""
        slot = (order.erasure, order.tier.name, order.round)
        if slot not in self.runs:
            self.ran.append(order)
            self.runs[slot] = DeletionRun(f"job-{len(self.ran)}", JobState.RUNNING, begun=not self.unfinished)
            self.unfinished = max(0, self.unfinished - 1)
        elif not self.runs[slot].begun:
            self.runs[slot] = replace(self.runs[slot], begun=True)
        return self.runs[slot]

    async def look(self, erasure: str, tier: str, round: int) -> DeletionRun | None:
        """Say how it stands; one that runs gets done."""
        run = self.runs.get((erasure, tier, round))
        if run is not None and run.state is JobState.RUNNING and run.begun:
            self.runs[erasure, tier, round] = self._done(run)
            return run
        return run

    def _done(self, run: DeletionRun) -> DeletionRun:
        if self.fails:
            self.fails -= 1
            return replace(run, state=JobState.FAILED, problem="the Job's pod was evicted")
        order, server, lines = self.ran[-1], self.server, list[ErasedLine]()
        if order.chunks:
            return self._chunks_done(run, order)
        node = server.node
        for keyspace in order.keyspaces:
            gone = len(server.values.pop(keyspace, ()))
            # Tombstones remember what runs before deleted.
            total = server.deleted[keyspace] = server.deleted.get(keyspace, 0) + gone
            amount = Amount(total, SIZE * total)
            lines.append(ErasedLine(keyspace_digest(keyspace), node, amount, amount, Amount(0, 0)))
        if self.late:
            self.late.pop(0)()
        end = End(Outcome.ERASED, StopReason.NONE, "", SLOTS, 30_000)
        report: tuple[Line, ...] = (*lines, PrimaryEnd(node, 1, 1, 0), end)
        return replace(run, state=JobState.DONE, lines=report)

    def _chunks_done(self, run: DeletionRun, order: TierDeletion) -> DeletionRun:
        gone = set(self.server.names(order.keyspaces, order.chunks))
        for held in self.server.values.values():
            held -= gone
        amount = Amount(len(gone), SIZE * len(gone))
        if self.late:
            self.late.pop(0)()
        report: tuple[Line, ...] = (
            ErasedLine(None, self.server.node, amount, amount, Amount(0, 0)),
            PrimaryEnd(self.server.node, 1, 1, 0),
            End(Outcome.ERASED, StopReason.NONE, "", SLOTS, 0),
        )
        return replace(run, state=JobState.DONE, lines=report)

    async def remove(self, erasure: str) -> None:
        """Remove what was made."""
        self.removed.append(erasure)


FIRST_DIGEST = digest_bytes(b"1")
"""Digest of the first receipt of a `Chain`."""


@dataclass
class Chain:
    """A chain that takes receipts whose facts hold together."""

    issued: list[Erasure] = field(default_factory=list)
    conflict: str = ""
    lost_answers: int = 0
    told: list[ReceiptChain | None] = field(default_factory=list)
    """What the domain's status told of the chain, each time."""

    async def issue(self, namespace: str, domain: str, told: ReceiptChain | None, facts: Erasure) -> ChainState:
        """Append, or find what is there."""
        self.told.append(told)
        if self.conflict:
            raise ChainConflictError(self.conflict)
        assert contradiction(facts) is None
        known = next((one for one in self.issued if one.subject.uid == facts.subject.uid), None)
        assert known in (None, facts), "each attempt writes the same receipt"
        if known is None:
            self.issued.append(facts)
        if self.lost_answers:
            self.lost_answers -= 1
            raise KubeError(0, "Timeout", "the API server did not answer")
        return ChainState(domain, namespace, [_link(domain, number, one) for number, one in enumerate(self.issued, 1)])


def _link(domain: str, number: int, facts: Erasure) -> Link:
    body = {"erasure": {"subject": {"uid": facts.subject.uid}}}
    return Link(Head(domain, NAMESPACE, number, None, "0" * 64), 1, (), body, str(number).encode())


class Gates:
    """Gates of pods that erase what they hold when they are asked."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.erased: list[tuple[str, EraseRequest]] = []
        self.verified: list[tuple[str, VerifyRequest]] = []
        self.away: set[str] = set()
        self.holding: set[str] = set()
        self.missing_places: set[str] = set()
        """Pods that find files in places of others in their folder."""
        self.finding: set[str] = set()
        self.resets: list[str] = []
        self.engines: dict[str, list[ResetOutcome]] = {}
        self.token = ""

    def _pod(self, ip: str) -> str:
        return next(name for name, address in self._world.addresses.items() if address == ip)

    def _answering(self, ip: str) -> tuple[str, str]:
        pod = self._pod(ip)
        if pod in self.away:
            raise GateError(GateFailure.TIMEOUT, "it did not answer")
        return pod, self.token or self._world.token(pod)

    async def erase(self, pod_ip: str, server_name: str, request: EraseRequest) -> tuple[Erased, str]:
        """Erase, unless a reader holds something."""
        await asyncio.sleep(0)
        pod, token = self._answering(pod_ip)
        self.erased.append((pod, request))
        state = self._world.sim.acks[self._world.sim.pod(pod).uid]
        held = pod in self.holding
        row = ErasedTier(
            "cpu", "CPU", found=Blocks(5, 50), deleted=Blocks(3 if held else 5, 50), checked=tuple(REQUIRED["CPU"]),
            remaining=Blocks(2, 0) if held else Blocks(), reading=2 if held else 0,
        )  # fmt: skip
        outcome = EraseOutcome.REMAINING if held else EraseOutcome.COMPLETE
        rows: tuple[ErasedTier, ...] = (row,)
        if "disk" in request.tiers:
            checks = REQUIRED["NVMe"] | (set() if pod in self.missing_places else {Check.PLACES})
            files = Blocks(4, 40)
            rows += (ErasedTier("disk", "NVMe", True, files, files, checked=tuple(sorted(checks))),)
        cache = AdapterErased(state.cache_boot, state.acked, 1, outcome, tiers=rows, elsewhere=("shared",))
        said = Erased(state.gate_boot, state.acked, cache)
        return said, token

    async def verify(self, pod_ip: str, server_name: str, request: VerifyRequest) -> tuple[Verified, str]:
        """Miss everything, unless told otherwise."""
        await asyncio.sleep(0)
        pod, token = self._answering(pod_ip)
        self.verified.append((pod, request))
        state = self._world.sim.acks[self._world.sim.pod(pod).uid]
        asked = len(request.chunks or b"") // 32
        tier = VerifiedTier("cpu", "CPU", asked, asked if pod in self.finding else 0, kept=0)
        found = AdapterVerified(state.cache_boot, state.acked, 1, True, False, asked, (tier,))
        return Verified(state.gate_boot, state.acked, False, found), token

    async def reset(self, pod_ip: str, server_name: str, request: ResetRequest) -> tuple[EngineResetAnswer, str]:
        """Have the engine forget, if it is idle and knows how."""
        await asyncio.sleep(0)
        pod, token = self._answering(pod_ip)
        self.resets.append(pod)
        state = self._world.sim.acks[self._world.sim.pod(pod).uid]
        outcome = self.engines.get(pod, [ResetOutcome.RESET])
        return EngineResetAnswer(state.gate_boot, outcome.pop(0) if len(outcome) > 1 else outcome[0]), token


class World:
    """The simulation, and everybody whom an erasure asks."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.server = Server("n1")
        self.jobs, self.chain, self.gates = Jobs(self.server), Chain(), Gates(self)
        self.addresses: dict[str, str] = {}
        self.keys = KeyPods(sim, self.addresses)
        self.leading = True
        self.board: Erasures | None = None
        for number, pod in enumerate(sorted(sim.world.pods.get("tiny", {}))):
            self.address(pod, f"10.0.0.{number + 1}")

    def address(self, pod: str, ip: str) -> None:
        """Give a pod an address of its own."""
        raw = dict(self.sim.kube.objects[("Pod", NAMESPACE, pod)])
        self.sim.put({**raw, "status": {**raw["status"], "podIP": ip}})
        self.addresses[pod] = ip
        self.keys.held[pod] = {}

    def token(self, pod: str) -> str:
        """A token that the API server bound to a pod."""
        uid = self.sim.pod(pod).uid
        account = f"system:serviceaccount:{NAMESPACE}:{names.model_child('tiny')}"
        self.sim.kube.tokens[f"token-of-{pod}"] = TokenIdentity(account, uid)
        return f"token-of-{pod}"

    def deps(self) -> ErasureDeps:
        """Everybody whom the operator of this moment knows."""
        sim = self.sim
        self.keys.lead()

        def may_write() -> None:
            if not self.leading:
                raise NotLeadingError

        async def at_once(_: float) -> None:
            await asyncio.sleep(0)

        def verifier(endpoint: str, server_name: str, access: Access, *, cluster: bool) -> Any:
            return Verifier(self.server)

        def now() -> datetime:
            # Nothing that follows from something happens at the same moment.
            sim.now += timedelta(milliseconds=1)
            return sim.now

        return ErasureDeps(
            kube=sim.kube,
            store=sim.store,
            queue=sim.queue,
            events=Events(sim.kube),
            record_store=RecordStore(sim.kube, OPERATOR_NAMESPACE),
            keys=KeyRevoker(sim.kube, sim.store, sim.queue, sim.secret_store, "operator-1", now, may_write, sim.kms),
            looks=Looks(sim.kube, "operator-1", now, verifier),
            pods=Pods(sim.kube, self.gates, now),
            jobs=self.jobs,
            chains=self.chain,
            may_write=may_write,
            now=now,
            sleep=at_once,
        )

    @contextlib.asynccontextmanager
    async def leading_operator(self) -> AsyncIterator[Erasures]:
        """Carry erasures out until the block ends."""
        async with Erasures(self.deps()) as board:
            self.sim.erase, self.board = board.take, board
            await board.recall()
            yield board

    async def turn(self, seconds: float = 0.0) -> None:
        """Let everybody do what there is to be done at this moment, then let time pass."""
        for _ in range(3):
            self.sim.settle()
            assert self.board is not None
            for runner in self.board._runners.values():
                runner.wake()
            for _ in range(12):
                await asyncio.sleep(0)
        self.sim.now += timedelta(seconds=seconds)

    async def until(self, condition: Callable[[], object], tick_s: float = 1.0, turns: int = 400) -> None:
        """Let time pass until `condition` holds."""
        for _ in range(turns):
            if condition():
                return
            await self.turn(tick_s)
        raise AssertionError(f"it never came: {self.status}")

    @property
    def status(self) -> dict[str, Any]:
        """What the invalidation says."""
        return self.sim.status(KIND, "leave")

    @property
    def phase(self) -> str:
        """Where it stands."""
        return str(self.status.get("phase", ""))

    def holds(self) -> set[str]:
        """Conditions that are true."""
        return {one["type"] for one in self.status.get("conditions", ()) if one["status"] == "True"}

    def proven(self) -> set[ReceiptClaim]:
        """What the only receipt proves."""
        (facts,) = self.chain.issued
        return set(claims(facts))

    def kept(self) -> list[str]:
        """Records of erasures in the operator's namespace."""
        secrets = [
            name for kind, where, name in self.sim.kube.objects if (kind, where) == ("Secret", OPERATOR_NAMESPACE)
        ]
        return [name for name in secrets if name.startswith(PREFIX)]
