"""The link to the cache server: how long its answers are waited for, and what a wrong or a lost one means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import AdapterAck, PrefillCost, encode_answer, error_answer
from kvstrata.contract.messages.erase import AdapterErased, AdapterVerified, EraseRequest, VerifyRequest
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata_sidecar.gate import adapter_link
from kvstrata_sidecar.gate.adapter_link import AdapterLink

from .stand_ins import running
from .test_prefill import page
from .world import World, entry, keyspace, until

A = keyspace("a")
ASKING: dict[str, tuple[str, Callable[[AdapterLink], Awaitable[Any]]]] = {
    "hash": ("HASH_TIMEOUT_S", lambda link: link.hash(b"")),
    "pool": ("POOL_TIMEOUT_S", lambda link: link.pool(A)),
    "erase": ("ERASE_TIMEOUT_S", lambda link: link.ask(EraseRequest((A,)), AdapterErased)),
    "verify": ("ERASE_TIMEOUT_S", lambda link: link.ask(VerifyRequest(A), AdapterVerified)),
    "forget": ("ERASE_TIMEOUT_S", lambda link: link.ask(ForgetRequest(A, bytes(32)), Forgotten)),
}


class Scripted:
    """A cache server that gives the answer it was made with, or none, and counts the connections left open."""

    def __init__(self, path: Path, answer: bytes | None) -> None:
        self.path, self.answer, self.open = path, answer, 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await reader.readline()
            if self.answer is not None:
                writer.write(self.answer)
                if not self.answer:
                    return
            await reader.read()
        finally:
            self.open -= 1
            writer.close()


def link_to(world: World) -> AdapterLink:
    identity: Any = SimpleNamespace(identity=SimpleNamespace(fingerprint=""))  # for questions alone
    return AdapterLink(world.directory / "scripted.sock", identity)


@pytest.fixture
async def scripted(world: World) -> Callable[[bytes | None], Any]:
    return lambda answer: Scripted(world.directory / "scripted.sock", answer)


@pytest.mark.parametrize("asked", sorted(ASKING))
async def test_an_answer_that_does_not_come_is_given_up(
    world: World, scripted: Any, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ask = ASKING[asked]
    monkeypatch.setattr(adapter_link, name, 0.1)
    server = scripted(None)
    async with running(server):
        with pytest.raises(ContractError, match="did not answer in time"):
            await asyncio.wait_for(ask(link_to(world)), 20)
        await until(lambda: not server.open)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "does not answer"),
        (b"{}\n", ""),
        (b"nonsense\n", ""),
        (error_answer("no"), "no"),
        (b"x" * (1 << 22) + b"\n", "does not answer"),
        (encode_answer(AdapterAck(1, 1, "boot")), ""),
    ],
    ids=["closed", "empty", "nonsense", "refused", "endless", "of another kind"],
)
@pytest.mark.parametrize("asked", sorted(ASKING))
async def test_any_other_answer_is_an_error(
    world: World, scripted: Any, asked: str, answer: bytes, problem: str
) -> None:
    server = scripted(answer)
    async with running(server):
        with pytest.raises(ContractError, match=problem or None):
            await asyncio.wait_for(ASKING[asked][1](link_to(world)), 20)
        await until(lambda: not server.open)


async def test_a_cache_server_that_is_not_there_does_not_answer(world: World) -> None:
    for _, ask in ASKING.values():
        with pytest.raises(ContractError, match="does not answer"):
            await ask(link_to(world))


async def test_a_lost_link_leaves_nothing_of_what_was_told(gate: World) -> None:
    link = gate.gate.link
    await until(lambda: link.state.tiers)
    await gate.adapter.stop()
    await until(lambda: not link.state.tiers)
    told = link.state
    assert (told.usage, told.usage_left_out, told.tier_usage) == ((), 0, ())
    assert gate.gate.enforcement.cache_boot == ""
    await until(lambda: "does not answer (No such file or directory)" in link.problem)
    await gate.adapter.start()
    await until(lambda: gate.gate.enforcement.cache_boot == "boot-1" and not link.problem)
    await until(lambda: [tier.name for tier in link.state.tiers] == ["shared"])


async def test_a_refused_revision_is_asked_for_again_and_the_reason_told(gate: World) -> None:
    gate.adapter.refusals = 2
    before = len(gate.adapter.applied)
    revision = await gate.publish([entry("acme", "acme-2")])
    await until(lambda: "I/O on removed keyspaces has not ended yet" in gate.gate.state().problem)
    await gate.acked(revision)
    assert gate.adapter.applied[before:] == [revision] * 3
    assert gate.gate.state().problem == ""


async def test_a_refused_first_revision_is_asked_for_again(world: World) -> None:
    world.adapter.refusals = 1
    await world.publish([entry("acme")])
    async with world.started():
        await world.acked(1)
        assert world.adapter.applied == [1, 1]


@pytest.mark.parametrize("changes", [{"acknowledges": 1}, {"acknowledged_term": 0}])
async def test_an_older_revision_or_term_is_no_acknowledgement(gate: World, changes: dict[str, int]) -> None:
    await gate.acked(await gate.publish([entry("acme")], term=2))
    for name, value in changes.items():
        setattr(gate.adapter, name, value)
    await gate.publish([entry("acme", "acme-2")], term=2)
    await until(lambda: "something else than it was asked" in gate.gate.link.problem)
    assert gate.gate.enforcement.acked == 2
    gate.adapter.acknowledges, gate.adapter.acknowledged_term = 0, None
    await gate.acked(3)


async def test_a_newer_revision_that_the_cache_server_read_itself_counts(gate: World) -> None:
    gate.adapter.acknowledges = 2
    await gate.publish([entry("acme", "acme-2")])
    await gate.acked(2)


async def test_an_acknowledgement_comes_with_the_tiers_of_its_revision(gate: World) -> None:
    gate.gate.link.poll_s = 3600
    await gate.acked(await gate.publish([entry("acme", "acme-2")]))
    gate.adapter.tier = {"full": True}
    await gate.acked(await gate.publish([entry("acme", "acme-3")]))
    assert [tier.full for tier in gate.gate.link.state.tiers] == [True]


async def test_another_cache_server_behind_the_link_must_apply_everything_again(gate: World) -> None:
    before = len(gate.adapter.applied)
    gate.adapter.boot = "boot-2"
    await until(lambda: gate.gate.enforcement.cache_boot == "boot-2")
    assert gate.adapter.applied[before:] == [1]


@pytest.mark.parametrize(
    "changes",
    [{"stored": 9}, {"loaded": 9}, {"refused": 9}, {"errors": 9}, {"settling": 9}, {"used_bytes": 9}, {"detail": "x"}],
)
async def test_counts_and_details_of_tiers_wake_nobody(gate: World, changes: dict[str, Any]) -> None:
    woken: list[int] = []
    await until(lambda: gate.gate.link.state.tiers)
    gate.gate.enforcement.changed.append(lambda: woken.append(1))
    gate.adapter.tier = changes
    name, value = next(iter(changes.items()))
    await until(lambda: getattr(gate.gate.link.state.tiers[0], name) == value)
    assert woken == []
    gate.adapter.breaker = "open"
    await until(lambda: woken == [1])


async def test_the_cost_of_prefill_is_sent_to_the_cache_server(gate: World) -> None:
    gate.gate.prefill.observe(page(0, 0.0, 0))
    gate.gate.prefill.observe(page(2, 4.0, 2000))
    await until(lambda: gate.adapter.costs == (PrefillCost(1024, 2_000_000),))
