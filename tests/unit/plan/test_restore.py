"""An API server that was restored from a backup brings nothing back that was invalidated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.model.refs import Key
from kvstrata.plan.actions import CommitBundle
from kvstrata.plan.bundle.commit import plan_bundle
from kvstrata.plan.bundle.restore import MARGIN, MAX_LEAD
from tests.support.objects import NAMESPACE, cpu_tier, domain, group, invalidation, model, pod, policy
from tests.support.restores import RestoredWorld
from tests.support.worlds import Killed

DOMAIN = Key("CacheDomain", NAMESPACE, "default")
OBJECTS = (
    domain(), cpu_tier(), model(tiers=("cpu",)), group("team", "red", "blue"), policy("acme"),
    policy("red", group="team"), policy("blue", group="team"), policy("open", isolation="Public"), pod("pod-0"),
    pod("pod-1"),
)  # fmt: skip


def at_rest() -> RestoredWorld:
    return RestoredWorld.of(*OBJECTS)


def restored(world: RestoredWorld) -> tuple[str, str]:
    return world.simulation.condition("CacheDomain", "default", "Restored")


def rolls(world: RestoredWorld) -> str:
    return str(world.simulation.status("CacheDomain", "default")["restored"]["id"])


def test_a_world_that_was_never_restored_says_nothing_of_it() -> None:
    world = at_rest()
    world.simulation.restart()
    world.rest()
    assert restored(world) == ("", "")
    assert "restored" not in world.simulation.status("CacheDomain", "default")


def test_what_was_invalidated_after_the_backup_is_in_no_bundle_after_the_restore() -> None:
    world = at_rest()
    backup, cached = world.back_up(), world.keyspaces()
    assert len(cached) == 3
    world.simulation.put(invalidation("all", scope={"all": True}))
    world.rest()
    assert not cached & world.keyspaces()
    cached |= world.keyspaces()
    world.restore(backup)
    world.rest()
    assert not cached & world.readable
    assert len(world.readable) == 3
    assert restored(world) == ("True", "KeyReplaced")
    assert world.simulation.condition("CacheDomain", "default", "Enforced") == ("True", "AllPodsAcknowledged")
    assert world.simulation.condition("TenantCachePolicy", "acme", "Enforced") == ("True", "AllPodsAcknowledged")


def test_until_pods_take_bundles_again_nothing_is_called_enforced() -> None:
    world = at_rest()
    backup = world.back_up()
    for generation in range(3):
        world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=generation)
        world.rest()
    world.restore(backup)
    world.simulation.settle()
    for kind, name in (("TenantCachePolicy", "acme"), ("CacheDomain", "default"), ("TenantGroup", "team")):
        assert world.simulation.condition(kind, name, "Enforced")[0] == "False"
    assert restored(world) == ("False", "AwaitingAcks")
    world.rest()
    assert restored(world)[0] == "True"


def test_a_bundle_of_the_same_revision_with_other_content_is_known_for_one_of_another_history() -> None:
    world = at_rest()
    backup = world.back_up()
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.rest()
    lost = world.simulation.bundle().root
    world.restore(backup, reached=False)
    world.simulation.put(policy("new"))
    world.simulation.settle()
    assert world.simulation.bundle().root.revision == lost.revision
    cached = world.keyspaces()
    world.rest()
    assert restored(world) == ("True", "KeyReplaced")
    assert not cached & world.keyspaces()


def test_pods_that_hold_more_than_the_one_that_was_heard_take_the_bundle_too() -> None:
    world = at_rest()
    backup = world.back_up()
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.simulation.settle()
    world.speak("pod-0")  # pod-1 reads later, and more
    for generation in range(2, 9):
        world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=generation)
        world.simulation.settle()
    world.speak("pod-1")
    world.restore(backup, reached=False)
    world.speak("pod-0")
    world.simulation.settle()
    once = rolls(world)
    world.rest()
    assert rolls(world) == once
    assert {bundle.root.revision for bundle in world.held.values()} == {world.simulation.bundle().root.revision}


@pytest.mark.parametrize("after", [False, True])
def test_an_operator_that_dies_at_any_write_of_it_ends_the_same(after: bool) -> None:
    world = at_rest()
    backup, cached = world.back_up(), world.keyspaces()
    world.simulation.put(invalidation("all", scope={"all": True}))
    world.rest()
    cached |= world.keyspaces()
    world.restore(backup)
    for number in range(1, 40):
        other = world.clone(seed=number)
        other.simulation.kill_at(number, after=after)
        try:
            other.rest()
        except Killed:
            other.restart()
            other.rest()
        else:
            assert number > 5
            return
        assert restored(other) == ("True", "KeyReplaced")
        assert not cached & other.readable
    raise AssertionError("more writes than there should be")


def test_a_second_restore_to_before_the_first_and_to_after_it_is_answered_as_well() -> None:
    world = at_rest()
    before = world.back_up()
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.rest()
    world.restore(before)
    world.rest()
    seen, between = {rolls(world)}, world.back_up()
    for backup in (between, before):
        world.simulation.advance(4000)
        world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=7)
        world.rest()
        cached = world.keyspaces()
        world.restore(backup)
        world.rest()
        assert rolls(world) not in seen
        assert not cached & world.readable
        assert restored(world) == ("True", "KeyReplaced")
        seen.add(rolls(world))


def lie(world: RestoredWorld, name: str, revision: int) -> None:
    told = world.state(world.simulation.pod(name))
    world.speak(name, lie=replace(told, revision=revision, acked=revision, root="f" * 64))


def test_a_pod_that_lies_makes_everything_new_once_and_not_again() -> None:
    world = at_rest()
    lie(world, "pod-0", world.simulation.bundle().root.revision + 5)
    world.rest()
    once = rolls(world)
    for _ in range(5):
        lie(world, "pod-0", world.simulation.bundle().root.revision + MARGIN + 5)
        world.simulation.advance(5)
    assert rolls(world) == once
    assert restored(world) == ("False", "WitnessNotBelieved")
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    revision = world.simulation.bundle().root.revision
    world.simulation.settle()
    assert world.simulation.bundle().root.revision == revision + 1, "others are served on"
    world.rest()
    assert restored(world)[0] == "True"


@pytest.mark.parametrize("revision", [MAX_LEAD + 1000, 1 << 62])
def test_a_pod_that_claims_what_no_operator_could_have_written_is_not_believed(revision: int) -> None:
    world = at_rest()
    lie(world, "pod-0", revision)
    world.simulation.advance(5)
    assert restored(world) == ("False", "WitnessNotBelieved")
    assert "restored" not in world.simulation.status("CacheDomain", "default")
    assert world.simulation.bundle().root.revision < 1000
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.simulation.settle()
    world.speak("pod-1")
    world.simulation.settle()
    assert world.simulation.condition("TenantCachePolicy", "acme", "Enforced") == ("False", "AwaitingAcks")


def test_a_pod_of_a_predecessor_of_its_model_tells_of_no_restore() -> None:
    world = at_rest()
    told = world.state(world.simulation.pod("pod-0"))
    world.speak("pod-0", lie=replace(told, revision=told.revision + 9, model_uid="its-predecessor"))
    world.simulation.advance(5)
    assert restored(world) == ("", "")


def test_an_invalid_policy_does_not_carry_its_keyspace_over_a_restore() -> None:
    world = at_rest()
    world.simulation.edit("TenantCachePolicy", "acme", budgets=[{"tier": "nowhere", "limit": "1Mi"}])
    world.rest()
    backup, cached = world.back_up(), world.keyspaces()
    world.simulation.put(invalidation("all", scope={"all": True}))
    world.rest()
    world.restore(backup)
    world.rest()
    assert not cached & world.readable
    assert restored(world)[0] == "True"


def test_the_domains_key_is_drawn_once_for_a_restore() -> None:
    world = at_rest()
    backup = world.back_up()
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.rest()
    world.restore(backup)
    world.rest()
    key = world.simulation.world.domain_key
    world.simulation.restart()
    world.rest()
    assert world.simulation.world.domain_key == key


def commit(world: RestoredWorld) -> CommitBundle | None:
    """What would be written of the model's bundle now."""
    actions = plan_bundle(world.simulation.world, "tiny", world.simulation.now).actions
    return next((action for action in actions if isinstance(action, CommitBundle)), None)


def test_no_bundle_is_written_before_the_key_is_new() -> None:
    world = at_rest()
    backup = world.back_up()
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.rest()
    world.restore(backup)
    world.simulation.edit("TenantCachePolicy", "acme", suspend=True)
    assert commit(world) is None, "a pod was heard, and nothing is recorded yet"
    world.simulation.step(DOMAIN)
    assert commit(world) is None, "the key is that of the backup"
    world.simulation.step(DOMAIN)
    written = commit(world)
    assert written is not None
    assert written.root.revision > world.simulation.status("CacheDomain", "default")["restored"]["revision"]


def test_a_bundle_that_was_deleted_while_no_operator_ran_is_written_anew_and_costs_no_cache() -> None:
    world = at_rest()
    world.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    world.rest()
    world.simulation.advance(5)  # what statuses may put off is written
    cached, held = world.keyspaces(), world.simulation.bundle().root.revision
    world.simulation.kube.remove("Secret", NAMESPACE, "kvs-tiny-bundle")
    world.restart()
    world.rest()
    assert restored(world) == ("", "")
    assert world.keyspaces() == cached
    assert {bundle.root.revision for bundle in world.held.values()} == {held + 1}


def test_data_keys_that_came_back_are_used_no_more() -> None:
    sealed = cpu_tier("disk", medium="NVMe", capacityPerPod="1Gi", nvme={"emptyDir": {}}, encryption="Required")
    world = RestoredWorld.of(domain(), sealed, model(tiers=("disk",)), policy("acme"), pod("pod-0"))
    before = {key.secret for entry in world.simulation.bundle().entries.values() for key in entry.keys}
    assert before
    backup = world.back_up()
    world.simulation.put(invalidation("all", scope={"all": True}))
    world.rest()
    world.restore(backup)
    world.simulation.step(DOMAIN)
    world.simulation.step(DOMAIN)
    written = commit(world)
    assert written is not None
    assert not [entry for entry in written.entries.values() if entry.keys], "those of the backup serve nobody"
    world.rest()
    keys = {key.secret for entry in world.simulation.bundle().entries.values() for key in entry.keys}
    assert keys
    assert not before & keys
    assert not before & set(world.simulation.world.data_keys.values())
    assert world.simulation.condition("TenantCachePolicy", "acme", "Enforced") == ("True", "AllPodsAcknowledged")
    world.simulation.restart()
    world.rest()
    assert {key.secret for entry in world.simulation.bundle().entries.values() for key in entry.keys} == keys
