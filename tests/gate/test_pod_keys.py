"""Data keys that a bundle only names: brought by the operator, read by the cache server, and gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.clients.gate import GateClient
from kvstrata.contract.messages.key_delivery import (
    CONTENT_TYPE,
    KEYS_PATH,
    pack_keys,
)
from kvstrata.contract.messages.pod_state import PodState, gate_server_name
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey, KeyReference, key_id
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.policy.volume import KeyFiles

from . import pki
from .test_control import poll
from .test_real_adapter import real as real
from .test_real_adapter import runtime
from .test_rendering import posted, say
from .world import MODEL, World, entry, keyspace, until

OWN, OTHER, STRANGE = (
    b"acme's own key of thirty-two b..",
    b"globex's key of thirty-two byte.",
    b"a key that no bundle has, at all",
)
NAME = gate_server_name(MODEL, "ns")


def named(secret: bytes, generation: int = 7) -> tuple[KeyReference, ...]:
    return (KeyReference(generation, key_id(secret)),)


def files(world: World) -> dict[str, bytes]:
    directory = world.directory / "policy" / KEYS_DIRECTORY
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}


@pytest.fixture
async def operator(gate: World) -> AsyncIterator[GateClient]:
    """The operator's client of a gate whose bundle names two keys."""
    await gate.acked(await gate.publish([entry("acme", keys=named(OWN)), entry("globex", keys=named(OTHER))]))
    pem = [(gate.operator_tls / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")]
    async with GateClient(*pem, port=gate.gate.ports["control"]) as client:
        yield client


async def lacking(operator: GateClient) -> set[str]:
    return {*(await operator.keys("127.0.0.1", NAME))[0].ids}


async def bring(operator: GateClient, *secrets: bytes) -> set[str]:
    """Bring keys; return which lack afterwards."""
    return {*(await operator.bring_keys("127.0.0.1", NAME, pack_keys(secrets)))[0].ids}


async def test_a_pod_says_which_keys_it_lacks_and_has_them_once_they_are_brought(
    gate: World, operator: GateClient
) -> None:
    word, token = await operator.keys("127.0.0.1", NAME)
    assert token == "the-pods-token"
    assert {*word.ids} == {key_id(OWN), key_id(OTHER)}
    assert await bring(operator, OWN) == {key_id(OTHER)}
    assert files(gate) == {f"{keyspace('acme')}.7": OWN}


async def test_the_operator_hears_at_once_that_keys_lack_and_that_they_came(gate: World, operator: GateClient) -> None:
    first = await poll(gate, 2, 0)
    assert PodState.decode(first.body).keys_lacking == 2
    waiting = asyncio.create_task(poll(gate, 2, 60, tag=first.headers["etag"]))
    await bring(operator, OWN, OTHER)
    assert PodState.decode((await asyncio.wait_for(waiting, 20)).body).keys_lacking == 0


async def test_the_cache_server_is_asked_to_read_what_was_brought(gate: World, operator: GateClient) -> None:
    before = len(gate.adapter.applied)
    await bring(operator, STRANGE)
    assert len(gate.adapter.applied) == before
    gate.adapter.refusals = 1
    await bring(operator, OWN)
    await until(lambda: len(gate.adapter.applied) >= before + 2)
    assert not gate.adapter.refusals, "an application that is refused is tried again"


async def test_what_the_bundle_does_not_name_is_not_taken(gate: World, operator: GateClient) -> None:
    assert await bring(operator, STRANGE) == {key_id(OWN), key_id(OTHER)}
    assert files(gate) == {}


async def test_a_policy_without_a_key_ends_its_file_before_it_is_applied(gate: World, operator: GateClient) -> None:
    await bring(operator, OWN, OTHER)
    gate.adapter.gate.clear()
    revision = await gate.publish([entry("acme", "acme-2"), entry("globex", keys=named(OTHER))])
    await until(lambda: gate.gate.enforcement.revision == revision)
    assert files(gate) == {f"{keyspace('globex')}.7": OTHER}
    assert gate.gate.enforcement.acked < revision
    gate.adapter.gate.set()
    await gate.acked(revision)
    assert await lacking(operator) == set()


async def test_pools_keys_are_brought_as_well(gate: World, operator: GateClient) -> None:
    version = PoolVersion(
        keyspace("docs"), "f" * 16, PoolState.WARMING, pack_hashes([bytes(32)]), ("shared",), keys=named(STRANGE, 1)
    )
    await gate.acked(await gate.publish([entry("acme")], pools={0: PoolShard("docs", "uid-docs", (version,))}))
    assert await lacking(operator) == {key_id(STRANGE)}
    assert await bring(operator, STRANGE) == set()
    assert files(gate) == {f"{keyspace('docs')}.1": STRANGE}


async def test_a_gate_that_starts_anew_goes_on_with_the_files_that_hold_the_right_keys(world: World) -> None:
    entries = [entry("acme", keys=named(OWN)), entry("globex", keys=named(OTHER))]
    revision = await world.publish(entries)
    directory = world.directory / "policy"
    before = KeyFiles(directory)
    before.write({one.keyspace: one.keys for one in entries})
    before.bring({key_id(OWN): bytearray(OWN), key_id(OTHER): bytearray(OTHER)})
    spoilt = directory / KEYS_DIRECTORY / f"{keyspace('globex')}.7"
    spoilt.unlink()
    spoilt.write_bytes(STRANGE)
    async with world.started():
        await world.acked(revision)
        assert world.gate.volume.keys.lacking == {key_id(OTHER)}
        assert files(world) == {f"{keyspace('acme')}.7": OWN}


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_only_the_operators_certificate_may_ask_or_bring(gate: World, operator: GateClient, method: str) -> None:
    await bring(operator, OWN)
    bringing = posted(KEYS_PATH, bytes(pack_keys([OTHER])), CONTENT_TYPE)
    request = bringing if method == "POST" else f"GET {KEYS_PATH} HTTP/1.1\r\nHost: g\r\n\r\n".encode()
    for name in ("kvstrata-gate", "kvstrata-operator.evil", "acme"):
        other = gate.authority.issue(gate.directory / name, name, server=False)
        answer = await say(gate, request, pki.client_context(other, present=True))
        assert answer.status == 403
        assert OWN not in answer.body
    assert (await gate.ask(request)).status in (401, 404)
    assert await lacking(operator) == {key_id(OTHER)}
    assert (await say(gate, request)).status == 200


@pytest.mark.parametrize("body", [b"", b"{}", b"KVSK\x01" + OWN[:-1], b"KVSK\x02" + OWN])
async def test_a_body_that_is_no_message_of_keys_is_refused_and_not_quoted(
    gate: World, operator: GateClient, body: bytes
) -> None:
    answer = await say(gate, posted(KEYS_PATH, body, CONTENT_TYPE))
    assert answer.status == 400
    assert OWN[:-1] not in answer.body
    assert (await say(gate, posted(KEYS_PATH, body))).status == 415, "keys are not JSON"


async def test_the_real_adapter_seals_with_a_key_that_was_brought_and_overwrites_it_before_it_acknowledges(
    real: World, capfd: pytest.CaptureFixture[str]
) -> None:
    entries: list[Entry] = [entry("acme", keys=named(OWN)), entry("globex")]
    pem = [(real.operator_tls / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")]
    adapter = await asyncio.to_thread(runtime, real)
    try:
        async with GateClient(*pem, port=real.gate.ports["control"]) as operator:
            keys = adapter.enforcement.keys
            await real.acked(await real.publish(entries))
            assert adapter.enforcement.keyless() == 2
            await bring(operator, OWN)
            await until(lambda: keys.sealing(keyspace("acme")) is not None)
            sealing = keys.sealing(keyspace("acme"))
            assert sealing is not None
            assert (sealing.generation, bytes(sealing._secret)) == (7, OWN)
            revision = await real.publish([replace(entries[0], keyspace=keyspace("acme-2"), keys=())])
            await until(lambda: real.gate.enforcement.acked >= revision)
            assert bytes(sealing._secret) == bytes(32)
            assert files(real) == {}
    finally:
        await asyncio.to_thread(adapter.close)
    told = "".join(capfd.readouterr()) + real.gate.state().encode().decode()
    assert not any(form in told for form in (OWN.decode(), OWN.hex()))


class TestFiles:
    def test_a_key_that_comes_for_nobody_is_not_written(self, tmp_path: Path) -> None:
        keys = KeyFiles(tmp_path)
        keys.write({keyspace("acme"): named(OWN)})
        assert keys.bring({key_id(STRANGE): bytearray(STRANGE)}) == 0
        assert not any((tmp_path / KEYS_DIRECTORY).iterdir())

    def test_a_keyspace_whose_key_is_in_the_bundle_is_not_waited_for(self, tmp_path: Path) -> None:
        keys = KeyFiles(tmp_path)
        keys.write({keyspace("acme"): (DataKey(1, OWN),), keyspace("globex"): named(OTHER)})
        assert keys.lacking == {key_id(OTHER)}
        assert keys.left([keyspace("acme"), keyspace("globex")]).volume == 1

    def test_another_key_in_its_place_ends_the_first(self, tmp_path: Path) -> None:
        keys = KeyFiles(tmp_path)
        keys.write({keyspace("acme"): named(OWN)})
        keys.bring({key_id(OWN): bytearray(OWN)})
        keys.write({keyspace("acme"): named(OTHER)})
        assert keys.lacking == {key_id(OTHER)}
        assert list((tmp_path / KEYS_DIRECTORY).iterdir()) == []
