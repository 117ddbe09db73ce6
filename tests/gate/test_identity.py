"""Reuse waits until engine and cache server agree on the fingerprint of what the engine runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, NO_FINGERPRINT, EngineIdentity
from kvstrata.contract.policy.bundle import Rules
from kvstrata_sidecar.gate.policy.identity import NOT_REPORTED, ResolvedIdentity
from tests.tiers.gate_stand_in import FINGERPRINT

from .world import ACME, World, chat, entry, keyspace, post, until

OTHER = "9" * 16


def write(directory: Path, report: EngineIdentity | bytes) -> None:
    written = directory / "written"
    written.write_bytes(report if isinstance(report, bytes) else report.encode())
    written.replace(directory / IDENTITY_FILE)


@pytest.fixture
def identity(tmp_path: Path) -> ResolvedIdentity:
    return ResolvedIdentity(tmp_path / IDENTITY_FILE)


def test_nothing_is_resolved_before_both_have_reported_the_same(identity: ResolvedIdentity, tmp_path: Path) -> None:
    assert (identity.read(), identity.problem) == (False, NOT_REPORTED)
    identity.cache_reports([FINGERPRINT])
    assert identity.withheld == NO_FINGERPRINT
    write(tmp_path, EngineIdentity(FINGERPRINT))
    assert identity.read()
    assert (identity.fingerprint, identity.withheld, identity.problem) == (FINGERPRINT, "", "")
    assert not identity.read(), "unchanged"


@pytest.mark.parametrize(
    ("cache", "resolved"), [([], True), ([OTHER], False), ([OTHER, FINGERPRINT], True)], ids=["away", "other", "both"]
)
def test_a_cache_server_that_starts_anew_keeps_the_agreement_and_another_fingerprint_ends_it(
    identity: ResolvedIdentity, tmp_path: Path, cache: Sequence[str], resolved: bool
) -> None:
    write(tmp_path, EngineIdentity(FINGERPRINT))
    identity.read()
    identity.cache_reports([FINGERPRINT])
    identity.cache_reports(cache)
    assert bool(identity.fingerprint) is resolved


def test_an_engine_that_starts_with_another_fingerprint_needs_a_new_agreement(
    identity: ResolvedIdentity, tmp_path: Path
) -> None:
    write(tmp_path, EngineIdentity(FINGERPRINT))
    identity.read()
    identity.cache_reports([FINGERPRINT])
    write(tmp_path, EngineIdentity(OTHER))
    assert identity.read()
    assert FINGERPRINT in identity.problem
    assert OTHER in identity.problem
    identity.cache_reports([])
    assert not identity.fingerprint
    identity.cache_reports([OTHER])
    assert identity.fingerprint == OTHER


@pytest.mark.parametrize("report", [b"{}", b"junk", EngineIdentity(problem="OSError: no weights"), b"x" * 99_999])
def test_a_report_without_a_fingerprint_resolves_nothing(
    identity: ResolvedIdentity, tmp_path: Path, report: EngineIdentity | bytes
) -> None:
    write(tmp_path, report)
    identity.read()
    identity.cache_reports([FINGERPRINT])
    assert not identity.fingerprint
    assert identity.problem


def test_a_link_in_place_of_the_report_is_not_followed(identity: ResolvedIdentity, tmp_path: Path) -> None:
    write(tmp_path, EngineIdentity(FINGERPRINT))
    (tmp_path / IDENTITY_FILE).rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / IDENTITY_FILE)
    identity.read()
    assert not identity.engine.fingerprint


async def salt_of_a_request(world: World) -> str:
    answer = await world.ask(post("/v1/chat/completions", chat()))
    assert answer.status == 200
    return str(world.engine.requests[-1].json["cache_salt"])


async def test_a_pod_without_a_fingerprint_serves_without_reuse_and_reports_the_reason(world: World) -> None:
    world.report_identity(EngineIdentity(problem="OSError: no weights"))
    await world.publish([entry("acme")], Rules())
    await world.publish_keys(acme=ACME)
    async with world.started():
        await until(lambda: not world.gate.not_ready())
        assert await salt_of_a_request(world) != keyspace("acme")
        state = world.gate.state()
        assert (state.fingerprint, state.unresolved) == ("", "OSError: no weights")
        world.report_identity(EngineIdentity(FINGERPRINT, {"vllm": "2"}))
        await until(lambda: world.gate.state().fingerprint == FINGERPRINT)
        assert await salt_of_a_request(world) == keyspace("acme")
        assert world.gate.state().facts == {"vllm": "2"}
        world.adapter.fingerprints = (OTHER,)
        await until(lambda: not world.gate.state().fingerprint)
        assert await salt_of_a_request(world) != keyspace("acme")
        assert OTHER in world.gate.state().unresolved
