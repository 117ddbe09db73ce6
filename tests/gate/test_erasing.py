"""Erasure at the operator's port: who may ask, what is refused, and what keeps an answer from being complete."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from kvstrata.contract.messages.erase import (
    ERASE_PATH,
    VERIFY_PATH,
    Amount,
    Erased,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    LeftKeys,
    Verified,
    VerifyRequest,
)
from kvstrata.contract.messages.pod_state import ACK_TOKEN_HEADER
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.policy.enforcement import InFlight

from . import pki
from .test_rendering import posted, say
from .world import World, entry, keyspace, until

OLD = keyspace("acme-of-before")
HELD = ErasedTier("dram", "CPU", remaining=Amount(2, 8), reading=2)
BODY = EraseRequest((OLD,)).encode()


async def erased(world: World, *keyspaces: str, wait_s: float = 0.0, tiers: tuple[str, ...] = ()) -> Erased:
    answer = await say(
        world, posted(ERASE_PATH, EraseRequest(keyspaces or (OLD,), tiers, round(1000 * wait_s)).encode())
    )
    assert answer.status == 200, answer.body
    assert answer.headers[ACK_TOKEN_HEADER.lower()] == "the-pods-token"
    assert not any(name.encode() in answer.body for name in keyspaces)
    return Erased.decode(answer.body)


@pytest.mark.parametrize(("path", "body"), [(ERASE_PATH, BODY), (VERIFY_PATH, VerifyRequest(OLD).encode())])
async def test_only_the_operators_certificate_may_ask(gate: World, path: str, body: bytes) -> None:
    for name in ("kvstrata-gate", "kvstrata-operator.evil", "acme"):
        other = gate.authority.issue(gate.directory / name, name, server=False)
        answer = await say(gate, posted(path, body), pki.client_context(other, present=True))
        assert answer.status == 403
    assert (gate.adapter.erasures, gate.adapter.verifications) == ([], [])
    assert (await say(gate, posted(path, body))).status == 200


@pytest.mark.parametrize("path", [ERASE_PATH, VERIFY_PATH])
async def test_tenants_do_not_reach_it(gate: World, path: str) -> None:
    assert (await gate.ask(posted(path, BODY))).status in (401, 404)
    assert (await gate.ask(posted(path, BODY), "health")).status in (404, 413)
    assert gate.adapter.erasures == []


@pytest.mark.parametrize("path", [ERASE_PATH, VERIFY_PATH])
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"contract":1}', BODY.replace(OLD.encode(), b"acme")])
async def test_a_body_that_is_no_request_is_refused_and_reaches_no_cache_server(
    gate: World, path: str, body: bytes
) -> None:
    assert (await say(gate, posted(path, body))).status == 400
    assert (gate.adapter.erasures, gate.adapter.verifications) == ([], [])


async def test_without_the_pods_token_nothing_is_told(gate: World) -> None:
    (gate.directory / "ack-token").unlink()
    answer = await say(gate, posted(ERASE_PATH, BODY))
    assert answer.status == 503
    assert b"Complete" not in answer.body


async def test_an_erasure_names_what_was_asked_and_who_says_so(gate: World) -> None:
    said = await erased(gate, OLD, keyspace("another"), tiers=("dram", "shared"))
    assert gate.adapter.erasures == [EraseRequest(tuple(sorted((OLD, keyspace("another")))), ("dram", "shared"))]
    assert (said.outcome, said.held_by, said.cache.elsewhere) == (EraseOutcome.COMPLETE, (), ("shared",))
    assert (said.gate_boot, said.cache.boot, said.cache.revision, said.cache.term, said.acked) == (
        gate.gate.boot, "boot-1", 1, 1, 1,
    )  # fmt: skip


@pytest.mark.parametrize("state", ["in use", "suspended", "switched off", "a pool's"])
async def test_a_keyspace_that_the_policy_in_force_has_is_refused_by_name(gate: World, state: str) -> None:
    own = entry("acme", suspended=state == "suspended")
    version = PoolVersion(keyspace("docs"), "f" * 16, PoolState.WARMING, pack_hashes([bytes(32)]), ("shared",))
    pools = {0: PoolShard("docs", "uid-docs", (version,))} if state == "a pool's" else None
    rules = Rules(drain_timeout_s=1, reuse="Disabled") if state == "switched off" else None
    await gate.acked(await gate.publish([own], rules, pools=pools))
    asked = keyspace("docs" if state == "a pool's" else "acme")
    said = await erased(gate, OLD, asked, wait_s=30)
    assert (said.outcome, said.cache.tiers) == (EraseOutcome.IN_FORCE, ())
    assert gate.adapter.erasures == [], "of the others nothing was erased either"


async def test_a_keyspace_that_pauses_for_an_erasure_is_erased_and_in_use_again_afterwards(gate: World) -> None:
    own = entry("acme")
    paused = own.paused(True)
    await gate.acked(await gate.publish([paused]))
    said = await erased(gate, own.keyspace)
    assert said.outcome is EraseOutcome.COMPLETE
    answer = await say(gate, posted(VERIFY_PATH, VerifyRequest(own.keyspace).encode()))
    assert not Verified.decode(answer.body).in_force
    await gate.acked(await gate.publish([paused.paused(False)]))
    assert (await erased(gate, own.keyspace)).outcome is EraseOutcome.IN_FORCE


async def test_a_cache_server_that_still_has_the_keyspace_is_not_done(gate: World) -> None:
    gate.adapter.erased = {"outcome": EraseOutcome.IN_FORCE, "tiers": ()}
    assert (await erased(gate)).outcome is EraseOutcome.NOT_ENFORCED


async def test_an_answer_comes_when_readers_let_go_and_says_who_holds_it_until_then(gate: World) -> None:
    gate.adapter.erased = {"outcome": EraseOutcome.REMAINING, "tiers": (HELD,)}
    said = await erased(gate)
    assert (said.outcome, said.held_by) == (EraseOutcome.REMAINING, ("tier dram: 2 blocks are being read",))
    waiting = asyncio.create_task(erased(gate, wait_s=60))
    await until(lambda: len(gate.adapter.erasures) > 3)
    assert not waiting.done()
    gate.adapter.erased = {}
    assert (await asyncio.wait_for(waiting, 20)).outcome is EraseOutcome.COMPLETE


async def test_what_takes_longer_is_told_when_the_wait_is_over(gate: World) -> None:
    gate.adapter.erased = {"outcome": EraseOutcome.REMAINING, "operations": 1}
    begun = time.monotonic()
    said = await erased(gate, wait_s=0.5)
    assert time.monotonic() - begun > 0.4
    assert said.held_by == ("1 operations of tiers are under way",)


class Request(InFlight):
    def abort(self) -> None:
        """Go on: it is not this test's matter."""


async def test_requests_in_flight_on_a_keyspace_keep_its_erasure_from_being_complete(gate: World) -> None:
    request = Request()
    gate.gate.enforcement.admit(request, "acme", OLD)
    said = await erased(gate)
    assert (said.outcome, said.requests) == (EraseOutcome.REMAINING, 1)
    gate.gate.enforcement.release(request)
    assert (await erased(gate)).outcome is EraseOutcome.COMPLETE


async def test_key_files_that_are_left_keep_an_erasure_from_being_complete(gate: World) -> None:
    secret = DataKey(3, b"acme's own key of thirty-two b..")
    await gate.acked(await gate.publish([entry("acme", "acme-of-before", keys=(secret,))]))
    directory = gate.directory / "policy" / KEYS_DIRECTORY
    assert gate.gate.volume.keys.left({OLD}) == LeftKeys(gate=1, volume=1)
    await gate.acked(await gate.publish([entry("acme")]))
    assert (await erased(gate)).outcome is EraseOutcome.COMPLETE
    for name in (f"{OLD}.3", ".draft"):
        (directory / name).write_bytes(bytes(32))
        said = await erased(gate)
        assert (said.outcome, said.keys) == (EraseOutcome.REMAINING, LeftKeys(volume=1))
        (directory / name).unlink()
    (directory / f"{keyspace('globex')}.1").write_bytes(bytes(32))
    assert (await erased(gate)).keys == LeftKeys(), "others' keys are none of its business"


async def test_nothing_is_complete_without_the_cache_server_that_acknowledged(gate: World) -> None:
    # Only this answer says so: the link would see another server at its next question, and have it apply the policy.
    real = gate.adapter.erasure
    gate.adapter.erasure = lambda question: replace(real(question), boot="boot-2")  # type: ignore[method-assign]
    assert (await erased(gate)).outcome is EraseOutcome.NOT_ENFORCED
    gate.adapter.erasure = real  # type: ignore[method-assign]
    await gate.adapter.stop()
    await until(lambda: gate.gate.enforcement.cache_boot == "")
    waiting = asyncio.create_task(erased(gate, wait_s=60))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await gate.adapter.restart("boot-3")
    said = await asyncio.wait_for(waiting, 20)
    assert (said.outcome, said.cache.boot) == (EraseOutcome.COMPLETE, "boot-3")


async def test_a_cache_server_that_does_not_answer_is_told_as_away(gate: World) -> None:
    await gate.adapter.stop()
    said = await erased(gate)
    assert (said.outcome, said.cache.boot, said.cache.tiers) == (EraseOutcome.CACHE_AWAY, "", ())


async def test_a_verification_tells_what_the_cache_server_finds(gate: World) -> None:
    answer = await say(gate, posted(VERIFY_PATH, VerifyRequest(OLD, bytes(64)).encode()))
    said = Verified.decode(answer.body)
    assert gate.adapter.verifications == [VerifyRequest(OLD, bytes(64))]
    assert (said.gate_boot, said.acked, said.in_force, said.found.boot) == (gate.gate.boot, 1, False, "boot-1")
    assert not said.found.known, "a server that does not know the names has not missed any"
    control = await say(gate, posted(VERIFY_PATH, VerifyRequest(keyspace("acme")).encode()))
    assert Verified.decode(control.body).in_force


async def test_a_verification_without_the_cache_server_that_acknowledged_is_none(gate: World) -> None:
    real = gate.adapter.verification
    gate.adapter.verification = lambda question: replace(real(question), boot="boot-2")  # type: ignore[method-assign]
    assert (await say(gate, posted(VERIFY_PATH, VerifyRequest(OLD).encode()))).status == 503
    await gate.adapter.stop()
    assert (await say(gate, posted(VERIFY_PATH, VerifyRequest(OLD).encode()))).status == 503


async def test_no_log_line_names_a_keyspace(gate: World, capfd: pytest.CaptureFixture[str]) -> None:
    await erased(gate)
    told = "".join(capfd.readouterr())
    assert json.dumps("copies in this pod were erased") in told
    assert OLD not in told
