"""Documents of the contract, generated."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import EnforcedBudget, Entry, Root, Rules, ShardRef
from kvstrata.contract.policy.keyspace import Scope, ScopeKind

counts = st.integers(min_value=0, max_value=2**53)
hex32 = st.binary(min_size=16, max_size=16).map(bytes.hex)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
limits = st.builds(EnforcedBudget, names, st.none() | counts, st.none() | counts, st.none() | counts)
budgets = limits | st.builds(EnforcedBudget.denying, names, st.none() | counts)
scopes = st.builds(Scope, st.sampled_from(ScopeKind), names)
entries = st.builds(Entry, names, hex32, scopes, names, counts, st.booleans(), st.lists(budgets, max_size=3).map(tuple))
rules = st.builds(
    Rules,
    counts,
    counts,
    st.sampled_from(["Fence", "ServeStale"]),
    st.sampled_from(["NoReuse", "Refuse"]),
    st.sampled_from(["Prefix", "Disabled"]),
)
shard_lists = st.lists(st.tuples(st.sampled_from("ab"), hex32), max_size=5).map(
    lambda slots: tuple(ShardRef(index, slot, digest) for index, (slot, digest) in enumerate(slots))
)
roots = st.builds(Root, hex32, names, names, counts, counts, rules, shard_lists, counts)

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
