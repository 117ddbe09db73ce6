"""After any history of tiers, restarts and new epochs the record has each store that was used under the epoch."""

from __future__ import annotations

import random

import pytest

from tests.support.objects import Raw, model, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest

POLICY, SERVERS = "TenantCachePolicy", ("a.example:6379", "b.example:6379", "c.example:6379")


def at(server: str) -> Raw:
    return {"external": {"endpoints": [server]}}


class History:
    """A tier whose servers change, and those that were in use since the last epoch."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sim: Simulation = at_rest(policy("acme"))
        self.now = ""
        self.used = set[str]()
        self.rolls = 0

    def create(self) -> None:
        self.now = self.chance.choice(SERVERS)
        self.sim.put(redis_tier(redis=at(self.now)), model(tiers=("cpu", "shared")))

    def edit(self) -> None:
        self.now = self.chance.choice(SERVERS)
        self.sim.edit("CacheTier", "shared", redis=at(self.now))

    def delete(self) -> None:
        self.now = ""
        self.sim.put(model(tiers=("cpu",)))
        self.sim.delete("CacheTier", "shared")

    def roll(self) -> None:
        self.rolls += 1
        self.used = set()
        self.sim.edit(POLICY, "acme", cacheGeneration=self.rolls)

    def restart(self) -> None:
        self.sim.restart()

    def step(self) -> None:
        tier = (self.edit, self.delete) if self.now else (self.create,)
        self.chance.choice((*tier, *tier, self.roll, self.restart))()
        self.sim.come_to_rest()
        self.used |= {self.now} - {""}


@pytest.mark.claim("a scope's record has each store that was used under its epoch")
@pytest.mark.parametrize("seed", range(12))
def test_the_record_is_what_was_used_since_the_last_epoch(seed: int) -> None:
    history = History(seed)
    for _ in range(10):
        history.step()
        stores = history.sim.status(POLICY, "acme")["scope"]["stores"]
        assert {place for one in stores for place in one["places"]} == history.used
        assert sorted(place for one in stores for place in one["places"]) == sorted(history.used), "each once"
        assert history.sim.unsettled() == {}
