"""What happens to real servers, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvstrata.model.redis.cluster import SLOTS, Command, ServerPod
from kvstrata.plan.redis.topology import Step, StepReason, failovers
from kvstrata.plan.redis.topology.view import View, count
from tests.support.redis_binary import needs_redis
from tests.tiers.server_kinds import ServerKind
from tests.topology.rig import Patience, Rig

pytestmark = needs_redis

Choose = Callable[[Rig], Sequence[ServerPod]]


def reasons(steps: Sequence[Step]) -> set[StepReason]:
    return {step.reason for step in steps}


def lost(steps: Sequence[Step]) -> int:
    return sum(count(step.lost) for step in steps)


async def assert_sound(rig: Rig) -> None:
    """Every slot has one primary, every shard its replicas, and all servers say the same and know nobody else."""
    cluster = await rig.heard()
    owners = [server for server in cluster.servers.values() if server.itself.slots]
    held = [slot for one in owners for first, last in one.itself.slots for slot in range(first, last + 1)]
    assert sorted(held) == list(range(SLOTS))
    assert {cluster.pods[server.pod_uid].shard for server in owners} == set(range(rig.goal.shards))
    names = {server.node_id for server in cluster.servers.values()}
    slots = {server.node_id: server.itself.slots for server in owners}
    for server in cluster.servers.values():
        assert {peer.node_id for peer in server.peers if not peer.handshake} == names
        assert {peer.node_id: peer.slots for peer in server.peers if peer.slots} == slots
        assert server.max_bytes == rig.goal.max_bytes_each
        assert server.node_timeout_ms == rig.goal.node_timeout_ms
        if server not in owners:
            primary = View(cluster, rig.goal).servers[str(server.itself.primary)]
            assert cluster.pods[primary.pod_uid].shard == cluster.pods[server.pod_uid].shard
            assert server.link_up


async def in_step(rig: Rig) -> None:
    """Wait until all replicas have read what was written."""
    patience = Patience()
    while True:
        cluster = await rig.heard()
        view = View(cluster, rig.goal)
        replicas = [server for server in cluster.servers.values() if not server.is_primary]
        if all(server.keys == view.servers[str(server.itself.primary)].keys for server in replicas):
            return
        patience.ask([server.keys for server in replicas])
        await asyncio.sleep(0.02)


async def written(rig: Rig) -> dict[str, str]:
    """Values that the primaries and their replicas have."""
    found = rig.write()
    await in_step(rig)
    return found


class TestForming:
    @pytest.mark.on_every_server
    async def test_servers_that_know_nothing_become_a_cluster_and_a_second_pass_sends_nothing(
        self, make_rig: Callable[..., Rig], server_kind: ServerKind
    ) -> None:
        rig = make_rig(server_kind)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (StepReason.FORMING in reasons(steps), lost(steps)) == (True, 0)
        assert not [sent for sent in rig.sent if sent.failure]
        sizes = [count(server.itself.slots) for server in (await rig.heard()).servers.values() if server.itself.slots]
        assert sorted(sizes) == [5461, 5461, 5462]
        before = len(rig.sent)
        assert await rig.settle() == []
        assert len(rig.sent) == before
        judged = await rig.verdict()
        assert (judged.slots_covered, judged.replication_healthy, judged.shards_ready) == (True, True, 3)
        # The same kind of server heals alike.
        values = await written(rig)
        rig.replace(await rig.primary(0))
        rig.replace(await rig.replica(1))
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (rig.read(), lost(steps)) == (values, 0)

    async def test_an_operator_that_dies_after_any_command_of_forming_is_continued(
        self, make_rig: Callable[..., Rig]
    ) -> None:
        """After the first epoch, with one shard's slots, between meets, before each replica; the model knows all."""

        async def die_and_continue(commands: int) -> None:
            rig = make_rig()
            assert await rig.die_after(commands)
            assert len(rig.sent) >= commands, "one that was late may have been carried out, too"
            await rig.settle(until=rig.is_up)
            await assert_sound(rig)

        await asyncio.gather(*(die_and_continue(commands) for commands in (1, 3, 8, 15, 22)))

    async def test_a_shard_without_a_server_holds_up_the_slots(self, make_rig: Callable[..., Rig]) -> None:
        rig = make_rig()
        for ordinal in (0, 1):
            rig.delete(rig.pod(1, ordinal))
        assert len((await rig.heard()).servers) == 4
        steps = [await rig.act() for _ in range(5)]
        judged = await rig.verdict()
        assert (judged.slots_covered, judged.uncovered) == (False, SLOTS)
        assert StepReason.WAITING_FOR_PODS in reasons([one for one in steps if one is not None])
        rig.add(1, 0)
        rig.add(1, 1)
        await rig.settle(until=rig.is_up)
        await assert_sound(rig)


class TestLosses:
    async def test_a_lost_replica_is_replaced(self, rig: Rig) -> None:
        values = await written(rig)
        primary = await rig.primary(0)
        rig.replace(await rig.replica(0))
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert await rig.primary(0) == primary
        assert reasons(steps) >= {StepReason.FORGETTING, StepReason.MEETING, StepReason.REPLICATING}
        assert StepReason.TAKING_OVER not in reasons(steps)
        assert (rig.read(), lost(steps)) == (values, 0)

    async def test_the_replica_of_a_primary_whose_pod_is_gone_takes_over_at_once(self, rig: Rig) -> None:
        values = await written(rig)
        replica = await rig.replica(0)
        rig.replace(await rig.primary(0))
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (await rig.primary(0)).uid == replica.uid
        assert steps[0].reason is StepReason.TAKING_OVER
        assert (rig.read(), lost(steps)) == (values, 0)

    async def test_the_replica_of_a_process_that_ended_takes_over_before_the_next_one_starts(self, rig: Rig) -> None:
        values = await written(rig)
        replica, primary = await rig.replica(0), await rig.primary(0)
        rig.kill(primary)
        rig.pods[primary.uid] = replace(primary, ready=False, starting=True)
        patience = Patience()
        while (found := await rig.act()) is None or found.waits:
            patience.ask(found)
        assert (found.reason, found.lost) == (StepReason.TAKING_OVER, ())
        assert (await rig.server(replica)).itself.slots
        assert rig.read() == values
        rig.restart(primary)
        await rig.settle(until=rig.is_up)
        await assert_sound(rig)

    async def test_a_server_that_is_back_after_its_replica_was_promoted_joins_as_another(self, rig: Rig) -> None:
        values = await written(rig)
        replica, primary = await rig.replica(1), await rig.primary(1)
        before = await rig.heard()
        rig.kill(primary)
        patience = Patience()
        while not (await rig.server(replica)).is_primary:
            found = await rig.act()
            assert found is not None
            assert found.waits
            patience.ask(found)
        ((node_id, message),) = failovers(before, await rig.heard(), rig.goal).items()
        assert node_id == (await rig.server(replica)).node_id
        assert message.endswith(f" slots of {primary.name}, which does not answer")
        rig.restart(primary)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert StepReason.TAKING_OVER not in reasons(steps)
        assert not (await rig.server(primary)).is_primary
        assert (rig.read(), lost(steps)) == (values, 0)

    async def test_a_new_identity_at_the_old_address_does_not_keep_the_replica_from_taking_over(self, rig: Rig) -> None:
        """The others call the old one a node without an address then, and promote nobody."""
        values = await written(rig)
        primary, replica = await rig.primary(2), await rig.replica(2)
        rig.restart(primary)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert StepReason.TAKING_OVER in reasons(steps)
        assert (await rig.primary(2)).uid == replica.uid
        # The replica may have read the nothing of the new server first, which a pod would not have started so soon.
        assert rig.read().items() <= values.items()

    async def test_a_shard_that_is_lost_with_its_replicas_starts_empty_and_the_loss_is_told(self, rig: Rig) -> None:
        values = await written(rig)
        slots = count((await rig.server(await rig.primary(0))).itself.slots)
        for pod in (await rig.primary(0), await rig.replica(0)):
            rig.replace(pod)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert lost(steps) == slots
        left = rig.read()
        assert left.items() < values.items()
        assert len(left) > len(values) / 2

    async def test_a_cluster_that_is_lost_at_once_is_formed_anew(self, rig: Rig) -> None:
        for pod in list(rig.pods.values()):
            rig.replace(pod)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert StepReason.FORMING in reasons(steps)

    async def test_all_servers_at_their_old_addresses_without_memory_are_formed_anew(self, rig: Rig) -> None:
        for pod in list(rig.pods.values()):
            rig.restart(pod)
        await rig.settle(until=rig.is_up)
        await assert_sound(rig)

    async def test_an_operator_that_dies_during_a_repair_is_continued(self, rig: Rig) -> None:
        """After the takeover, between two servers that forget, between meets, before the replica."""
        for commands in (1, 3, 8, 12):
            values = await written(rig)
            rig.replace(await rig.primary(1))
            died = await rig.die_after(commands)
            rig.nodes = rig.connect()
            steps = await rig.settle(until=rig.is_up)
            await assert_sound(rig)
            assert (rig.read(), lost(steps)) == (values, 0)
            assert died or commands > 10

    async def test_servers_that_lost_sight_of_a_moved_one_are_told_its_address(self, rig: Rig) -> None:
        """As after a pod's sandbox was made anew around a server: the same identity answers at another address."""
        values = await written(rig)
        moved = rig.move(await rig.replica(1))
        await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        cluster = await rig.heard()
        identity = cluster.servers[moved.uid].node_id
        assert {peer.ip for one in cluster.servers.values() for peer in one.peers if peer.node_id == identity} == {
            moved.ip
        }
        assert rig.read() == values


class TestSilence:
    async def test_a_frozen_primary_is_left_to_the_other_servers_and_joins_when_it_is_back(self, rig: Rig) -> None:
        values = await written(rig)
        frozen = await rig.primary(0)
        rig.freeze(frozen)
        await covered(rig)
        assert rig.read() == values
        rig.thaw(frozen)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (await rig.primary(0)).uid != frozen.uid
        assert StepReason.TAKING_OVER not in reasons(steps)
        assert rig.read() == values

    async def test_replicas_take_over_when_too_few_primaries_are_left_to_vote(self, rig: Rig) -> None:
        values = await written(rig)
        frozen, before = [await rig.primary(0), await rig.primary(1)], len(rig.steps)
        for pod in frozen:
            rig.freeze(pod)
        await covered(rig)
        assert StepReason.TAKING_OVER in reasons(rig.steps[before:])
        assert rig.read() == values
        for pod in frozen:
            rig.thaw(pod)
        await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert {(await rig.primary(0)).uid, (await rig.primary(1)).uid}.isdisjoint(pod.uid for pod in frozen)
        assert rig.read() == values

    async def test_a_replica_that_missed_its_primarys_last_epoch_takes_its_place(self, rig: Rig) -> None:
        """Redis refuses it every vote; Valkey's voters send it the epoch."""
        values = await written(rig)
        primary = await rig.primary(0)
        await freeze_before_its_replica_hears_its_epoch(rig, primary)
        await covered(rig)
        assert rig.read() == values
        rig.thaw(primary)
        await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (await rig.primary(0)).uid != primary.uid
        assert rig.read() == values

    async def test_a_frozen_primary_without_a_replica_keeps_its_slots(self, rig: Rig) -> None:
        values = await written(rig)
        replica, primary = await rig.replica(2), await rig.primary(2)
        rig.delete(replica)
        rig.freeze(primary)
        for _ in range(3):
            found = await rig.act()
            assert found is None or found.reason in (StepReason.FORGETTING, StepReason.WAITING_FOR_SERVERS)
        rig.thaw(primary)
        rig.add(replica.shard, replica.ordinal)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (await rig.primary(2)).uid == primary.uid
        assert (rig.read(), lost(steps)) == (values, 0)


async def freeze_before_its_replica_hears_its_epoch(rig: Rig, primary: ServerPod) -> None:
    """Give a primary new epochs until all other primaries know one that its replica does not, and freeze it then."""
    voters, replica = [await rig.primary(1), await rig.primary(2)], await rig.replica(primary.shard)
    node_id = (await rig.server(primary)).node_id

    def epoch_of(pod: ServerPod) -> int:
        with rig.client(pod) as client:
            seen = client.execute_command("CLUSTER NODES").values()
        return next(int(peer["epoch"]) for peer in seen if peer["node_id"] == node_id)

    patience = Patience()
    while True:
        # A server that has the highest epoch of all takes no new one.
        for pod in (voters[0], primary):
            with rig.client(pod) as client:
                client.execute_command("CLUSTER BUMPEPOCH")
        while len({epoch := epoch_of(primary), *(epoch_of(pod) for pod in voters)}) > 1:
            patience.ask(epoch)
            await asyncio.sleep(0.01)
        if epoch_of(replica) < epoch:
            rig.freeze(primary)
            if epoch_of(replica) < min(map(epoch_of, voters)):
                return
            rig.thaw(primary)
        patience.ask(epoch)


async def covered(rig: Rig) -> None:
    """Act until every slot has a server that serves it."""
    patience = Patience()
    while not (judged := await rig.verdict()).slots_covered:
        patience.ask(judged)
        await rig.act()


class TestRolling:
    async def test_pods_of_a_former_template_go_one_by_one_and_nothing_is_lost(self, rig: Rig) -> None:
        values = await written(rig)
        former = set(rig.pods)
        rig.goal = replace(rig.goal, revisions=dict.fromkeys(range(3), "b"), max_bytes_each=48 << 20)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert {pod.revision for pod in rig.pods.values()} == {"b"}
        assert former.isdisjoint(rig.pods)
        removed = [step.remove_pod for step in steps if step.remove_pod]
        assert sorted(str(uid) for uid in removed) == sorted(former)
        assert (rig.read(), lost(steps)) == (values, 0)
        # Whoever had slots handed them over before, and replicas went before any of these.
        first = next(number for number, step in enumerate(steps) if step.reason is StepReason.FAILING_OVER)
        assert len([step for step in steps[:first] if step.remove_pod]) == 3


class TestStaleCommands:
    async def test_commands_of_a_deposed_leader_lose_nothing(self, make_rig: Callable[..., Rig]) -> None:
        """All that was ever sent to these servers is sent again, in its order, when none of it is wanted."""
        rig = make_rig()
        await rig.settle(until=rig.is_up)
        values = await written(rig)
        rig.replace(await rig.primary(0))
        rig.replace(await rig.replica(1))
        await rig.settle(until=rig.is_up)
        cluster = await rig.heard()
        again = [sent.command for sent in rig.sent if sent.command.pod_uid in cluster.pods]
        assert {"ADDSLOTSRANGE", "MEET", "FORGET", "REPLICATE", "TAKEOVER"} <= {
            word for command in again for word in command.words
        }
        for command in again:  # each alone: a refused one keeps the others of its server from being sent
            await rig.nodes.send([command], cluster.pods, lambda: True)
        steps = await rig.settle(until=rig.is_up)
        await assert_sound(rig)
        assert (rig.read(), lost(steps)) == (values, 0)

    async def test_a_command_for_a_former_identity_is_not_sent(self, rig: Rig) -> None:
        pod = await rig.replica(0)
        before = (await rig.server(pod)).node_id
        rig.restart(pod)
        await rig.settle(until=rig.is_up)
        told = await rig.nodes.send(
            [Command(pod.uid, before, ("CONFIG", "SET", "maxmemory", "1"))], rig.pods, is_leader
        )
        assert [sent.failure for sent in told] == ["IdentityChanged"]
        assert (await rig.server(pod)).max_bytes == rig.goal.max_bytes_each

    async def test_after_a_refused_command_the_rest_of_that_server_is_not_sent(self, rig: Rig) -> None:
        pod, other = await rig.primary(0), await rig.primary(1)
        one, two = (await rig.server(pod)).node_id, (await rig.server(other)).node_id
        told = await rig.nodes.send(
            [
                Command(pod.uid, one, ("CLUSTER", "ADDSLOTS", "0")),
                Command(pod.uid, one, ("CONFIG", "SET", "maxmemory", "1")),
                Command(other.uid, two, ("PING",)),
            ],
            rig.pods,
            is_leader,
        )
        assert [sent.failure for sent in told] == ["Refused", "NotSent", ""]
        assert "busy" in told[0].answer
        assert (await rig.server(pod)).max_bytes == rig.goal.max_bytes_each

    async def test_who_is_no_leader_any_more_sends_nothing(self, rig: Rig) -> None:
        pod = await rig.primary(0)
        command = Command(pod.uid, (await rig.server(pod)).node_id, ("CONFIG", "SET", "maxmemory", "1"))
        told = await rig.nodes.send([command], rig.pods, lambda: False)
        assert [sent.failure for sent in told] == ["NotSent"]
        assert (await rig.server(pod)).max_bytes == rig.goal.max_bytes_each


def is_leader() -> bool:
    return True
