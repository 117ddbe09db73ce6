"""Rotation of the key that signs receipts, by age and by annotation: whoever dies meanwhile, every receipt verifies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvstrata.clients.signing import SigningKeys, is_signed
from kvstrata.contract.receipt.chain import check_chain
from kvstrata.contract.receipt.record import HandOverKind, Receipt, read_receipt
from kvstrata.objects import labels, names
from kvstrata.objects.erasure.receipts import RECEIPT_DATA_KEY, read_receipt_objects
from kvstrata.plan.erasure.receipt_chain import ChainState
from kvstrata.reconcile.erasure.key_rotation import KeyRotation
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.secrets import decode
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, domain
from tests.support.receipts import DOMAIN, erasure
from tests.support.worlds import Killed, Simulation

WHERE = "kvstrata-system"
KEY, PUBLIC = ("Secret", WHERE, names.RECEIPTS_KEY_SECRET), ("ConfigMap", WHERE, names.RECEIPT_PUBLIC_KEYS)
YEAR_S = 365 * 86_400
OTHER = "ff" * 8


class Place:
    """An operator's namespace, over time. `ids` are domains and their namespaces."""

    def __init__(self, kube: MemoryKube | None = None) -> None:
        self.kube = kube or MemoryKube()
        self.now = datetime(2026, 11, 22, 10, tzinfo=UTC)
        self.restart()

    def restart(self) -> None:
        """Let another operator lead."""
        self.kube.before_write = self.kube.after_write = lambda *_: None
        self.chains = Chains(self.kube, WHERE, lambda: self.now)

    async def issue(self, order: str, domain_id: str = DOMAIN, namespace: str = "team-a") -> ChainState:
        return await self.chains.issue(namespace, domain_id, None, erasure(order))

    async def rotate(self, max_age_s: float = 0) -> bool:
        """Do everything that one look does."""
        begun = await self.chains.rotate(max_age_s)
        await self.hand_over()
        return begun

    async def hand_over(self) -> tuple[list[str], list[str]]:
        """Return the domains whose chains were handed over, and problems."""
        done: list[str] = []

        async def publish(chain: ChainState) -> None:
            done.append(chain.domain_id)

        _, problems = await self.chains.hand_over(lambda *_: None, publish)
        return done, problems

    def ask(self, value: str) -> None:
        """Ask for a rotation, as a person."""
        public = self.kube.objects[PUBLIC]
        annotations = {**(public["metadata"].get("annotations") or {}), labels.ROTATE_RECEIPTS_KEY: value}
        self.kube.put({**public, "metadata": {**public["metadata"], "annotations": annotations}})

    @property
    def keys(self) -> SigningKeys:
        return SigningKeys.from_secret_data(decode(self.kube.objects[KEY]))

    def published(self) -> set[str]:
        return {name.removesuffix(".pem") for name in self.kube.objects[PUBLIC]["data"]}

    def receipts(self, domain_id: str = DOMAIN) -> list[Receipt]:
        maps = {name: raw for (kind, _, name), raw in self.kube.objects.items() if kind == "ConfigMap"}
        found = [data for name, data in read_receipt_objects(maps) if domain_id in name]
        return [read_receipt(data) for data in found if isinstance(data, bytes)]

    def story(self, pinned: str, domain_id: str = DOMAIN) -> list[str]:
        """What a chain has, which holds and for which this key alone vouches."""
        chain = check_chain(self.receipts(domain_id), is_signed, {pinned})
        assert not chain.unvouched
        changes = [one.record.hand_over for one in chain.receipts]
        assert all(change is None or change.kind is HandOverKind.ROTATED for change in changes)
        return [one.link.subject_uid or "a hand-over" for one in chain.receipts]


async def test_nothing_is_rotated_before_there_is_a_key() -> None:
    place = Place()
    assert not await place.rotate(1)
    assert not place.kube.objects


async def test_receipts_of_before_and_after_a_rotation_verify_by_either_key() -> None:
    place = Place()
    await place.issue("order-1")
    first = place.keys.current_id
    place.ask("now")
    assert await place.rotate()
    second = place.keys.current_id
    assert (second != first, place.keys.previous) == (True, None)
    assert place.published() == {first, second}
    await place.issue("order-2")
    for pinned in (first, second):
        assert place.story(pinned) == ["order-1", "a hand-over", "order-2"]
    signers = [one.link.head.signer for one in place.receipts()]
    assert signers == [first, first, second]


async def test_every_value_of_the_annotation_asks_once() -> None:
    place = Place()
    await place.issue("order-1")
    place.ask("one")
    assert [await place.rotate() for _ in range(3)] == [True, False, False]
    place.ask("two")
    assert [await place.rotate() for _ in range(2)] == [True, False]
    assert place.story(place.keys.current_id) == ["order-1", "a hand-over", "a hand-over"]
    assert len(place.published()) == 3


@pytest.mark.parametrize(
    ("age_s", "max_age_s", "due"), [(YEAR_S, YEAR_S, True), (YEAR_S - 1, YEAR_S, False), (YEAR_S * 9, 0, False)]
)
async def test_a_key_is_rotated_by_its_age(age_s: float, max_age_s: float, due: bool) -> None:
    place = Place()
    await place.issue("order-1")
    place.now += timedelta(seconds=age_s)
    assert await place.rotate(max_age_s) == due
    assert not await place.rotate(max_age_s), "the new key is young"


async def test_all_chains_are_handed_over_before_the_old_key_goes() -> None:
    place = Place()
    await place.issue("order-1")
    await place.issue("order-2", OTHER, "team-b")
    first = place.keys.current_id
    place.ask("now")
    await place.chains.rotate(0)
    assert place.keys.previous_id == first
    assert await place.rotate() is False, "it goes on, and no other begins"
    assert place.keys.previous is None
    assert place.story(first) == ["order-1", "a hand-over"]
    assert place.story(first, OTHER) == ["order-2", "a hand-over"]


async def test_a_chain_that_cannot_be_continued_keeps_the_old_key_and_is_named() -> None:
    place = Place()
    await place.issue("order-1")
    await place.issue("order-2", OTHER, "team-b")
    spoilt = place.kube.objects["ConfigMap", WHERE, names.receipt(OTHER, 1)]
    spoilt["data"] = {RECEIPT_DATA_KEY: spoilt["data"][RECEIPT_DATA_KEY].replace("order-2", "order-3")}
    place.ask("now")
    await place.chains.rotate(0)
    done, problems = await place.hand_over()
    assert done == [DOMAIN]
    (problem,) = problems
    assert names.receipt(OTHER, 1) in problem
    assert place.keys.previous is not None
    del place.kube.objects["ConfigMap", WHERE, names.receipt(OTHER, 1)]
    await place.rotate()
    assert place.keys.previous is None


async def test_the_old_key_goes_only_while_no_receipt_is_being_written() -> None:
    place = Place()
    await place.issue("order-1")
    first = place.keys.current_id
    writing, may_write = asyncio.Event(), asyncio.Event()
    write = place.chains._write

    async def slowly(receipt: bytes, found: Any) -> None:
        writing.set()
        await may_write.wait()
        await write(receipt, found)

    place.chains._write = slowly  # type: ignore[method-assign]
    late = asyncio.create_task(place.issue("order-2", OTHER, "team-b"))
    await writing.wait()
    place.chains._write = write  # type: ignore[method-assign]
    place.ask("now")
    rotating = asyncio.create_task(place.rotate())
    for _ in range(50):
        await asyncio.sleep(0)
    assert place.keys.previous_id == first, "the receipt that is being written is signed with it"
    may_write.set()
    await asyncio.gather(late, rotating)
    assert place.keys.previous is None
    assert place.story(first, OTHER) == ["order-2", "a hand-over"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_death_at_any_write_changes_nothing_of_what_a_rotation_comes_to(after: bool) -> None:
    number, outlived = 0, False
    while not outlived:
        number += 1
        place = Place()
        await place.issue("order-1")
        await place.issue("order-2", OTHER, "team-b")
        first = place.keys.current_id
        place.ask("now")
        hook = dying_at(number)
        setattr(place.kube, "after_write" if after else "before_write", hook)
        try:
            await place.rotate()
        except Killed:
            pass
        else:
            outlived = True
        place.restart()
        for _ in range(2):
            await place.rotate()
        await place.issue("order-3")
        assert place.keys.previous is None, number
        assert place.published() == {first, place.keys.current_id}, number
        assert place.story(place.keys.current_id) == ["order-1", "a hand-over", "order-3"], number
        assert place.story(first, OTHER) == ["order-2", "a hand-over"], number
    assert number == 6, "the key, its public half, two chains, and the key before"


def dying_at(number: int) -> Callable[[str, str, str], None]:
    count = 0

    def hook(verb: str, kind: str, name: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise Killed

    return hook


async def test_a_receipt_that_was_planned_before_a_rotation_is_planned_anew_after_it() -> None:
    place = Place()
    await place.issue("order-1")
    write = place.chains._write

    async def rotated_before(receipt: bytes, found: Any) -> None:
        place.chains._write = write  # type: ignore[method-assign]
        place.ask("now")
        await Place(place.kube).rotate()  # as another leader
        await write(receipt, found)

    place.chains._write = rotated_before  # type: ignore[method-assign]
    await place.issue("order-2")
    await place.rotate()
    assert place.story(place.keys.current_id) == ["order-1", "a hand-over", "order-2"]


def test_the_domain_s_status_and_an_event_report_it() -> None:
    sim = Simulation(domain())
    sim.settle()
    own = sim.world.domain_id
    assert own is not None

    async def story() -> None:
        chains = Chains(sim.kube, WHERE, lambda: sim.now)
        rotation = KeyRotation(sim.kube, sim.store, chains, YEAR_S)
        await chains.issue(NAMESPACE, own, None, erasure("order-1"))
        await rotation.look()
        assert "receipts" not in sim.status("CacheDomain", "default"), "there is nothing to hand over"
        sim.now += timedelta(seconds=YEAR_S)
        for _ in range(2):
            await rotation.look()

    asyncio.run(story())
    made = Place(sim.kube).receipts(own)
    assert sim.status("CacheDomain", "default")["receipts"] == {"count": 2, "head": made[-1].link.digest}
    events = [raw for (kind, _, _), raw in sim.kube.objects.items() if kind == "Event"]
    assert [event["reason"] for event in events if event["reason"].startswith("Receipts")] == ["ReceiptsKeyRotated"]
