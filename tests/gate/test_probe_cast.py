"""Roles of an isolation probe: who stores, who looks, and which pools are looked in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.control.probe import Cast, Reader, cast

from .world import entry, keyspace


def bundle(*entries: Entry, reuse: str = "Prefix", **pools: PoolShard) -> Bundle:
    root = Root("d" * 16, "tiny", "uid", 1, 1, Rules(reuse=reuse), ())  # type: ignore[arg-type]
    return Bundle(root, {one.tenant: one for one in entries}, pools)


def member(tenant: str, group: str, **fields: Any) -> Entry:
    return replace(entry(tenant, group, **fields), scope=Scope(ScopeKind.GROUP, group))


def limited(tenant: str, *limits: int | None) -> Entry:
    rows = tuple(EnforcedBudget(f"tier-{n}", limit_bytes=limit) for n, limit in enumerate(limits))
    return entry(tenant, budgets=rows)


def pool(name: str, versions: int = 1) -> PoolShard:
    made = (
        PoolVersion(keyspace(f"{name}-{n}"), "r", PoolState.PUBLISHED, pack_hashes([bytes(32)]), ("shared",))
        for n in range(versions)
    )
    return PoolShard(name, f"uid-{name}", tuple(made))


def first(below: int) -> int:
    assert below > 0
    return 0


def last(below: int) -> int:
    assert below > 0
    return below - 1


def played(made: Bundle, readers: int = 8, below: Callable[[int], int] = first) -> Cast:
    found = cast(made, readers, below)
    assert found is not None
    return found


def test_nobody_plays_where_nothing_is_reused() -> None:
    assert cast(bundle(entry("a"), entry("b"), reuse="Disabled"), 8, first) is None
    assert cast(bundle(entry("a", suspended=True)), 8, first) is None
    assert cast(bundle(), 8, first) is None


def test_one_scope_stores_and_all_others_look() -> None:
    made = bundle(entry("a"), entry("b"), entry("c"), entry("d", suspended=True))
    assert played(made) == Cast(3, "Tenant/a", "a", "a", (Reader("Tenant/b", "b"), Reader("Tenant/c", "c")))
    assert played(made, below=last) == Cast(3, "Tenant/c", "c", "c", (Reader("Tenant/a", "a"), Reader("Tenant/b", "b")))


@pytest.mark.parametrize("readers", [0, 1, 2, 3])
def test_no_more_scopes_look_than_were_asked_for(readers: int) -> None:
    made = bundle(*(entry(name) for name in "abcd"))
    assert len(played(made, readers).readers) == readers
    assert played(made, readers).scopes == 4


def test_the_control_is_another_tenant_of_the_scope_that_stores() -> None:
    made = bundle(member("ann", "lab"), member("bob", "lab"), member("cid", "lab"))
    assert played(made) == Cast(1, "Group/lab", "ann", "bob", ())
    assert played(made, below=last) == Cast(1, "Group/lab", "cid", "bob", ())


def test_a_reader_is_any_tenant_of_its_scope() -> None:
    made = bundle(entry("a"), member("ann", "lab"), member("bob", "lab"))
    assert played(made).readers == (Reader("Group/lab", "ann"),)
    draws = iter([0, 0, 0, 1, 0])
    assert played(made, below=lambda below: next(draws)).readers == (Reader("Group/lab", "bob"),)


@pytest.mark.parametrize(
    ("others", "writer"),
    [
        ([limited("b", None)], "b"),
        ([limited("b")], "b"),
        ([limited("b", 200)], "b"),
        ([limited("b", 50)], "a"),
        ([limited("b", 1000, 50)], "a"),
        ([limited("b", 0)], "a"),
        ([limited("b", 0, 1000)], "a"),
        ([limited("b", 50), limited("c", 0)], "a"),
    ],
    ids=[
        "no limit",
        "no budget",
        "more room",
        "less room",
        "less room somewhere",
        "kept off",
        "kept off a tier",
        "both",
    ],
)
def test_the_scope_that_loses_least_stores(others: list[Entry], writer: str) -> None:
    assert played(bundle(limited("a", 100), *others)).writer == writer
    assert played(bundle(*others, limited("a", 100))).writer == writer


def test_a_scope_kept_off_fewer_tiers_stores_however_tight_its_limit_is() -> None:
    made = bundle(limited("a", 0, 0), limited("b", 0, 1))
    assert played(made).writer == "b"


def test_a_group_loses_by_the_tightest_of_its_members() -> None:
    tight = replace(member("ann", "lab"), budgets=(EnforcedBudget("t", limit_bytes=10),))
    assert played(bundle(tight, member("bob", "lab"), limited("c", 100))).writer == "c"


class TestOneKeyspaceForTwoScopes:
    def test_they_play_against_each_other_whoever_is_drawn(self) -> None:
        many = [entry(f"t{n}") for n in range(20)]
        for readers, below in ((0, first), (1, first), (1, last), (8, last)):
            made = played(bundle(*many, entry("twin", "t7")), readers, below)
            assert made.clashes
            assert {made.scope, made.readers[0].scope} == {"Tenant/t7", "Tenant/twin"}
            assert len(made.readers) == max(1, readers)
            assert len({reader.scope for reader in made.readers} | {made.scope}) == len(made.readers) + 1

    def test_a_better_writer_than_they_are_only_looks(self) -> None:
        made = played(bundle(limited("free"), replace(limited("a", 5), keyspace=keyspace("same")), entry("b", "same")))
        assert (made.scope, made.readers[0].scope, made.readers[1].scope) == ("Tenant/b", "Tenant/a", "Tenant/free")

    def test_members_of_one_scope_do_not_clash(self) -> None:
        assert not played(bundle(member("ann", "lab"), member("bob", "lab"), entry("c"))).clashes

    def test_a_suspended_twin_does_not_clash(self) -> None:
        assert not played(bundle(entry("a", "same"), entry("b", "same", suspended=True))).clashes


class TestPools:
    def test_two_keyspaces_of_pools_that_the_writer_may_not_read_are_looked_in(self) -> None:
        own = entry("a", pools=("mine",))
        made = played(bundle(own, mine=pool("mine"), other=pool("other", 2), third=pool("third")))
        expected = tuple(Reader("Pool/other", keyspace=keyspace(f"other-{n}")) for n in range(2))
        assert made.readers == expected

    def test_pools_come_after_tenants_and_beside_their_number(self) -> None:
        made = played(bundle(entry("a"), entry("b"), entry("c"), docs=pool("docs")), 1)
        assert [reader.scope for reader in made.readers] == ["Tenant/b", "Pool/docs"]
