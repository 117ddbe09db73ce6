"""The shared tier as a reader of its server's memory sees it: ciphertext, under keys of each scope, for as long as its
policy declares."""

from __future__ import annotations

import time
import zlib

import pytest

from e2e.product.chapters import (
    ACME_KEY,
    CHUNK_TOKENS,
    GLOBEX_KEY,
    STORE_SETTLES_S,
    WHOLE_CHUNKS,
    Stage,
    fresh_prompt,
    keyspace_of,
)
from e2e.product.guest import guest
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.shared_tier import TIER, make_room
from e2e.product.tier_contents import StoredBlock, tier_contents
from kvstrata.contract.store.block_value import HEADER_BYTES, TAG_BYTES, unpack_header

pytestmark = pytest.mark.cluster

CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS
ENCRYPTED_WITHIN_S = 120.0
TENANT = "forgetful"
SHORT_S = 20
"""A retention that a block which was stored a moment ago has not reached, and will within the story."""

SHRINKS = 0.9
"""KV blocks of the demo's model shrink to three quarters when they are compressed, ciphertext does not."""


def test_the_server_holds_nothing_but_ciphertext_and_hits_are_right(stage: Stage, kubectl: Kubectl) -> None:
    make_room(stage)
    wait_until(
        "every pod reports that it encrypts", lambda: _encrypted(kubectl) == ("True", "KeysHeld"), ENCRYPTED_WITHIN_S
    )
    prompt = fresh_prompt("sealed")
    answers = {}
    with tier_contents(kubectl) as tier:
        for key, tenant in ((ACME_KEY, "acme"), (GLOBEX_KEY, "globex")):
            before = {block.name for block in tier.blocks(keyspace_of(kubectl, tenant))}
            computed, _ = stage.ask(stage.first, key, prompt)
            time.sleep(STORE_SETTLES_S)
            loaded, found = stage.ask(stage.second, key, prompt)
            assert found.external == WHOLE_CHUNKS, found
            assert loaded.text == computed.text
            blocks = [block for block in tier.blocks(keyspace_of(kubectl, tenant)) if block.name not in before]
            assert len(blocks) == CHUNKS
            for block in blocks:
                _is_ciphertext(block)
            answers[tenant] = {block.name.rpartition(":")[2]: _body(block) for block in blocks}
    # The same text has the same names for both, and under each tenant's own key nothing of it is alike.
    assert answers["acme"].keys() == answers["globex"].keys()
    for name, body in answers["acme"].items():
        other = answers["globex"][name]
        alike = sum(body[at : at + 16] == other[at : at + 16] for at in range(0, len(body), 16))
        assert alike == 0, f"{alike} pieces of {name} are the same under both keys"


def test_a_shortened_retention_holds_for_blocks_that_are_there_already(stage: Stage, kubectl: Kubectl) -> None:
    make_room(stage)
    with guest(stage, TENANT, {"budgets": [{"tier": TIER, "retention": "6h"}]}) as key, tier_contents(kubectl) as tier:
        keyspace, old = keyspace_of(kubectl, TENANT), fresh_prompt("old")
        stage.ask(stage.first, key, old)
        time.sleep(STORE_SETTLES_S)
        stored_by = time.monotonic()
        lives_ms = [block.expires_in_ms for block in tier.blocks(keyspace)]
        assert len(lives_ms) == CHUNKS
        assert min(lives_ms) > 3600_000
        patch = f'{{"spec":{{"budgets":[{{"tier":"{TIER}","retention":"{SHORT_S}s"}}]}}}}'
        kubectl.run("-n", DEMO_NAMESPACE, "patch", "tcpol", TENANT, "--type", "merge", "-p", patch)

        def expire_soon() -> bool:
            return max((block.expires_in_ms for block in tier.blocks(keyspace)), default=0) <= SHORT_S * 1000

        wait_until("blocks that are there expire sooner", expire_soon, SHORT_S)
        time.sleep(max(0.0, stored_by + SHORT_S - time.monotonic()))
        _, found = stage.ask(stage.second, key, old)
        assert found.external == 0, f"{found} of blocks that are too old"
        # Newer blocks are found meanwhile.
        new = fresh_prompt("new")
        stage.ask(stage.first, key, new)
        time.sleep(STORE_SETTLES_S)
        _, found = stage.ask(stage.second, key, new)
        assert found.external == WHOLE_CHUNKS, found


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
