"""Whatever a server says, in whatever pieces, however late, whenever it hangs up: no wrong byte, no hang, no escape.

One server, and a cluster of two that redirect as they like. A block that is loaded is the right one; every task is
answered about at its deadline; what LMCache lent is touched by nobody after that; all threads live on.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e.cluster.ports import free_port
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView, PoolView
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata.contract.store.redis_keys import BlockKey
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, boottime_ns
from kvstrata_sidecar.adapter.policy.pools import Readable
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.tier.encryption import GcmSealer, PlainSealer
from kvstrata_sidecar.adapter.tier.tasks import Task, TaskTable
from kvstrata_sidecar.gate.policy.volume import KeyFiles
from tests.support.amounts import examples
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, RESOLVED
from tests.tiers.lying_server import Lie, LyingServer, World, moved
from tests.tiers.pool_gate import POOL
from tests.tiers.redis_cluster import until
from tests.tiers.tier_driver import block

pytestmark = pytest.mark.claim("no answer of a hostile server makes a pod take a wrong block")

BLOCK_BYTES = 9_000
DEADLINES_S = {"lookup": 0.1, "load": 0.2, "store": 0.3}
PATIENCE = 100
"""How many times as long a tier waits in a test that wants every block, on a busy machine too."""

SLACK_S = 20.0
"""What a busy machine may add; a hang is for ever, or takes as long as I/O may in tests of what comes no further."""

HANGS_MS = 60_000

AFTERWARDS = 0xEE
"""What LMCache puts into memory that was answered for."""

KEY = DataKey(1, b"the data key of keyspace a: 32 b"[:32])
POOL_KEY = DataKey(1, b"the data key of a pool: 32 bytes"[:32])
MANIFEST = "0" * 64


def content(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def keep(right: bytes, _: list[bytes], __: World) -> bytes:
    return right


garbage = st.binary(max_size=300).map(lambda data: lambda _, __, ___: data)
errors = st.sampled_from(
    [b"ERR no", b"OOM no", b"LOADING", b"CLUSTERDOWN", b"TRYAGAIN", b"NOAUTH", b"NOSCRIPT", b"READONLY you", b"MOVED",
     b"MOVED 1", b"ASK x y:z", b"MOVED 99999 h:1", b"MOVED 1 :0", b"MOVED 1 h:99999", b"MOVED 1 ?:1", b"ASK 5 a b",
     b"ERR Script attempted to access a non local key in a cluster node",
     b"ERR Attempted to access a non local key in a cluster node", b""]
).map(lambda text: lambda _, __, ___: b"-" + text + b"\r\n")  # fmt: skip
lengths = st.sampled_from(
    [b"$-1", b"$-2", b"*-1", b"*5", b"$99999999999", b"*99999999", b"$5", b":", b"%2", b"_", b"~1"]
).map(lambda head: lambda right, __, ___: head + b"\r\n" + right)


def at(right: bytes, share: float) -> int:
    return int(share * len(right))


share = st.floats(0, 1)
cut = share.map(lambda s: lambda right, _, __: right[: at(right, s)])
doubled = st.just(lambda right, _, __: right + right)
longer = st.binary(min_size=1, max_size=20).map(lambda extra: lambda right, _, __: right + extra)
inserted = st.tuples(share, st.binary(min_size=1, max_size=9)).map(
    lambda how: lambda right, _, __: right[: at(right, how[0])] + how[1] + right[at(right, how[0]) :]
)


def flip(most: int) -> st.SearchStrategy[Callable[..., bytes]]:
    def says(where: int, mask: int) -> Callable[..., bytes]:
        def lie(right: bytes, _: list[bytes], __: World) -> bytes:
            place = where % max(1, min(most, len(right)))
            return right[:place] + bytes([right[place] ^ mask]) + right[place + 1 :] if right else right

        return lie

    return st.builds(says, st.integers(0, 10_000), st.integers(1, 255))


def lies(*kinds: st.SearchStrategy[Callable[..., bytes]]) -> st.SearchStrategy[Lie]:
    return st.builds(
        Lie,
        st.one_of(st.just(keep), *kinds),
        st.lists(st.integers(1, 60) | st.integers(1, 3000), max_size=6).map(tuple),
        st.sampled_from([0.0, 0.0, 0.002, 0.06]),
        st.sampled_from([0.0, 0.0, 0.0, 0.002, 0.05, 0.5]),
        st.sampled_from([False, False, False, True]),
    )


PLACES: list[Callable[[World], bytes]] = [
    lambda world: b"127.0.0.1:%d" % world.ports[0],
    lambda world: b"127.0.0.1:%d" % world.ports[-1],
    lambda world: b"127.0.0.1:%d" % world.dead_port,
    lambda world: b":%d" % world.ports[0],
    lambda _: b"nowhere.invalid:6379",
    lambda _: b"10.255.255.1:6379",
]
redirections = st.builds(
    moved,
    st.sampled_from([b"MOVED", b"ASK"]),
    st.sampled_from(PLACES),
    st.sampled_from([None, None, None, 0, 16_383]),
)
operations = st.lists(st.sampled_from(["lookup", "load", "store"]), min_size=2, max_size=5)


class Scene:
    """A tier on lying servers, and what LMCache would do with it."""

    def __init__(
        self,
        directory: Path,
        lies: list[Lie],
        *,
        servers: int,
        encrypted: bool,
        pooled: bool = False,
        workers: int = 2,
        patience: int = 1,
        io_timeout_ms: int = 100,
    ) -> None:
        self.world = World(dead_port=free_port())
        self.servers = [LyingServer(self.world) for _ in range(servers)]
        cluster = servers > 1
        enforcement = Enforcement(DOMAIN, lambda reopen=False: boottime_ns())
        keys = {KEYSPACE_A: (KEY,), POOL: (POOL_KEY,)} if encrypted else {}
        KeyFiles(directory).write(keys)
        enforcement.keys.follow(directory / KEYS_DIRECTORY, dict.fromkeys(keys, (1,)))
        self.blocks = [block(KEYSPACE_A, number) for number in (3, 70, 140, 250)]
        view = CacheView(DOMAIN, 1, 1, Rules(), {KEYSPACE_A: ()})
        if pooled:  # the pool has two of the chunks, the reader itself another of these two and the rest
            view = replace(
                view, keyspaces={KEYSPACE_A: (), POOL: ()}, pools={POOL: PoolView(MANIFEST, True, ("shared",))},
                reads={KEYSPACE_A: (POOL,)},
            )  # fmt: skip
        chunks = frozenset(one.chunk_hash for one in self.blocks[:2])
        enforcement.apply(view, Readable.of(view, {MANIFEST: chunks}))
        sealer = GcmSealer(enforcement.keys) if encrypted else PlainSealer()
        kept = [(KEYSPACE_A, one) for one in self.blocks[pooled:]]
        kept += [(POOL, one) for one in self.blocks[: 2 * pooled]]
        for keyspace, one in kept:
            name = str(BlockKey(DOMAIN, keyspace, RESOLVED, one.rank, one.group, one.chunk_hash)).encode()
            parts = sealer.seal(keyspace, name, memoryview(content(one.chunk_hash[0])), 0)
            self.world.values[name] = b"".join(bytes(part) for part in parts)
        params = TierParams(
            "shared",
            (Endpoint("127.0.0.1", self.servers[0].port),),
            cluster=cluster,
            workers=workers,
            encryption="Required" if encrypted else "Disabled",
            connect_timeout_ms=100 * patience,
            io_timeout_ms=io_timeout_ms * patience,
            lookup_deadline_ms=int(1000 * patience * DEADLINES_S["lookup"]),
            load_deadline_ms=int(1000 * patience * DEADLINES_S["load"]),
            store_deadline_ms=int(1000 * patience * DEADLINES_S["store"]),
        )
        self._answered: queue.Queue[Task] = queue.Queue()
        self.escaped: list[threading.ExceptHookArgs] = []
        threading.excepthook = self.escaped.append
        self.tier = Tier(AdapterParams(DOMAIN, IDENTITY, params), params, enforcement, self._answered.put)
        give_up_at_s = time.monotonic() + 60
        while (state := self.tier.state()).nodes_away or state.nodes < servers:
            assert time.monotonic() < give_up_at_s, state
            time.sleep(0.002)
        self.world.lies += lies
        self.done: list[bytearray] = []

    def do(self, operation: str) -> None:
        started_s = time.monotonic()
        buffers = [
            bytearray(content(one.chunk_hash[0]) if operation == "store" else BLOCK_BYTES) for one in self.blocks
        ]
        views = [memoryview(buffer) for buffer in buffers]
        if operation == "store":
            self._wait(self.tier.store(self.blocks, views))
            self.tier.pop_stores()
        elif operation == "lookup":
            task = self.tier.lookup(self.blocks)
            self._wait(task)
            assert self.tier.pop_found(task) is not None
        else:
            task = self.tier.load(self.blocks, views)
            self._wait(task)
            hits = self.tier.pop_found(task)
            assert hits is not None
            for one, hit, buffer in zip(self.blocks, hits, buffers, strict=True):
                assert not hit or buffer == content(one.chunk_hash[0]), "a wrong block was taken"
        assert time.monotonic() - started_s < DEADLINES_S[operation] + SLACK_S, "a task hung"
        for buffer in buffers:
            buffer[:] = bytes([AFTERWARDS]) * BLOCK_BYTES
        self.done += buffers

    def end(self) -> None:
        """Check what has to hold when all is over, however the servers go on."""
        try:
            assert self.tier.healthy, "a thread ended"
            time.sleep(0.02)
        finally:
            self.world.cut_short.set()
            self.tier.close()
            for server in self.servers:
                server.close()
            threading.excepthook = threading.__excepthook__
        assert not self.escaped, self.escaped
        assert all(buffer == bytes([AFTERWARDS]) * BLOCK_BYTES for buffer in self.done), "touched after the answer"
        assert not any(bytes([AFTERWARDS]) * 64 in value for value in self.world.received), "sent after the answer"

    def _wait(self, task_id: int) -> None:
        assert self._answered.get(timeout=60).task_id == task_id


def play(lies: list[Lie], operations: list[str], **options: Any) -> None:
    with TemporaryDirectory() as directory:
        scene = Scene(Path(directory), lies, **options)
        try:
            for operation in operations:
                scene.do(operation)
        finally:
            scene.end()


hostile = settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
structural = (garbage, errors, lengths, cut, doubled, longer, flip(60))


@hostile
@given(st.lists(lies(*structural, inserted, flip(10_000)), max_size=12), operations)
def test_nothing_that_one_server_says_is_taken_for_a_block_that_is_not(lies: list[Lie], operations: list[str]) -> None:
    play(lies, operations, servers=1, encrypted=True)


@pytest.mark.parametrize("place", [0, 10, 60, BLOCK_BYTES // 2, -10])
def test_a_value_that_is_changed_anywhere_is_not_taken(place: int) -> None:
    def changed(right: bytes, arguments: list[bytes], _: World) -> bytes:
        where = place % len(right)
        lie = right[:where] + bytes([right[where] ^ 1]) + right[where + 1 :]
        return lie if arguments[0] == b"GET" else right

    play([Lie(changed)] * 200, ["load", "load"], servers=1, encrypted=True)


@hostile
@given(st.lists(lies(*structural), max_size=12), operations)
def test_nothing_that_one_server_says_gets_past_the_frame_of_an_unencrypted_tier(
    lies: list[Lie], operations: list[str]
) -> None:
    play(lies, operations, servers=1, encrypted=False)


@hostile
@given(st.lists(lies(redirections, redirections, *structural), max_size=20), operations)
def test_no_redirection_leads_to_a_wrong_block_or_out_of_time(lies: list[Lie], operations: list[str]) -> None:
    play(lies, operations, servers=2, encrypted=True)


@hostile
@given(st.lists(lies(redirections, *structural), max_size=16), operations, st.sampled_from([1, 2]), st.booleans())
def test_nothing_that_servers_say_of_a_pool_is_taken_for_a_block_that_is_not(
    lies: list[Lie], operations: list[str], servers: int, encrypted: bool
) -> None:
    play(lies, operations, servers=servers, encrypted=encrypted, pooled=True)


@pytest.mark.parametrize("kind", [b"MOVED", b"ASK"])
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_a_redirection_without_end_ends(kind: bytes, place: int) -> None:
    lie = Lie(moved(kind, PLACES[place]))
    play([lie] * 2000, ["lookup", "load", "store", "lookup", "load"], servers=2, encrypted=True)


def test_a_lie_that_is_let_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: with a transport that takes any value, they do."""
    for check in ("header_holds", "finish"):
        monkeypatch.setattr(f"kvstrata_sidecar.adapter.tier.encryption.PlainOpening.{check}", lambda _: True)
    other = Lie(
        lambda right, arguments, _: right.replace(bytes([3]) * 8, b"x" * 8) if arguments[0] == b"GET" else right
    )
    with pytest.raises(AssertionError, match="a wrong block was taken"):
        play([other] * 200, ["load"] * 4, servers=1, encrypted=False, patience=PATIENCE)


def test_a_server_that_wants_credentials_again_gets_them_on_a_new_connection() -> None:
    with TemporaryDirectory() as directory:
        scene = Scene(Path(directory), [], servers=1, encrypted=True, workers=1, patience=PATIENCE)
        # The first load opens the worker's connection, the others use it.
        for code in (b"", b"NOAUTH Authentication required.", b"WRONGPASS invalid username-password pair"):
            if code:
                scene.world.lies.append(Lie(lambda _, __, ___, code=code: b"-%b\r\n" % code))  # type: ignore[misc]
            buffers = [bytearray(BLOCK_BYTES) for _ in scene.blocks]
            task = scene.tier.load(scene.blocks, [memoryview(buffer) for buffer in buffers])
            scene._wait(task)
            assert scene.tier.pop_found(task) == bytes([1] * len(scene.blocks))
        assert scene.tier.state().errors == 0
        scene.end()


UNFINISHED = Lie(keep, (2000,), pause_s=2 * HANGS_MS / 1000)
"""A block that is still coming when its load's deadline has passed; the rest of it comes when the test says so."""


def test_a_block_that_is_still_coming_at_the_deadline_is_cut_off() -> None:
    play([UNFINISHED] * 400, ["load", "load"], servers=1, encrypted=False, io_timeout_ms=HANGS_MS)


def test_an_answer_that_comes_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a task table that answers while a block is coming, and workers that are not cut off, they fail."""
    right = TaskTable._answer_if_over

    def too_early(self: TaskTable, task: Task) -> bool:
        touching, task.touching = task.touching, 0
        try:
            return right(self, task)
        finally:
            task.touching = touching

    monkeypatch.setattr(TaskTable, "_answer_if_over", too_early)
    monkeypatch.setattr("kvstrata_sidecar.adapter.tier.threads.Worker.abort", lambda *_: None)
    # Patient, so that the block has begun to come at the deadline.
    patience = 25
    with TemporaryDirectory() as directory:
        scene = Scene(
            Path(directory), [UNFINISHED] * 400, servers=1, encrypted=False, patience=patience,
            io_timeout_ms=HANGS_MS // patience,
        )  # fmt: skip
        scene.do("load")
        scene.world.cut_short.set()
        until(lambda: any(buffer != bytes([AFTERWARDS]) * BLOCK_BYTES for buffer in scene.done))
        with pytest.raises(AssertionError, match="touched after the answer"):
            scene.end()


def test_a_listener_that_never_greets_costs_a_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = TierParams("shared", (Endpoint("127.0.0.1", silent.getsockname()[1]),), cluster=True)
        answered: queue.Queue[Task] = queue.Queue()
        enforcement = Enforcement(DOMAIN, lambda reopen=False: boottime_ns())
        enforcement.apply(CacheView(DOMAIN, 1, 1, Rules(), {KEYSPACE_A: ()}))
        silent_tier = Tier(AdapterParams(DOMAIN, IDENTITY, tier), tier, enforcement, answered.put)
        started_s = time.monotonic()
        silent_tier.lookup([block(KEYSPACE_A)])
        answered.get(timeout=60)
        assert time.monotonic() - started_s < SLACK_S
        silent_tier.close()
        assert time.monotonic() - started_s < 2 * SLACK_S
