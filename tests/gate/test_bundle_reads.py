"""When the bundle is read: after the watch rang, after failures, and several times within its staleness."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Root, Rules
from kvstrata_sidecar.gate.policy import bundle_watch
from kvstrata_sidecar.gate.policy.bundle_watch import BundleWatch
from kvstrata_sidecar.gate.policy.enforcement import Freshness
from kvstrata_sidecar.gate.policy.kube_api import ApiError

ROOT = Root("d" * 16, "tiny", "uid", 3, 1, Rules(), ())


class Over(Exception):  # noqa: N818  (the end of a script is no fault)
    """The scripted API server has nothing more to say."""


class Api:
    """Answers reads with `root`, or an error, and watches by a script: events, or an error, for each watch."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.watched: list[tuple[str, str, int]] = []
        self.root: Root | Exception | None = ROOT
        self.version = "7"

    async def get_secret(self, name: str) -> dict[str, Any] | None:
        if isinstance(self.root, Exception):
            raise self.root
        if self.root is None or name != "root":
            return None
        data = {ROOT_DATA_KEY: base64.b64encode(self.root.encode()).decode()}
        return {"metadata": {"name": name, "resourceVersion": self.version}, "data": data}

    async def watch_secret(self, name: str, version: str, seconds: int) -> AsyncIterator[dict[str, Any]]:
        self.watched.append((name, version, seconds))
        if not self.script:
            raise Over
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        for event in said:
            yield event


class Enforced:
    """What is put in force, which these tests only note."""

    def __init__(self) -> None:
        self.confirmed = self.lost = 0

    def confirm(self, sent_ns: int) -> None:
        self.confirmed += 1

    def lose(self) -> None:
        self.lost += 1

    def apply(self, bundle: Any) -> None:
        """Take it."""


def watch_of(api: Api, jitter: float = 1.0) -> BundleWatch:
    made: Any = BundleWatch(
        api, Enforced(), Freshness(), root_name="root", model="tiny", jitter=lambda: jitter,  # type: ignore[arg-type]
    )  # fmt: skip
    return made  # type: ignore[no-any-return]


def event(kind: str, version: str = "8") -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"resourceVersion": version}}}


async def watched(watch: BundleWatch, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let a watch follow its script to the end; return how long it paused each time."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(Over):
        await watch.watch()
    return pauses


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
async def test_another_version_rings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(Api([event(kind)]))
    await watched(watch, monkeypatch)
    assert watch._doorbell.is_set()


async def test_a_bookmark_and_the_version_that_was_read_do_not_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api([event("BOOKMARK"), event("MODIFIED", "7")])
    watch = watch_of(api)
    await watch.refresh()
    await watched(watch, monkeypatch)
    assert not watch._doorbell.is_set()
    assert api.watched[0] == ("root", "7", 300)


async def test_a_watch_begins_at_what_was_read_and_anew_where_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(ApiError(410, "gone"), ApiError(500, "no"))
    watch = watch_of(api)
    await watched(watch, monkeypatch)
    assert [version for _, version, _ in api.watched] == ["", "", ""]
    api.script, api.watched = [ApiError(500, "no"), ApiError(410, "gone")], []
    await watch.refresh()
    await watched(watch, monkeypatch)
    assert [version for _, version, _ in api.watched] == ["7", "7", ""]


@pytest.mark.parametrize("error", [ApiError(500, "no"), OSError(), TimeoutError(), EOFError(), ValueError()])
async def test_pauses_grow_with_failures_and_are_short_after_an_event(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(*[error] * 6, [event("MODIFIED")], error, [])
    assert await watched(watch_of(api), monkeypatch) == [2, 4, 8, 16, 30, 30, 1, 2, 2]
    assert await watched(watch_of(Api([], error), jitter=0.0), monkeypatch) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("stale_after_s", "period_s"), [(1, 1.0), (6, 1.0), (12, 2.0), (60, 10.0), (180, 30.0), (3600, 30.0)]
)
async def test_a_bundle_is_read_six_times_within_its_staleness(stale_after_s: int, period_s: float) -> None:
    api = Api()
    api.root = replace(ROOT, rules=Rules(stale_after_s=stale_after_s))
    often, seldom = watch_of(api, jitter=0.0), watch_of(api, jitter=1.0)
    for watch in (often, seldom):
        assert watch.pause_s() == (0.75 if watch is often else 1.0)
        assert await watch.refresh()
    assert (often.pause_s(), seldom.pause_s()) == (0.75 * period_s, period_s)


async def test_after_failures_it_is_read_sooner_and_then_as_before() -> None:
    api, enforced = Api(), Enforced()
    watch = watch_of(api)
    watch.enforcement = enforced  # type: ignore[assignment]
    api.root = replace(ROOT, rules=Rules(stale_after_s=120))
    await watch.refresh()
    good, api.root = api.root, None
    pauses = []
    for _ in range(7):
        assert not await watch.refresh()
        pauses.append(watch.pause_s())
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert watch.problem == "the bundle Secret root does not exist"
    assert (enforced.confirmed, enforced.lost) == (1, 7)
    api.root = good
    assert await watch.refresh()
    assert (watch.pause_s(), watch.problem, enforced.confirmed) == (20.0, "", 2)


@pytest.mark.parametrize("error", [OSError("x"), TimeoutError(), EOFError(), ApiError(500, "x"), ValueError("x")])
async def test_a_read_that_fails_confirms_nothing_and_is_told(error: Exception) -> None:
    api = Api()
    watch = watch_of(api)
    api.root = error
    assert not await watch.refresh()
    assert watch.problem == (str(error) or type(error).__name__)
    assert watch.enforcement.confirmed == 0  # type: ignore[attr-defined]


async def test_a_bundle_of_another_model_or_an_older_one_is_not_adopted() -> None:
    api = Api()
    watch = watch_of(api)
    assert await watch.refresh()
    for root, problem in (
        (replace(ROOT, model="other"), "the bundle belongs to the model 'other'"),
        (replace(ROOT, revision=2), "the bundle went back: read revision 2 of term 1, holding revision 3 of term 1"),
        (replace(ROOT, revision=4, term=0), "the bundle went back: read revision 4 of term 0, holding revision 3"),
    ):
        api.root = root
        assert not await watch.refresh()
        assert watch.problem.startswith(problem)
    api.root = replace(ROOT, revision=4)
    assert await watch.refresh()
    assert watch.seen == 4


async def test_what_this_pod_enforced_before_it_started_is_a_floor() -> None:
    api = Api()
    for floor, adopted in (((3, 1), True), ((4, 1), False), ((3, 2), False), ((0, 0), True)):
        watch = BundleWatch(
            api, Enforced(), Freshness(), root_name="root", model="tiny", floor=floor,  # type: ignore[arg-type]
        )  # fmt: skip
        assert await watch.refresh() is adopted
        assert watch.seen == (3 if adopted else 0)


def test_the_constants_are_those_that_these_tests_expect() -> None:
    assert (bundle_watch._WATCH_S, bundle_watch._READS_PER_STALENESS) == (300, 6)
