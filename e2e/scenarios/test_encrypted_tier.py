"""The shared tier as a reader of its server's memory sees it: ciphertext, under keys of each scope, for as long as its
policy declares."""

from __future__ import annotations

import time
import zlib
from functools import partial

import pytest

from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, SPARE, Stage, keyspace_of
from e2e.product.guest import guest
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import CHUNK_TOKENS, WHOLE_CHUNKS, finds, fresh_prompt, shared, stored
from e2e.product.shared_tier import TIER, make_room
from e2e.product.tier_contents import StoredBlock, TierContents, tier_contents
from kvstrata.contract.store.block_value import HEADER_BYTES, TAG_BYTES, unpack_header

pytestmark = pytest.mark.cluster

CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS
TENANT = "forgetful"
SHORT_S = 20
"""A retention that a block which was stored a moment ago has not reached, and will within the story."""

STORED_WITHIN_S = 60.0

SHRINKS = 0.9
"""KV blocks of the demo's model shrink to four fifths when they are compressed, ciphertext does not."""


@pytest.mark.claim("with engines the shared tier's server holds nothing but ciphertext, and hits are right")
def test_the_server_holds_nothing_but_ciphertext_and_hits_are_right(stage: Stage, kubectl: Kubectl) -> None:
    make_room(stage)
    wait_until("every pod reports that it encrypts", lambda: _encrypted(kubectl) == ("True", "KeysHeld"))
    prompts = [fresh_prompt() for _ in range(SPARE)]
    bodies = {}
    with tier_contents(kubectl) as tier:
        for key, tenant in ((ACME_KEY, "acme"), (GLOBEX_KEY, "globex")):
            keyspace = keyspace_of(kubectl, tenant)
            before = tier.names(keyspace)
            computed = {prompt: stage.first.ask(key, prompt).text for prompt in prompts}
            blocks = wait_until("they are stored", partial(_new, tier, keyspace, before, time.monotonic()))
            for block in blocks:
                _is_ciphertext(block)
            bodies[tenant] = {block.name.rpartition(":")[2]: _body(block) for block in blocks}
            prompt, loaded = finds(stage.second, key, prompts)
            assert loaded.text == computed[prompt]
    # The same text has the same names for both, and nothing of it is alike.
    both = bodies["acme"].keys() & bodies["globex"].keys()
    assert len(both) >= CHUNKS
    for name in both:
        body = bodies["acme"][name]
        other = bodies["globex"][name]
        alike = sum(body[at : at + 16] == other[at : at + 16] for at in range(0, len(body), 16))
        assert alike == 0, f"{alike} pieces of {name} are the same under both keys"


def test_a_shortened_retention_holds_for_blocks_that_are_there_already(stage: Stage, kubectl: Kubectl) -> None:
    make_room(stage)
    with guest(stage, TENANT, {"budgets": [{"tier": TIER, "retention": "6h"}]}) as key, tier_contents(kubectl) as tier:
        keyspace = keyspace_of(kubectl, TENANT)
        (old,) = stored(stage.first, key)
        wait_until("its chunks are stored", lambda: len(tier.blocks(keyspace)) >= CHUNKS)
        stored_by = time.monotonic()
        lives_ms = [block.expires_in_ms for block in tier.blocks(keyspace)]
        assert len(lives_ms) == CHUNKS
        assert min(lives_ms) > 3600_000
        patch = f'{{"spec":{{"budgets":[{{"tier":"{TIER}","retention":"{SHORT_S}s"}}]}}}}'
        kubectl.run("-n", DEMO_NAMESPACE, "patch", "tcpol", TENANT, "--type", "merge", "-p", patch)

        def expire_soon() -> bool:
            return max((block.expires_in_ms for block in tier.blocks(keyspace)), default=0) <= SHORT_S * 1000

        wait_until("blocks that are there expire sooner", expire_soon)
        time.sleep(max(0.0, stored_by + SHORT_S - time.monotonic()))
        found = stage.second.found(key, old)
        assert found == 0, f"{found} tokens of blocks that are too old"
        shared(stage.first, stage.second, key)


def _new(tier: TierContents, keyspace: str, before: set[str], asked_at: float) -> list[StoredBlock]:
    """Return the blocks of a keyspace that were not there before, once they are as many as the prompts have chunks.

    A write that is late is given up, so later but for one prompt may be missing.
    """
    found = [block for block in tier.blocks(keyspace) if block.name not in before]
    least = SPARE - 1 if time.monotonic() > asked_at + STORED_WITHIN_S else SPARE
    return found if len(found) >= least * CHUNKS else []


def _is_ciphertext(block: StoredBlock) -> None:
    """By its header, by its length, and by its looks."""
    header = unpack_header(block.name.encode(), block.value[:HEADER_BYTES])
    assert header is not None
    assert header.encrypted
    assert len(block.value) == HEADER_BYTES + header.body_bytes + TAG_BYTES
    body = _body(block)
    assert len(zlib.compress(body)) > len(body) * SHRINKS, f"{block.name} can be compressed, as plaintext can"


def _body(block: StoredBlock) -> bytes:
    return block.value[HEADER_BYTES:-TAG_BYTES]


def _encrypted(kubectl: Kubectl) -> tuple[str, str]:
    found = kubectl.condition("cachetier", TIER, DEMO_NAMESPACE, "Encrypted")
    return str(found.get("status")), str(found.get("reason"))
