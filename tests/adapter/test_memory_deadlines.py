"""When scopes are due: always what a list of all moments would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.index import Deadlines

moments = st.one_of(st.none(), st.integers(0, 20).map(float))
plans = st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), moments), st.integers(0, 20)), max_size=300)


@given(plans)
def test_what_is_due_is_what_was_planned_last(steps: list[tuple[str, float | None] | int]) -> None:
    deadlines, planned = Deadlines(), dict[str, float]()
    for step in steps:
        if isinstance(step, int):
            due = {keyspace for keyspace, moment_s in planned.items() if moment_s <= step}
            assert deadlines.due(float(step)) == due
            planned = {keyspace: moment_s for keyspace, moment_s in planned.items() if keyspace not in due}
        else:
            keyspace, moment_s = step
            deadlines.plan(keyspace, moment_s)
            planned.pop(keyspace, None)
            if moment_s is not None:
                planned[keyspace] = moment_s
        assert deadlines.next_s() == min(planned.values(), default=None)
