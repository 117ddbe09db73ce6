"""Permits, freshness and the acknowledgement that waits for I/O."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import FRESHNESS_FORMAT, CacheView
from kvstrata_sidecar.adapter.policy.enforcement import NANOSECONDS, Enforcement, FreshnessFile, Permit, Refusal
from kvstrata_sidecar.adapter.policy.limits import bounds_in
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B

STALE_AFTER_S = 300


class Node:
    """A node's clock and the last quorum read, in nanoseconds."""

    now_ns = 10_000 * NANOSECONDS
    sent_ns = 10_000 * NANOSECONDS

    def read(self, *, reopen: bool = False) -> int:
        return self.sent_ns


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def enforcement(node: Node) -> Enforcement:
    return Enforcement(DOMAIN, node.read, lambda: node.now_ns)


def view(*keyspaces: str, revision: int = 1, term: int = 1, on_stale: str = "Fence", domain: str = DOMAIN) -> CacheView:
    rules = Rules(stale_after_s=STALE_AFTER_S, on_stale=on_stale)
    return CacheView(domain, revision, term, rules, dict.fromkeys(keyspaces, ()))


def do_nothing() -> None:
    pass


def enter(enforcement: Enforcement, keyspace: str) -> Permit:
    permit = enforcement.enter(keyspace, do_nothing)
    assert isinstance(permit, Permit)
    return permit


def test_without_a_policy_nothing_is_permitted(enforcement: Enforcement) -> None:
    assert enforcement.enter(KEYSPACE_A, do_nothing) is Refusal.NO_POLICY


@pytest.mark.parametrize("keyspace", ["", "a", "A" * 32, "a" * 33, "z" * 32, "a" * 31 + "\n", "*" * 32])
def test_a_malformed_keyspace_is_never_permitted(enforcement: Enforcement, keyspace: str) -> None:
    enforcement.apply(view(KEYSPACE_A, keyspace))
    assert enforcement.enter(keyspace, do_nothing) is Refusal.MALFORMED_KEYSPACE


def test_only_keyspaces_of_the_view_are_permitted(enforcement: Enforcement) -> None:
    enforcement.apply(view(KEYSPACE_A))
    enter(enforcement, KEYSPACE_A)
    assert enforcement.enter(KEYSPACE_B, do_nothing) is Refusal.UNKNOWN_KEYSPACE


@pytest.mark.parametrize(("age_s", "allowed"), [(0, True), (STALE_AFTER_S, True), (STALE_AFTER_S + 1, False)])
def test_a_stale_view_permits_nothing(enforcement: Enforcement, node: Node, age_s: int, allowed: bool) -> None:
    enforcement.apply(view(KEYSPACE_A))
    node.sent_ns = node.now_ns - age_s * NANOSECONDS
    assert enforcement.fresh() is allowed
    assert isinstance(enforcement.enter(KEYSPACE_A, do_nothing), Permit) is allowed


def test_a_stale_view_serves_on_where_the_policy_says_so(enforcement: Enforcement, node: Node) -> None:
    enforcement.apply(view(KEYSPACE_A, on_stale="ServeStale"))
    node.sent_ns = 0
    enter(enforcement, KEYSPACE_A)
    assert not enforcement.fresh()


@pytest.mark.parametrize("sent_ns", [0, Node.now_ns + 1])
def test_a_read_that_never_was_or_will_be_proves_nothing(enforcement: Enforcement, node: Node, sent_ns: int) -> None:
    enforcement.apply(view(KEYSPACE_A))
    node.sent_ns = sent_ns
    assert enforcement.enter(KEYSPACE_A, do_nothing) is Refusal.STALE


@pytest.mark.parametrize("late", [view(KEYSPACE_B, revision=4), view(KEYSPACE_B, revision=6, term=2)])
def test_an_older_revision_or_term_is_refused_and_changes_nothing(enforcement: Enforcement, late: CacheView) -> None:
    enforcement.apply(view(KEYSPACE_A, revision=5, term=3))
    with pytest.raises(ContractError, match="older"):
        enforcement.apply(late)
    enter(enforcement, KEYSPACE_A)


def test_another_domains_view_is_refused(enforcement: Enforcement) -> None:
    with pytest.raises(ContractError, match="another domain"):
        enforcement.apply(view(KEYSPACE_A, domain="e" * 16))


def test_the_same_revision_can_be_applied_again(enforcement: Enforcement) -> None:
    enforcement.apply(view(KEYSPACE_A))
    enforcement.apply(view(KEYSPACE_A))
    assert enforcement.settle(grace_s=0, timeout_s=0)


def test_a_removed_keyspace_settles_only_when_its_io_has_ended(enforcement: Enforcement) -> None:
    enforcement.apply(view(KEYSPACE_A, KEYSPACE_B))
    removed, kept = enter(enforcement, KEYSPACE_A), enter(enforcement, KEYSPACE_B)
    enforcement.apply(view(KEYSPACE_B, revision=2))
    assert enforcement.enter(KEYSPACE_A, do_nothing) is Refusal.UNKNOWN_KEYSPACE
    assert not enforcement.settle(grace_s=0.01, timeout_s=0.01)
    settled = threading.Event()
    threading.Thread(target=lambda: enforcement.settle(grace_s=60, timeout_s=0) and settled.set(), daemon=True).start()
    assert not settled.wait(0.2)
    removed.release()
    assert settled.wait(30), "as soon as it ended"
    kept.release()


def test_io_that_outlives_the_grace_is_aborted(enforcement: Enforcement) -> None:
    enforcement.apply(view(KEYSPACE_A))
    aborted = threading.Event()
    permit = enforcement.enter(KEYSPACE_A, aborted.set)
    assert isinstance(permit, Permit)
    enforcement.apply(view(revision=2))

    def end_when_aborted() -> None:
        aborted.wait()
        permit.release()

    threading.Thread(target=end_when_aborted, daemon=True).start()
    assert enforcement.settle(grace_s=0.05, timeout_s=60)
    assert aborted.is_set()


def test_io_on_kept_keyspaces_delays_nothing(enforcement: Enforcement) -> None:
    enforcement.apply(view(KEYSPACE_A, KEYSPACE_B))
    enter(enforcement, KEYSPACE_B)
    enforcement.apply(view(KEYSPACE_B, revision=2))
    assert enforcement.settle(grace_s=0, timeout_s=0)


def test_retention_is_that_of_the_keyspace_in_the_tier(enforcement: Enforcement) -> None:
    budgets = (EnforcedBudget("fast", retention_s=60), EnforcedBudget("slow", limit_bytes=1))
    enforcement.apply(CacheView(DOMAIN, 1, 1, Rules(), {KEYSPACE_A: budgets, KEYSPACE_B: ()}))
    in_force = enforcement.view
    assert in_force is not None
    assert bounds_in(in_force.keyspaces[KEYSPACE_A], "fast").retention_s == 60
    assert bounds_in(in_force.keyspaces[KEYSPACE_A], "slow").retention_s is None
    assert bounds_in(in_force.keyspaces[KEYSPACE_B], "fast").retention_s is None


class TestFreshnessFile:
    def test_it_is_read_as_the_gate_writes_it(self, tmp_path: Path) -> None:
        path = tmp_path / "freshness"
        file = FreshnessFile(path)
        assert file.sent_ns() == 0
        path.write_bytes(FRESHNESS_FORMAT.pack(7))
        assert file.sent_ns() == 7
        with path.open("r+b") as handle:
            handle.write(FRESHNESS_FORMAT.pack(8))
        assert file.sent_ns() == 8

    def test_a_file_that_was_replaced_is_found_again(self, tmp_path: Path) -> None:
        path = tmp_path / "freshness"
        path.write_bytes(FRESHNESS_FORMAT.pack(7))
        file = FreshnessFile(path)
        assert file.sent_ns() == 7
        path.unlink()
        path.write_bytes(FRESHNESS_FORMAT.pack(9))
        assert file.sent_ns(reopen=True) == 9

    @pytest.mark.parametrize("content", [b"", b"1234567"])
    def test_a_truncated_file_is_no_freshness_and_no_crash(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "freshness"
        path.write_bytes(FRESHNESS_FORMAT.pack(7))
        file = FreshnessFile(path)
        assert file.sent_ns() == 7
        path.write_bytes(content)
        assert file.sent_ns() == 0


class TestTiersThatAScopeIsKeptOff:
    """A tier is closed to a keyspace by its row; what puts the tier in order names none, and may go on."""

    def closed(self, *tiers: str, revision: int = 1) -> CacheView:
        rows = tuple(EnforcedBudget.denying(name) for name in tiers)
        return replace(view(revision=revision), keyspaces={KEYSPACE_A: rows, KEYSPACE_B: ()})

    def test_only_the_tier_is_refused_and_only_to_the_scope(self, enforcement: Enforcement) -> None:
        enforcement.apply(self.closed("fast"))
        assert enforcement.enter(KEYSPACE_A, do_nothing, tier="fast") is Refusal.NOT_ALLOWED
        for keyspace, tier in ((KEYSPACE_A, "slow"), (KEYSPACE_A, None), (KEYSPACE_B, "fast")):
            assert isinstance(enforcement.enter(keyspace, do_nothing, tier=tier), Permit)
        assert enforcement.denies(KEYSPACE_A, "fast")
        assert not enforcement.denies(KEYSPACE_A, "slow")

    def test_a_limit_of_nothing_refuses_no_question(self, enforcement: Enforcement) -> None:
        row = EnforcedBudget("fast", limit_bytes=0)
        enforcement.apply(replace(view(), keyspaces={KEYSPACE_A: (row,)}))
        assert isinstance(enforcement.enter(KEYSPACE_A, do_nothing, tier="fast"), Permit)

    def test_io_in_a_tier_that_is_closed_ends_before_the_acknowledgement(self, enforcement: Enforcement) -> None:
        enforcement.apply(self.closed())
        aborted = threading.Event()
        there = enforcement.enter(KEYSPACE_A, aborted.set, tier="fast")
        for keyspace, tier in ((KEYSPACE_A, "slow"), (KEYSPACE_A, None), (KEYSPACE_B, "fast")):
            assert isinstance(enforcement.enter(keyspace, do_nothing, tier=tier), Permit)
        enforcement.apply(self.closed("fast", revision=2))
        assert not enforcement.settle(grace_s=0.01, timeout_s=0.01)
        assert aborted.is_set()
        assert isinstance(there, Permit)
        there.release()
        assert enforcement.settle(grace_s=0, timeout_s=0)
