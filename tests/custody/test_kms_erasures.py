"""An erasure of what keys of a real OpenBao wrapped says that they are destroyed by its word, and not without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.transit import TransitClient
from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.plan.erasure.advance import LOOK_AGAIN_S
from kvstrata.reconcile.erasure.keys import KeyRevoker
from tests.custody.bao_server import BaoServer
from tests.custody.kms_stories import asked
from tests.custody.kms_stories import objects as objects
from tests.custody.token_file import TokenFile
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.reconcile.deletions import POLICY, delete_namespace, end_pods, erasing, is_gone
from tests.unit.reconcile.erasing import World
from tests.unit.reconcile.erasure_stories import ALL, order

AWAY = "KeyCustodyAway"

Story = Callable[[World], Awaitable[None]]

unanswered: set[object] = set()
"""Requests that the service has not answered yet."""


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `unanswered`."""
    real = TransitClient.call

    async def call(client: TransitClient, *about: Any, **options: Any) -> Any:
        request = object()
        unanswered.add(request)
        try:
            return await real(client, *about, **options)
        finally:
            unanswered.discard(request)

    monkeypatch.setattr(TransitClient, "call", call)


@pytest.fixture
def told(bao: BaoServer, token_file: Path, objects: tuple[dict[str, Any], ...]) -> Callable[[Story], World]:
    """Let a story happen to a tenant with blocks under such a key, while an operator leads; what happens `meanwhile`
    does so before it, and while none leads."""

    def tell(story: Story, *, meanwhile: Story | None = None) -> World:
        async def run() -> World:
            sim = Simulation()
            sim.kms_addresses, sim.kms_login = (bao.address,), lambda _: TokenFile(token_file)
            sim.restart()
            authority, domain, *_ = objects
            tier = redis_tier(encryption="Required", redis={"managed": {"tls": {"mode": "Disabled"}}})
            sim.put(authority, domain, cpu_tier(), tier, policy("acme"), policy("globex"))
            sim.put(model(tiers=("cpu", "shared")))
            sim.settle()
            sim.put(pod("pod-0"), pod("pod-1"))
            sim.come_to_rest()
            made = World(sim)
            sim.come_to_rest()
            await asked(made.keys)
            sim.come_to_rest()
            made.server.fill(sim.world.domain_id or "", sim.entry("acme").keyspace, sim.entry("globex").keyspace)
            try:
                async with made.leading_operator():
                    await made.keys.turn()
                    assert made.keys.named() == {*made.keys.held["pod-0"]} != set()
                    if not meanwhile:
                        await story(made)
                if meanwhile:
                    await meanwhile(made)
                    async with made.leading_operator():
                        await story(made)
            finally:
                await sim.kms.__aexit__(None, None, None)
            return made

        return asyncio.run(run())

    return tell


def wrapping(bao: BaoServer, made: World) -> int:
    return sum((made.sim.world.domain_id or "-") in name for name in bao.key_names())


async def until(w: World, condition: Callable[[], object], tick_s: float = 1.0) -> None:
    """Let time pass until `condition` holds. None passes while the service is asked: a slow one is not late."""
    async with asyncio.timeout(60):
        while not condition():
            for name in w.sim.world.pods.get("tiny", {}):
                w.keys.acknowledge(name)
            await w.turn()
            await asyncio.sleep(0.005)
            while unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await w.turn(tick_s)


def test_the_service_deletes_what_wrapped_the_key_and_the_receipt_has_its_word(
    told: Callable[[Story], World], bao: BaoServer
) -> None:
    async def story(w: World) -> None:
        before = wrapping(bao, w)
        (key,) = w.sim.entry("acme").keys
        order(w.sim)
        await until(w, lambda: w.phase == "Complete")
        (fact,) = w.chain.issued[-1].keys
        assert (fact.fingerprint, fact.custody) == (key.id, KeyCustody.KMS)
        assert fact.destroyed is not None
        assert fact.destroyed.by is Party.CUSTODY
        assert fact.destroyed.name.startswith("transit:")
        await asked(w.keys)
        assert wrapping(bao, w) == before, "one went and acme's new one came"

    made = told(story)
    assert made.proven() == ALL | {ReceiptClaim.KEYS_DESTROYED}


def test_a_service_that_is_away_is_waited_for_by_name(told: Callable[[Story], World], bao: BaoServer) -> None:
    async def story(w: World) -> None:
        bao.seal()
        try:
            order(w.sim)
            await until(w, lambda: any("Sealed" in one["message"] for one in w.status.get("conditions", ())))
            assert "KeysDestroyed" not in w.holds()
        finally:
            bao.unseal()
        await until(w, lambda: w.phase == "Complete")

    made = told(story)
    assert made.proven() == ALL | {ReceiptClaim.KEYS_DESTROYED}


@pytest.mark.parametrize("ask", ["revoke", "destroy"])
def test_a_custody_that_has_no_news_is_asked_again_after_a_while_and_not_at_once(
    ask: str, told: Callable[[Story], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulated time also passes while the world settles, so turns are not counted.
    moments: list[datetime] = []

    async def story(w: World) -> None:
        async def nothing(*_: Any) -> tuple[()]:
            moments.append(w.sim.now)
            return ()

        monkeypatch.setattr(KeyRevoker, ask, nothing)
        order(w.sim)
        await until(w, lambda: len(moments) > 1)
        first, again, *_ = moments
        assert again - first >= timedelta(seconds=LOOK_AGAIN_S)

    told(story)


def test_an_operator_that_was_started_anew_waits_for_the_key_of_a_deleted_policy_before_it_begins(
    told: Callable[[Story], World], bao: BaoServer
) -> None:
    """No bundle names it any more, so that nobody but the service knows which it is."""
    held: dict[str, str] = {}

    async def meanwhile(w: World) -> None:
        (key,) = w.sim.entry("acme").keys
        held["acme"] = key.id
        w.sim.erase = lambda namespace, order: None
        w.sim.delete(POLICY, "acme")
        w.sim.settle()
        assert erasing(w.sim) is not None
        assert not w.kept()
        assert "acme" not in w.sim.bundle().entries
        bao.seal()
        await w.sim.kms.__aexit__(None, None, None)
        w.sim.restart()

    async def story(w: World) -> None:
        try:
            await until(w, lambda: w.sim.condition("CacheDomain", "default", "KeysAtHand") == ("False", AWAY))
            assert not w.kept()
        finally:
            bao.unseal()
        await until(w, lambda: is_gone(w))
        await until(w, lambda: w.sim.condition("CacheDomain", "default", "KeysAtHand") == ("True", "KeysAtHand"))

    made = told(story, meanwhile=meanwhile)
    assert [(key.fingerprint, key.custody) for key in made.chain.issued[-1].keys] == [(held["acme"], KeyCustody.KMS)]
    assert made.proven() == ALL | {ReceiptClaim.KEYS_DESTROYED}


@pytest.mark.parametrize("first", [False, True], ids=["all at once", "the CacheDomain first"])
def test_keys_of_a_namespace_that_is_deleted_end_by_the_service_s_word_and_nothing_of_it_is_left_there(
    told: Callable[[Story], World], bao: BaoServer, first: bool
) -> None:
    async def story(w: World) -> None:
        domain = w.sim.world.domain_id or "-"
        if first:
            w.sim.kube.api.ending.add(NAMESPACE)
            w.sim.delete("CacheDomain", "default")
            await w.sim.kms_domains.settle()
            assert not any(domain in name for name in bao.key_names())
        delete_namespace(w.sim)
        end_pods(w.sim)
        await w.sim.kms_domains.settle()
        for name in ("acme", "globex"):
            await until(w, partial(is_gone, w, name), tick_s=5)
        for _ in range(3):
            await w.sim.kms_domains.settle()
        assert not any(domain in name for name in bao.key_names())
        assert not any(domain in name for kind, _, name in w.sim.kube.objects if kind == "Secret")

    made = told(story)
    assert len(made.chain.issued) == 2
    for facts in made.chain.issued:
        assert [key.custody for key in facts.keys] == [KeyCustody.KMS]
        assert ReceiptClaim.KEYS_DESTROYED in claims(facts)
