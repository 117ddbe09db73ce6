"""The policy adapter inside the real LMCache server, in front of a real Redis: isolation, and every way Redis fails.

One server serves all tests of this module, in any order: that it goes on after each failure, without a restart, is what
they check. Each test uses prompts (sequences) of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.store.redis_keys import parse_block_key
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import BOUND_MS, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN, STALE_AFTER_S, GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.redis,
    pytest.mark.claim("whatever happens to Redis, every request is answered, and hits return without a restart"),
]

CHUNKS = 4
PASSWORD = "the password"

_sequences = itertools.count(1)


@dataclass
class Pod:
    """A cache container with all that is around it."""

    server: LMCacheServer
    redis: RedisProcess
    gate: GateStandIn
    password_file: Path

    def start_redis(self, *options: str) -> None:
        self.redis.start("--requirepass", PASSWORD, *options)

    def stored_names(self) -> list[str]:
        """The names of all blocks; the index is left out."""
        names = [name.decode() for name in self.redis.admin(PASSWORD).scan_iter()]
        return [name for name in names if "#" not in name]

    def tier_state(self) -> Any:
        return self.gate.state().tiers[0]

    def count(self, name: str) -> int:
        return self.gate.state().counters.get(f"shared.{name}", 0)

    def until(self, breaker: str) -> None:
        give_up_at_s = time.monotonic() + 120
        while (state := self.tier_state()).breaker != breaker:
            assert time.monotonic() < give_up_at_s, state
            time.sleep(0.02)

    def store(self, sequence: int, salt: str, fill: int) -> None:
        """Store and wait until the tier has as many chunks more, which LMCache writes in the background."""
        before = self.tier_state().stored
        assert self.server.store(sequence, salt, fill)["stored"]
        give_up_at_s = time.monotonic() + 120
        while self.tier_state().stored < before + CHUNKS:
            assert time.monotonic() < give_up_at_s, self.gate.state()
            time.sleep(0.02)

    def read_from_tier(self, sequence: int, salt: str) -> dict[str, Any]:
        """Read with nothing in the server's own memory."""
        self.server.forget_memory()
        return self.server.read(sequence, salt)


@pytest.fixture(scope="module")
def shared_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate = GateStandIn(directory)
    redis = RedisProcess(directory)
    password_file = directory / "password"
    server = start_server(directory, gate, [tier(redis.port, password_file=str(password_file), **PATIENT)])
    pod = Pod(server, redis, gate, password_file)
    yield pod
    redis.kill()


@pytest.fixture
def pod(shared_pod: Pod) -> Iterator[Pod]:
    """The pod with a fresh Redis and a policy that allows two keyspaces."""
    shared_pod.redis.kill()
    shared_pod.password_file.write_text(PASSWORD)
    shared_pod.start_redis()
    shared_pod.until("closed")
    shared_pod.gate.allow(KEYSPACE_A, KEYSPACE_B)
    yield shared_pod
    assert shared_pod.server.get("/status")["is_healthy"]


@pytest.fixture
def sequence() -> int:
    return next(_sequences)


def test_a_server_starts_and_answers_while_its_tier_is_down(shared_pod: Pod, sequence: int) -> None:
    shared_pod.redis.kill()
    shared_pod.gate.allow(KEYSPACE_A)
    assert shared_pod.server.store(sequence, KEYSPACE_A, 1)["stored"]
    own = shared_pod.server.lookup(sequence, KEYSPACE_A)
    assert own["hits"] == CHUNKS, "the server's own memory still answers"
    assert own["ms"] < BOUND_MS
    missing = shared_pod.server.lookup(sequence + 500, KEYSPACE_A)
    assert missing["hits"] == 0
    assert missing["ms"] < BOUND_MS
    assert shared_pod.tier_state().breaker != "closed"


class TestIsolation:
    def test_a_prompt_is_found_in_its_own_keyspace_only(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        assert pod.read_from_tier(sequence, KEYSPACE_A) | {"ms": 0} == {"hits": CHUNKS, "values": [7.0], "ms": 0}
        assert pod.read_from_tier(sequence, KEYSPACE_B)["hits"] == 0

    def test_the_same_prompt_of_two_tenants_keeps_two_contents(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.store(sequence, KEYSPACE_B, 9)
        assert pod.read_from_tier(sequence, KEYSPACE_A)["values"] == [7.0]
        assert pod.read_from_tier(sequence, KEYSPACE_B)["values"] == [9.0]

    def test_every_key_is_one_of_the_contract(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        names = [parse_block_key(name) for name in pod.stored_names()]
        assert len(names) == CHUNKS
        assert {name.keyspace for name in names if name is not None} == {KEYSPACE_A}

    @pytest.mark.parametrize("salt", [KEYSPACE_UNKNOWN, "", "not-a-keyspace"])
    def test_a_keyspace_outside_of_the_policy_reaches_no_tier(self, pod: Pod, sequence: int, salt: str) -> None:
        refused = pod.tier_state().refused
        assert pod.server.store(sequence, salt, 7)["stored"], "the request itself goes on"
        assert pod.read_from_tier(sequence, salt)["hits"] == 0
        assert pod.stored_names() == []
        assert pod.tier_state().refused > refused

    def test_a_removed_keyspace_misses_after_the_acknowledgement(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        assert pod.gate.allow(KEYSPACE_B).revision == pod.gate.revision
        assert pod.read_from_tier(sequence, KEYSPACE_A)["hits"] == 0
        assert len(pod.stored_names()) == CHUNKS, "removed from reach, not yet erased"

    def test_a_stale_pod_reuses_and_stores_nothing(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.gate.write_freshness(age_s=STALE_AFTER_S + 1)
        assert pod.read_from_tier(sequence, KEYSPACE_A)["hits"] == 0
        pod.server.store(sequence + 500, KEYSPACE_A, 7)
        time.sleep(0.3)
        assert len(pod.stored_names()) == CHUNKS
        pod.gate.write_freshness()
        assert pod.read_from_tier(sequence, KEYSPACE_A)["hits"] == CHUNKS


class TestFailures:
    def test_a_tier_that_was_killed_is_a_miss_in_time_and_is_used_again_when_it_is_back(
        self, pod: Pod, sequence: int
    ) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.redis.kill()
        for _ in range(5):
            answer = pod.read_from_tier(sequence, KEYSPACE_A)
            assert answer["hits"] == 0
            assert answer["ms"] < BOUND_MS
        assert pod.server.store(sequence, KEYSPACE_A, 7)["stored"]
        assert pod.server.lookup(sequence, KEYSPACE_A)["hits"] == CHUNKS, "the server's own memory still answers"
        pod.start_redis()
        pod.until("closed")
        pod.store(sequence + 500, KEYSPACE_A, 8)
        assert pod.read_from_tier(sequence + 500, KEYSPACE_A)["values"] == [8.0]

    def test_a_frozen_tier_is_a_miss_in_time_and_its_late_answers_are_never_used(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.store(sequence, KEYSPACE_B, 9)
        pod.redis.freeze()
        for salt in (KEYSPACE_A, KEYSPACE_B) * 3:
            answer = pod.read_from_tier(sequence, salt)
            assert answer["hits"] == 0
            assert answer["ms"] < BOUND_MS
        pod.server.store(sequence + 500, KEYSPACE_B, 3)
        pod.redis.thaw()
        pod.until("closed")
        assert pod.read_from_tier(sequence, KEYSPACE_A)["values"] == [7.0]
        assert pod.read_from_tier(sequence, KEYSPACE_B)["values"] == [9.0]

    def test_a_tier_frozen_while_it_stores_never_holds_another_tenants_bytes(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.redis.freeze()
        errors = pod.count("errors")
        pod.server.store(sequence + 500, KEYSPACE_A, 1)
        until(lambda: pod.count("errors") > errors, pod.gate.state)
        pod.server.forget_memory()
        pod.server.store(sequence + 501, KEYSPACE_B, 2)
        time.sleep(2.5)
        pod.redis.thaw()
        pod.until("closed")
        held = pod.read_from_tier(sequence + 500, KEYSPACE_A)
        assert held.get("values", [1.0]) == [1.0]

    def test_a_tier_without_memory_serves_what_it_has_and_recovers(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        admin, refused = pod.redis.admin(PASSWORD), pod.count("refused_tier_full")
        admin.config_set("maxmemory", 1)
        pod.server.store(sequence + 500, KEYSPACE_A, 8)
        until(lambda: pod.count("refused_tier_full") == refused + CHUNKS, pod.gate.state)
        assert len(pod.stored_names()) == CHUNKS
        assert pod.read_from_tier(sequence, KEYSPACE_A)["values"] == [7.0]
        assert pod.read_from_tier(sequence + 500, KEYSPACE_A)["hits"] == 0
        admin.config_set("maxmemory", 0)
        time.sleep(1)
        pod.store(sequence + 501, KEYSPACE_A, 9)
        assert pod.read_from_tier(sequence + 501, KEYSPACE_A)["values"] == [9.0]

    def test_a_rotated_password_is_named_until_the_file_has_it_too(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.password_file.write_text("the old one")
        pod.redis.kill()
        pod.start_redis()
        give_up_at_s = time.monotonic() + 120
        while "WRONGPASS" not in pod.tier_state().detail:
            assert pod.server.lookup(sequence + 500, KEYSPACE_A)["hits"] == 0
            assert time.monotonic() < give_up_at_s, pod.tier_state()
        pod.password_file.write_text(PASSWORD)
        pod.until("closed")
        pod.store(sequence + 501, KEYSPACE_A, 8)
        assert pod.read_from_tier(sequence + 501, KEYSPACE_A)["values"] == [8.0]

    def test_a_block_that_vanished_is_a_miss_and_the_rest_is_right(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        pod.redis.admin(PASSWORD).delete(*pod.stored_names()[:1])
        answer = pod.read_from_tier(sequence, KEYSPACE_A)
        assert answer["hits"] < CHUNKS
        assert answer.get("values", [7.0]) == [7.0]

    def test_a_block_of_another_length_is_a_miss(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        for name in pod.stored_names():
            pod.redis.admin(PASSWORD).append(name, b"x")
        answer = pod.read_from_tier(sequence, KEYSPACE_A)
        assert answer["hits"] == 0

    def test_a_block_under_another_name_is_a_miss(self, pod: Pod, sequence: int) -> None:
        pod.store(sequence, KEYSPACE_A, 7)
        admin = pod.redis.admin(PASSWORD)
        for name in pod.stored_names():
            admin.copy(name, name.replace(KEYSPACE_A, KEYSPACE_B))
        assert pod.read_from_tier(sequence, KEYSPACE_B)["hits"] == 0


def test_the_configuration_endpoint_shows_no_secret(pod: Pod) -> None:
    assert PASSWORD not in str(pod.server.get("/config"))
    assert str(pod.password_file) in str(pod.server.get("/config"))
    assert PASSWORD not in pod.server.log_file.read_text()
