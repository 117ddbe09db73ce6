"""An engine whose shared tier is a Redis Cluster of the operator: its requests while servers are lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.product.direct import pods_run_here
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.layered import DISK, MEMORY, REDIS, Found, Layered, Tenant, nothing_on, open_layered, tenant
from e2e.product.managed_cluster import ManagedCluster
from e2e.product.prompts import CHUNK_TOKENS, WHOLE_CHUNKS, fresh_prompt

pytestmark = pytest.mark.cluster

CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS
NOTHING, IN_REDIS = Found(0, 0, 0), Found(0, 0, CHUNKS)
PROMPTS = 6
LATE = 1
"""So many of them may be looked up late, on a busy machine."""


@pytest.fixture(scope="module")
def layered(kubectl: Kubectl) -> Iterator[Layered]:
    """A model of one pod whose Redis tier is a cluster."""
    if not pods_run_here():
        pytest.skip("kills servers in their pods: only on the local cluster")
    with open_layered(kubectl, print, "roamer", redis={"shards": 3, "replicasPerShard": 1}) as opened:
        yield opened


@pytest.fixture
def roamer(layered: Layered) -> Iterator[Tenant]:
    """A tenant that may store in Redis alone."""
    with tenant(layered, "roamer", *nothing_on(MEMORY, DISK)) as found:
        yield found


def test_what_it_stored_is_found_after_a_primary_was_killed(layered: Layered, roamer: Tenant) -> None:
    cluster = ManagedCluster(layered.kubectl, REDIS)
    prompts = {number: fresh_prompt() for number in range(PROMPTS)}
    computed = {number: stored(layered, roamer, prompt) for number, prompt in prompts.items()}
    for shard in range(3):
        cluster.kill(cluster.primary(shard))
        for number in range(PROMPTS):  # Each is answered while servers go, from wherever.
            assert layered.ask(roamer, prompts[number]).text == computed[number].text
        cluster.wait_whole()
        found = {number: layered.ask(roamer, prompt) for number, prompt in prompts.items()}
        # A lookup that is late is a miss; a shard that is lost has chunks of every prompt.
        missed = [one for one in found.values() if one != IN_REDIS]
        assert len(missed) <= LATE, f"after shard {shard} lost its primary: {found}"
        assert {number: one.text for number, one in found.items()} == {n: one.text for n, one in computed.items()}


def test_when_all_servers_are_lost_at_once_it_computes_and_stores_again(layered: Layered, roamer: Tenant) -> None:
    cluster = ManagedCluster(layered.kubectl, REDIS)
    prompt, other = fresh_prompt(), fresh_prompt()
    computed = stored(layered, roamer, prompt)
    stored(layered, roamer, other)
    before = cluster.pods()
    chosen = f"kvstrata.io/tier={REDIS}"
    layered.kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", "-l", chosen, "--force", "--grace-period=0")
    # A server may answer until the kubelet has killed it, so the tier of these blocks is not asserted.
    assert layered.ask(roamer, prompt).text == computed.text
    wait_until("all are new", lambda: cluster.all_new(before))
    cluster.wait_whole()
    assert layered.ask(roamer, other) == NOTHING
    stored(layered, roamer, fresh_prompt())


def stored(layered: Layered, owner: Tenant, prompt: str) -> Found:
    """Ask until the whole prompt comes from the cluster; return the first answer."""
    first = layered.ask(owner, prompt)
    wait_until("it is stored", lambda: layered.ask(owner, prompt) == IN_REDIS)
    return first
