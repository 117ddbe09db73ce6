"""Many keys of a real OpenBao: several are asked about at a time, never more than there are connections."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.transit import AT_ONCE, Drawn, KmsError, KmsFailure
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.kms_custody import KmsCustody
from kvstrata.reconcile.keys.wrapped_keys import WrappedKeys
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.kms_stories import unlock
from tests.custody.token_file import OpenedClient, TokenFile, nothing
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE

EPOCHS = [f"a{number:031x}" for number in range(6 * AT_ONCE)]
"""All of one Secret."""


class Counting(OpenedClient):
    """A client that counts requests in flight, and fails at one of its draws."""

    in_flight = 0
    most = 0
    drawn = 0
    fails_at = 0

    async def call(self, method: str, path: str, *rest: Any, **options: Any) -> Any:
        """Ask, and count."""
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return await super().call(method, path, *rest, **options)
        finally:
            self.in_flight -= 1

    async def draw(self, name: str) -> Drawn:
        """Draw, unless it is the one that fails."""
        self.drawn += 1
        if self.drawn == self.fails_at:
            raise KmsError(KmsFailure.BUSY, "too much at once")
        return await super().draw(name)

    def most_since(self) -> int:
        """Return the most requests in flight since it was asked last."""
        most, self.most = self.most, 0
        return most


@pytest.fixture
async def counting(bao: BaoServer, token_file: Path) -> AsyncIterator[Counting]:
    async with Counting(bao.address, bao.authority_pem, TokenFile(token_file), mount=MOUNT) as client:
        yield client


@pytest.fixture
def custody(counting: Counting, request: pytest.FixtureRequest) -> KmsCustody:
    domain = base64.b32encode(request.node.name.encode()).decode().rstrip("=")[-40:]
    now: Callable[[], datetime] = lambda: datetime(2026, 11, 22, 10, tzinfo=UTC)  # noqa: E731
    return KmsCustody(counting, WrappedKeys(MemoryKube(), NAMESPACE, domain), now, "operator-1", nothing)


async def test_as_many_keys_are_asked_about_at_once_as_there_are_connections(
    custody: KmsCustody, counting: Counting
) -> None:
    await custody.draw(EPOCHS)
    assert counting.most_since() == AT_ONCE
    keys = await unlock(custody, EPOCHS)
    assert counting.most_since() == AT_ONCE
    assert (len(keys), len({*keys.values()})) == (len(EPOCHS), len(EPOCHS))
    await custody.revoke(EPOCHS)
    ends = (await custody.destroy(EPOCHS)).whole()
    assert counting.most_since() == AT_ONCE
    assert all(end.confirmed is not None for end in ends.values())


async def test_what_was_drawn_before_a_failure_is_kept_and_nothing_is_begun_after_it(
    custody: KmsCustody, counting: Counting
) -> None:
    counting.fails_at = 2 * AT_ONCE
    with pytest.raises(CustodyError, match="Busy"):
        await custody.draw(EPOCHS)
    assert counting.drawn < 3 * AT_ONCE
    kept = (await custody.records()).wrapped
    assert len(kept) == counting.drawn - 1
    before = await unlock(custody, EPOCHS)
    await custody.draw(EPOCHS)
    assert counting.drawn == len(EPOCHS) + 1, "only what was missing is drawn"
    assert (await unlock(custody, EPOCHS)).items() > before.items()
