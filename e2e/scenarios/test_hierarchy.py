"""Memory, files and Redis as one cache: where blocks are, where requests find them, and which tenants a tier excludes.

All tests share one model of one pod. Hits of a request are counted by tier, so that a hit of the wrong one fails.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from operator import ge
from pathlib import Path

import pytest

from e2e.product.chapters import SPARE, wait_published
from e2e.product.direct import container_pid, pods_run_here, sample
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.layered import (
    DISK,
    DISK_DIRECTORY,
    MEMORY,
    MODEL,
    REDIS,
    TIERS,
    Found,
    Layered,
    Tenant,
    nothing_on,
    only_for,
    open_layered,
    tenant,
)
from e2e.product.pools import PREFIX_CHUNKS, fresh_prefix, pool_keyspaces, pool_of
from e2e.product.prompts import CHUNK_BYTES, CHUNK_TOKENS, WHOLE_CHUNKS, fresh_prompt
from e2e.product.read_only import read_only
from e2e.product.tier_contents import tier_contents
from kvstrata.api.scalars import Quantity
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.store.block_file import block_name, file_bytes, parse_file_name
from kvstrata.contract.store.block_value import HEADER_BYTES, TAG_BYTES, unpack_header

pytestmark = pytest.mark.cluster

CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS
NOTHING = Found(0, 0, 0)
IN_MEMORY, ON_DISK, IN_REDIS = Found(CHUNKS, 0, 0), Found(0, CHUNKS, 0), Found(0, 0, CHUNKS)

SHRINKS = 0.9
"""KV blocks of the demo's model shrink to four fifths when they are compressed, ciphertext does not."""

STATUS_SHARE = 1 / 8
"""How exact a policy's status is about its usage."""

MEMORY_LIFE_S, DISK_LIFE_S = 10, 60
"""Retentions that are some seconds apart, so that there is time to look in between."""


@pytest.fixture(scope="module")
def layered(kubectl: Kubectl) -> Iterator[Layered]:
    """The model, with keys for the tenants of these stories."""
    if not pods_run_here():
        pytest.skip("looks at a pod's disk and into its processes: only on the local cluster")
    tenants = ("roamer", "settler", "reader", "outsider", "aging", "open", "secret")
    with open_layered(kubectl, print, *tenants) as opened:
        yield opened


@pytest.mark.claim("blocks in files outlive a killed cache server, as ciphertext")
def test_blocks_on_disk_outlive_a_killed_cache_server_as_ciphertext(layered: Layered, kubectl: Kubectl) -> None:
    prompts, other = [fresh_prompt() for _ in range(SPARE)], fresh_prompt()
    with (
        tenant(layered, "settler", *nothing_on(MEMORY, REDIS)) as settler,
        tenant(layered, "roamer") as roamer,
        tier_contents(kubectl, REDIS) as redis,
    ):
        computed = {}
        for one in (settler, roamer):
            for prompt in prompts:
                computed[prompt] = layered.ask(one, prompt)
                assert computed[prompt] == NOTHING
            on_disk(layered, one, SPARE * CHUNKS)
        layered.finds(settler, prompts, ON_DISK)
        layered.finds(roamer, prompts, IN_MEMORY)
        layered.ask(settler, other)
        on_disk(layered, settler, (SPARE + 1) * CHUNKS)
        wait_until("nothing of it is in memory", lambda: layered.held(settler, MEMORY) == 0)
        assert redis.blocks(settler.keyspace) == []
        wait_until("the other's are in Redis, too", lambda: len(redis.blocks(roamer.keyspace)) >= CHUNKS)

        domain, before = str(redis.domain), {one.name: layered.files(one.keyspace) for one in (settler, roamer)}
        bodies = {name: [ciphertext_of(path, domain) for path in paths] for name, paths in before.items()}
        settled = {path.name for path in before["settler"]}
        assert all(path.name in settled for path in before["roamer"]), "both asked the same"
        assert not pieces(bodies["settler"]) & pieces(bodies["roamer"]), "of the same text under two keys"

        layered.kill_cache_server()
        assert [path.name for path in layered.files(settler.keyspace)] == [path.name for path in before["settler"]]
        wait_until("the engine uses the new server", lambda: layered.ask(settler, other) == ON_DISK)
        prompt, loaded = layered.finds(settler, prompts, ON_DISK)
        assert loaded.text == computed[prompt].text
        layered.finds(roamer, prompts, ON_DISK)
        assert layered.counters().get(f"{REDIS}.loaded", 0) == 0, "from the pod's own disk, not the network"


@pytest.mark.claim("metrics and status agree with the bytes on the disk")
def test_status_and_metrics_agree_with_the_disk(layered: Layered, kubectl: Kubectl) -> None:
    with tenant(layered, "settler", *nothing_on(MEMORY, REDIS)) as settler:
        assert layered.ask(settler, fresh_prompt()) == NOTHING
        own = on_disk(layered, settler, CHUNKS)
        assert {path.stat().st_size for path in own} == {file_bytes(CHUNK_BYTES)}
        own_bytes = size_of(own)
        assert sum(path.stat().st_blocks for path in own) * 512 >= own_bytes, "no file has holes"
        scope = settler.keyspace[:SCOPE_DIGITS]

        def reported() -> tuple[float | None, float | None]:
            page = layered.metrics()
            used = sample(page, "kvstrata_cache_tier_used_bytes", tier=DISK, scope=scope)
            return used, sample(page, "kvstrata_cache_files_bytes", tier=DISK)

        # Files of tenants of before may be going.
        wait_until("metrics show both sizes", lambda: reported() == (own_bytes, size_of(layered.files())))
        capacity_bytes = Quantity(kubectl.get("cachetier", DISK, DEMO_NAMESPACE)["spec"]["capacityPerPod"]).in_bytes
        wait_until(
            "the tier reports it",
            lambda: abs(used_of(kubectl, DISK) - size_of(layered.files())) * 20 < capacity_bytes,
        )
        wait_until(
            "the policy reports it",
            lambda: abs(usage_of(kubectl, settler) - own_bytes) <= STATUS_SHARE * own_bytes,
        )
        layered.report(kubectl.run("-n", DEMO_NAMESPACE, "get", "cachetier", *TIERS))


@pytest.mark.claim("blocks that left the memory are served by files, and by the memory again")
def test_a_block_that_left_the_memory_comes_back_up_when_it_is_read(layered: Layered) -> None:
    first, second, third = (fresh_prompt() for _ in range(3))
    narrow = {"tier": MEMORY, "limit": f"{2 * CHUNKS * CHUNK_BYTES >> 10}Ki"}
    with tenant(layered, "settler", narrow, *nothing_on(REDIS)) as settler:
        for prompt in (first, second):
            assert layered.ask(settler, prompt) == NOTHING
        wait_until("the memory has it", lambda: layered.ask(settler, second) == IN_MEMORY)
        wait_until("the memory has both", lambda: layered.held(settler, MEMORY) == 2 * CHUNKS)
        on_disk(layered, settler, 2 * CHUNKS)
        before = layered.counters()

        def grown(name: str) -> int:
            return layered.counters().get(f"memory.{name}", 0) - before.get(f"memory.{name}", 0)

        assert layered.ask(settler, third) == NOTHING
        wait_until("the first had to go", lambda: grown("evicted_limit") >= CHUNKS)
        # A prompt with a late lookup is computed, and takes the place of the next one.
        prompt, _ = layered.finds(settler, (first, second, third), ON_DISK)
        wait_until("the memory has it again", lambda: layered.ask(settler, prompt) == IN_MEMORY)
        wait_until("it is counted as promoted", lambda: grown("promoted_blocks") == CHUNKS)
        assert layered.condition("cachedmodel", MODEL, "TiersOrdered") == ("True", "TiersOrdered")


@pytest.mark.claim("each tier keeps its own retention")
def test_each_tier_keeps_blocks_for_its_own_time_however_often_they_are_read(layered: Layered) -> None:
    lives = {MEMORY: f"{MEMORY_LIFE_S}s", DISK: f"{DISK_LIFE_S}s", REDIS: "1h"}
    budgets = [{"tier": name, "retention": life} for name, life in lives.items()]
    with tenant(layered, "aging", *budgets) as aging:
        prompts, began_s = [fresh_prompt() for _ in range(SPARE)], time.monotonic()
        for prompt in prompts:
            assert layered.ask(aging, prompt) == NOTHING
        on_disk(layered, aging, SPARE * CHUNKS)
        wait_until("it has left the memory", lambda: layered.held(aging, MEMORY) == 0)
        read_s = time.monotonic()
        assert read_s >= began_s + MEMORY_LIFE_S
        assert layered.ask(aging, prompts[0]) == ON_DISK
        assert layered.ask(aging, prompts[0]) == ON_DISK, "a copy is as old as its block, and too old for the memory"
        wait_until("it has left the disk", lambda: not layered.files(aging.keyspace))
        assert began_s + DISK_LIFE_S <= time.monotonic() < read_s + DISK_LIFE_S, "to be read makes nothing younger"
        found = [[layered.ask(aging, prompt) for _ in range(2)] for prompt in prompts]
        assert [IN_REDIS, IN_REDIS] in found, found
        # One with a late lookup is computed, and is young again.
        if all(places == [IN_REDIS, IN_REDIS] for places in found):
            assert layered.files(aging.keyspace) == []
            wait_until("none is in memory", lambda: layered.held(aging, MEMORY) == 0)


@pytest.mark.claim("no block of a Restricted tenant is in a tier that does not admit it")
def test_what_a_tier_does_not_admit_leaves_it_and_never_comes_back(layered: Layered, kubectl: Kubectl) -> None:
    prompts, later = ([fresh_prompt() for _ in range(SPARE)] for _ in range(2))
    with (
        tenant(layered, "open", classification="Internal") as admitted,
        tenant(layered, "secret", classification="Restricted") as restricted,
        tier_contents(kubectl, REDIS) as redis,
    ):

        def there(owner: Tenant) -> tuple[int, int]:
            return len(layered.files(owner.keyspace)), len(redis.blocks(owner.keyspace))

        def keeps(owner: Tenant, prompts: list[str]) -> None:
            """Ask for one prompt after the other until both tiers have taken one: a write that is late is given up."""
            for left, prompt in zip(reversed(range(len(prompts))), prompts, strict=True):
                files, blocks = there(owner)
                assert layered.ask(owner, prompt) == NOTHING
                least = files + CHUNKS, blocks + CHUNKS
                try:
                    wait_until("both tiers have it", lambda least=least: all(map(ge, there(owner), least)), 60)
                    return
                except AssertionError:
                    if not left:
                        raise

        for one in (admitted, restricted):
            keeps(one, prompts)
        with only_for(layered, "Public", "Internal"):
            wait_until("the policy reports it", lambda: admission(layered, "secret")[0] == "False")
            wait_until("every block has left both", lambda: there(restricted) == (0, 0))
            condition = kubectl.condition("tenantcachepolicy", "secret", DEMO_NAMESPACE, "TiersAdmitted")
            assert condition["reason"] == "ClassificationNotAllowed"
            assert DISK in condition["message"]
            assert REDIS in condition["message"]
            assert admission(layered, "open") == ("True", "TiersAdmitted")

            assert layered.ask(restricted, later[0]) == NOTHING
            wait_until("the memory takes every tenant's", lambda: layered.ask(restricted, later[0]) == IN_MEMORY)
            # Admitted blocks that came later are there, so missing ones were kept out.
            keeps(admitted, later)
            assert there(restricted) == (0, 0)
            refused = [f"{tier}.refused_not_allowed" for tier in (DISK, REDIS)]
            wait_until("both refused it", lambda: all(layered.counters().get(name, 0) >= CHUNKS for name in refused))


def test_a_pools_bytes_are_the_same_in_its_status_and_in_each_tier(layered: Layered, kubectl: Kubectl) -> None:
    name, text = "layered-rules", fresh_prefix()
    fields = {"modelRef": {"name": MODEL}, "tiers": [{"name": tier} for tier in TIERS]}
    with ExitStack() as stack:
        stack.callback(kubectl.run, "-n", DEMO_NAMESPACE, "delete", "prefixpool", name, "--ignore-not-found")
        # So many that a lookup may be late.
        names = ("reader", "hot", "cold")
        kubectl.apply(pool_of(name, text, readers={"tenants": list(names)}, **fields))
        readers = [stack.enter_context(tenant(layered, one, pools=[{"name": name}])) for one in names]
        outsider = stack.enter_context(tenant(layered, "outsider"))
        redis = stack.enter_context(tier_contents(kubectl, REDIS))
        status = wait_published(kubectl, name)
        (keyspace,) = pool_keyspaces(kubectl, name, MODEL)
        by_tier = {row["name"]: (row["stored"], row["bytes"]) for row in status["tiers"]}
        chunks, files, blocks = int(status["chunks"]), layered.files(keyspace), redis.blocks(keyspace)
        assert chunks == PREFIX_CHUNKS
        assert by_tier[DISK] == (len(files), size_of(files)) == (chunks, chunks * file_bytes(CHUNK_BYTES))
        assert by_tier[REDIS] == (len(blocks), sum(len(block.value) for block in blocks))
        assert by_tier[MEMORY] == (chunks, chunks * CHUNK_BYTES)
        scope = keyspace[:SCOPE_DIGITS]

        def in_memory() -> float | None:
            return sample(layered.metrics(), "kvstrata_gate_memory_used_bytes", tier=MEMORY, scope=scope)

        wait_until("the memory reports it", lambda: in_memory() == by_tier[MEMORY][1])
        ending = fresh_prompt(20)
        assert layered.ask(outsider, text + ending) == NOTHING
        found = [layered.ask(one, text + ending) for one in readers]
        assert Found(chunks, 0, 0) in found, found
        layered.report(json.dumps(status["tiers"]))


def test_a_disk_that_becomes_read_only_costs_new_hits_and_no_request(layered: Layered) -> None:
    with tenant(layered, "settler", *nothing_on(MEMORY, REDIS)) as settler:
        old, new = [fresh_prompt() for _ in range(SPARE)], fresh_prompt()
        for prompt in old:
            layered.ask(settler, prompt)
        on_disk(layered, settler, SPARE * CHUNKS)
        with read_only(container_pid(layered.kubectl, DEMO_NAMESPACE, layered.pod, "cache"), f"/{DISK_DIRECTORY}"):
            assert layered.ask(settler, new) == NOTHING
            wait_until("the disk refused it", lambda: room(layered) == ("False", "DiskReadOnly"))
            assert layered.ask(settler, new) == NOTHING
            layered.finds(settler, old, ON_DISK)
        # It is tried again every 30 s.
        wait_until("blocks are stored again", lambda: layered.ask(settler, new) == ON_DISK, every_s=2)
        wait_until("the tier reports it", lambda: room(layered) == ("True", "RoomLeft"))


def on_disk(layered: Layered, owner: Tenant, count: int) -> list[Path]:
    """Wait until a tenant has so many files."""

    def there() -> list[Path] | None:
        files = layered.files(owner.keyspace)
        return files if len(files) == count else None

    found: list[Path] = wait_until(f"{count} blocks of {owner.name} are on the disk", there)
    return found


def ciphertext_of(path: Path, domain: str) -> bytes:
    """Return the body of a block's file, which is ciphertext by its name, by its header and by its looks."""
    block = parse_file_name(path.parent.name, path.name)
    assert block is not None
    assert block[1], path.name
    raw = path.read_bytes()
    header = unpack_header(block_name(domain, block[0]), raw[-HEADER_BYTES:])
    assert header is not None
    assert header.encrypted
    assert len(raw) == file_bytes(header.body_bytes)
    body = raw[: header.body_bytes]
    assert not any(raw[header.body_bytes + TAG_BYTES : -HEADER_BYTES])
    assert len(zlib.compress(body)) > len(body) * SHRINKS, f"{path.name} can be compressed, as plaintext can"
    return body


def pieces(bodies: list[bytes]) -> set[bytes]:
    """Return all that bodies hold, cut as the cipher cuts it."""
    return {body[at : at + 16] for body in bodies for at in range(0, len(body), 16)}


def size_of(files: list[Path]) -> int:
    """Return the sum of the sizes of files, of which some may go meanwhile."""
    found = 0
    for path in files:
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def used_of(kubectl: Kubectl, tier: str) -> int:
    """Return the used bytes of a tier by its status."""
    return Quantity(kubectl.get("cachetier", tier, DEMO_NAMESPACE)["status"].get("used") or "0").in_bytes


def usage_of(kubectl: Kubectl, owner: Tenant) -> int:
    """Return a tenant's used bytes of the disk by its policy's status."""
    status = kubectl.get("tenantcachepolicy", owner.name, DEMO_NAMESPACE).get("status") or {}
    rows = {row["tier"]: row.get("used") for row in (status.get("usage") or {}).get("tiers") or ()}
    return Quantity(rows.get(DISK) or "0").in_bytes


def room(layered: Layered) -> tuple[str, str]:
    """Return status and reason of the file tier's condition HasRoom."""
    return layered.condition("cachetier", DISK, "HasRoom")


def admission(layered: Layered, policy: str) -> tuple[str, str]:
    """Return status and reason of a policy's condition TiersAdmitted."""
    return layered.condition("tenantcachepolicy", policy, "TiersAdmitted")
