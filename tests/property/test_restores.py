"""Random histories of one namespace, of which a backup is restored at any moment: what was left is in no bundle again.

A pod that knows better is always there: `pod-0` lives through everything. What the tests of `plan.bundle.restore` show
one by one happens here in any order: backups of half a change, restores into half a change, restores of restores.
"""

from __future__ import annotations

import random

import pytest

from tests.support.amounts import seeds
from tests.support.objects import cpu_tier, domain, group, invalidation, model, pod, policy
from tests.support.restores import RestoredWorld

pytestmark = pytest.mark.claim("what was left before a backup was made or restored is in no bundle again")

CHANGES = 8
RESTORES = 3
BELIEVED_AGAIN_AFTER_S = 3700.0
TENANTS = ("acme", "red", "blue")
ACME = policy("acme", deletionPolicy="Abandon")
"""It is deleted and made anew, and nobody erases here."""
SCOPES = ({"tenant": "acme"}, {"group": "team"}, {"all": True})


class History:
    """What users, pods and disasters do to one namespace."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.world = RestoredWorld.of(
            domain(), cpu_tier(), model(tiers=("cpu",)), model("other"), group("team", "red", "blue"), ACME,
            policy("red", group="team"), policy("blue", group="team"), pod("pod-0"), pod("pod-1"),
            pod("other-0", model="other"),
        )  # fmt: skip
        self._simulation = self.world.simulation
        self._simulation._shuffle = True
        self._made = 0
        self._cached = self.world.keyspaces()
        """Every keyspace that a bundle ever had."""
        self._backups = [self.world.back_up()]

    def change(self) -> None:
        """Do one thing, and let all or a part of what follows from it happen."""
        self._chance.choice((self._bump, self._invalidate, self._edit_group, self._recreate, self._replace_pod))()
        self._go_on()
        if self._chance.random() < 0.4:
            self._backups.append(self.world.back_up())

    def restore(self) -> None:
        """Restore any backup, be it of a history that is lost by now."""
        self._simulation.put(invalidation(self._name(), scope={"all": True}))
        self.world.rest()
        self._simulation.put(policy(self._name()))
        self._go_on()
        left = set(self._cached)
        self.world.restore(self._chance.choice(self._backups), reached=False)
        known = self._simulation.bundle().root.revision
        assert self.world.held[self._simulation.pod("pod-0").uid].root.revision > known, "a pod knows better"
        # Pods that start only now remember nothing, and would read what came back until the others were heard.
        for one in [serving for name in self._models() for serving in self._simulation.world.live_pods(name)]:
            if one.uid in self.world.held:
                self.world.speak(one.name)
        self._simulation.settle()
        self.world.rest()
        assert self._simulation.condition("CacheDomain", "default", "Restored") == ("True", "KeyReplaced")
        assert not left & self.world.readable, "a pod was told to serve what had been left"
        assert not left & self.world.keyspaces()
        for tenant in TENANTS:
            assert self._simulation.condition("TenantCachePolicy", tenant, "Enforced")[0] == "True", tenant
        self._note()

    def _go_on(self) -> None:
        if self._chance.random() < 0.5:
            self.world.rest()
        else:
            self.world.work(self._chance.randrange(6))
        self._note()

    def _note(self) -> None:
        self._cached |= self.world.keyspaces()

    def _models(self) -> list[str]:
        return sorted(self._simulation.world.pods)

    def _name(self) -> str:
        self._made += 1
        return f"made-{self._made}"

    def _bump(self) -> None:
        kind, name = self._chance.choice((("TenantCachePolicy", "acme"), ("TenantGroup", "team")))
        self._simulation.edit(kind, name, cacheGeneration=self._chance.randrange(1, 1000))

    def _invalidate(self) -> None:
        self._simulation.put(invalidation(self._name(), scope=self._chance.choice(SCOPES)))

    def _edit_group(self) -> None:
        self._simulation.edit("TenantGroup", "team", members=self._chance.choice((["red"], ["red", "blue"])))

    def _recreate(self) -> None:
        self._simulation.delete("TenantCachePolicy", "acme")
        self.world.work(self._chance.randrange(4))
        self._simulation.put(ACME)

    def _replace_pod(self) -> None:
        self.world.held.pop(self._simulation.pod("pod-1").uid, None)
        self._simulation.delete("Pod", "pod-1")
        self._simulation.put(pod("pod-1"))


@pytest.mark.parametrize("seed", seeds(6, claims=2))
def test_whatever_was_left_before_a_restore_is_in_no_bundle_after_it(seed: int) -> None:
    history = History(seed)
    for _ in range(RESTORES):
        for _ in range(CHANGES):
            history.change()
        history.world.simulation.advance(BELIEVED_AGAIN_AFTER_S)
        history.restore()
