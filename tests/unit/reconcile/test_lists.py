"""Lists of the watches go into the store by pages; kopf sees them empty, and takes the watches on from their end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
import yaml
from aiohttp import web
from kopf._cogs.clients import errors, watching
from kopf._core.reactor import queueing
from yarl import URL

from kvstrata.clients.resources import BY_KIND
from kvstrata.reconcile import watch
from kvstrata.reconcile.metrics import WATCH_FAILING
from kvstrata.reconcile.watch import Lists, build_settings
from tests.support.virtual_time import in_virtual_time

POLICY, SECRET = BY_KIND["TenantCachePolicy"], BY_KIND["Secret"]
POLICIES, SECRETS = POLICY.path("team"), SECRET.path("team")


class Taker:
    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.anew = 0
        self.lists = Lists((POLICY, SECRET), ("team",), self.take, self.relisted)

    def take(self, raw: dict[str, Any]) -> None:
        self.taken.append((raw["kind"], raw["metadata"]["name"]))

    def relisted(self) -> None:
        self.anew += 1


def page(*names: str, more: bool = False) -> dict[str, Any]:
    items = [{"metadata": {"name": name}} for name in names]
    return {"metadata": {"resourceVersion": "7", "continue": "more" if more else ""}, "items": items}


def test_the_objects_of_a_page_are_taken_with_their_kind_and_kopf_sees_none() -> None:
    taker, body = Taker(), page("a", "b")
    taker.lists.page(POLICIES, True, body)
    assert taker.taken == [("TenantCachePolicy", "a"), ("TenantCachePolicy", "b")]
    assert body == {"metadata": {"resourceVersion": "7", "continue": ""}, "items": []}


def test_lists_are_complete_when_the_last_page_of_the_last_list_was_taken() -> None:
    taker = Taker()
    taker.lists.page(POLICIES, True, page("a", more=True))
    taker.lists.page(SECRETS, True, {"metadata": {}, "items": None})
    assert not taker.lists.complete.is_set()
    taker.lists.page(POLICIES, False, page("b"))
    assert taker.lists.complete.is_set()


def test_a_list_that_begins_again_is_told_and_its_further_pages_are_not() -> None:
    taker = Taker()
    taker.lists.page(POLICIES, True, page("a", more=True))
    taker.lists.page(POLICIES, False, page("b", more=True))
    assert taker.anew == 0
    taker.lists.page(POLICIES, True, page("a", more=True))
    assert taker.anew == 1


def test_what_nobody_asked_for_is_left_alone() -> None:
    taker, body = Taker(), page("a")
    taker.lists.page("/api/v1/namespaces", True, body)
    taker.lists.page(POLICY.path("other"), True, body)
    assert taker.taken == []
    assert [item["metadata"]["name"] for item in body["items"]] == ["a"]


@pytest.mark.parametrize("item", [None, 3, {}, {"metadata": None}, {"metadata": {"namespace": "team"}}])
def test_an_object_that_cannot_be_read_is_reported_and_the_others_are_taken(
    item: Any, caplog: pytest.LogCaptureFixture
) -> None:
    taker, body = Taker(), page("a")
    body["items"].insert(0, item)
    taker.lists.page(POLICIES, True, body)
    assert taker.taken == [("TenantCachePolicy", "a")]
    assert body["items"] == [], "kopf would end by it"
    (reported,) = caplog.records
    assert (reported.levelno, reported.kind) == (logging.ERROR, "TenantCachePolicy")  # type: ignore[attr-defined]
    named = isinstance(item, dict) and item.get("metadata")
    assert reported.object == ("team/None" if named else "")  # type: ignore[attr-defined]


class Resource:
    """A resource as kopf knows it."""

    def __init__(self, kind: str) -> None:
        self.plural = BY_KIND[kind].plural
        self._kind = kind

    def get_url(self, *, namespace: str) -> str:
        """The path of its collection."""
        return BY_KIND[self._kind].path(namespace)


def event(name: str, kind: str = "MODIFIED") -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"name": name, "uid": f"uid-{name}", "namespace": "team"}}}


MALFORMED: list[Exception | dict[str, Any]] = [
    json.JSONDecodeError("Expecting value", "<html>", 0),
    watching.WatchingError("Error in the watch-stream: {'code': 500}"),
    errors.APIClientError("no", status=422, headers={}),
    KeyError("metadata"),
    {"type": "MODIFIED", "object": {"metadata": {"name": "no-uid"}}},
    {"type": "MODIFIED", "object": {"metadata": {"name": "odd", "uid": {}}}},
    {"type": "MODIFIED", "object": None},
]


class Streams:
    """Stands in for kopf's watch: each call gives the next script, then is silent."""

    def __init__(self, *scripts: tuple[Exception | dict[str, Any], ...]) -> None:
        self.scripts = list(scripts)
        self.begun: list[float] = []

    async def __call__(self, **_: Any) -> AsyncIterator[Any]:
        """One watch with its list."""
        self.begun.append(asyncio.get_running_loop().time())
        yield watching.Bookmark.LISTED
        for one in self.scripts.pop(0) if self.scripts else ():
            if isinstance(one, Exception):
                raise one
            yield one
        await asyncio.sleep(3600)


def watched(monkeypatch: pytest.MonkeyPatch, lists: Lists, streams: Streams, kind: str = "TenantCachePolicy") -> Any:
    """Events of a watch that goes on, with a task that collects them."""
    monkeypatch.setattr(watch, "KOPFS_WATCH", streams)
    found: list[Any] = []

    async def collect() -> None:
        async for one in lists.watch(resource=Resource(kind), namespace="team"):  # type: ignore[arg-type]
            if not isinstance(one, watching.Bookmark):
                found.append(one["object"]["metadata"]["name"])

    return found, asyncio.create_task(collect())


@pytest.mark.parametrize("malformed", MALFORMED, ids=repr)
def test_a_watch_that_cannot_be_read_is_reported_and_lists_again(
    malformed: Exception | dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @in_virtual_time
    async def goes_on() -> None:
        WATCH_FAILING.clear()
        taker = Taker()
        found, task = watched(monkeypatch, taker.lists, Streams((event("a"), malformed, event("lost")), (event("b"),)))
        await asyncio.sleep(0.5)
        assert WATCH_FAILING.labels("team", POLICY.plural)._value.get() == 1
        taker.lists.page(POLICIES, True, page())
        await taker.lists.note_failures(answered_by(POLICIES), succeed)
        assert WATCH_FAILING.labels("team", POLICY.plural)._value.get() == 0
        await asyncio.sleep(1)
        assert found == ["a", "b"]
        assert not task.done()
        task.cancel()

    goes_on()
    (reported,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert "in namespace team cannot be read" in reported.getMessage()


def test_a_watch_that_is_never_read_lists_again_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    @in_virtual_time
    async def goes_on() -> None:
        streams = Streams(*[(ValueError("no"),)] * 5, (event("a"), ValueError("no")), (event("b"),))
        found, task = watched(monkeypatch, Taker().lists, streams)
        await asyncio.sleep(60)
        assert [round(later - before) for before, later in pairwise(streams.begun)] == [1, 1, 2, 3, 5, 1]
        assert found == ["a", "b"]
        task.cancel()

    goes_on()


@pytest.mark.parametrize(
    "final", [errors.APINotFoundError(None, status=404, headers={}), kopf.LoginError("no credentials")], ids=repr
)
def test_a_kind_that_is_gone_and_credentials_that_ran_out_end_the_process(
    final: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_virtual_time
    async def ends() -> None:
        _, task = watched(monkeypatch, Taker().lists, Streams((final,)))
        with pytest.raises(type(final)):
            await task

    ends()


async def test_kopf_takes_its_events_from_the_watch_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real watcher of kopf over a stand-in for its requests."""
    taker, processed = Taker(), []
    monkeypatch.setattr(watching, "infinite_watch", taker.lists.watch)
    monkeypatch.setattr(watch, "Backoffs", lambda: repeat(0.0))
    monkeypatch.setattr(watch, "KOPFS_WATCH", Streams((event("a"), ValueError("no")), (event("b"),)))

    async def process(**given: Any) -> None:
        processed.append(given["raw_event"]["object"]["metadata"]["name"])

    resource = kopf.Resource(
        group="kvstrata.io", version="v1alpha1", plural=POLICY.plural, verbs=frozenset(), namespaced=True
    )
    watcher = asyncio.create_task(
        queueing.watcher(
            namespace="team",  # type: ignore[arg-type]
            settings=build_settings(70.0, ("team",)),
            resource=resource,
            processor=process,
        )
    )
    while processed != ["a", "b"]:
        assert not watcher.done()
        await asyncio.sleep(0.01)
    watcher.cancel()
    with suppress(asyncio.CancelledError):
        await watcher
    assert any("cannot be read" in one.getMessage() for one in caplog.records)


Serving = Callable[[int, bytes], Awaitable[str]]


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    """Start a server that gives one answer to everything; return its URL."""
    runners: list[web.ServerRunner] = []

    async def start(status: int, body: bytes) -> str:
        async def handle(_: web.BaseRequest) -> web.Response:
            return web.Response(status=status, body=body, content_type="application/json")

        runners.append(web.ServerRunner(web.Server(handle), shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def answered(lists: Lists, url: str) -> Any:
    async with aiohttp.ClientSession(response_class=lists.response_class()) as session, session.get(url) as answer:
        return await answer.json()


async def test_a_session_takes_lists_out_of_its_answers(serving: Serving) -> None:
    taker = Taker()
    server = await serving(200, json.dumps(page("a", more=True)).encode())
    assert (await answered(taker.lists, f"{server}{POLICIES}?limit=500"))["items"] == []
    await answered(taker.lists, f"{server}{POLICIES}?limit=500&continue=more")
    assert taker.anew == 0
    await answered(taker.lists, f"{server}{POLICIES}?limit=500")
    assert (len(taker.taken), taker.anew) == (3, 1)


async def test_a_refusal_is_no_list(serving: Serving) -> None:
    taker = Taker()
    server = await serving(403, json.dumps(page("a")).encode())
    assert len((await answered(taker.lists, server + POLICIES))["items"]) == 1
    assert taker.taken == []


async def test_an_answer_that_is_no_json_fails_as_kopf_expects(serving: Serving) -> None:
    server = await serving(200, b"<html>")
    with pytest.raises(json.JSONDecodeError):
        await answered(Taker().lists, server + POLICIES)


async def test_a_login_offers_nothing_while_the_refused_credentials_are_all_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(token: str) -> None:
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
            "clusters": [{"name": "one", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "me", "user": {"token": token}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    login = Taker().lists.login()
    for token in ("one", "two"):
        write(token)
        offered = await login()
        assert offered is not None
        assert offered.aiohttp_session.headers["Authorization"] == f"Bearer {token}"
        await offered.aiohttp_session.close()
        assert await login() is None


def answered_by(path: str) -> Any:
    return type("Request", (), {"url": URL(f"http://api{path}?watch=true")})


async def succeed(_: Any) -> Any:
    return type("Answer", (), {"status": 200})


async def test_a_watch_that_fails_is_shown_with_its_namespace_until_it_works() -> None:
    lists, answers = Taker().lists, [403, 503, None, 410, 200]

    async def send(_: Any) -> Any:
        status = answers.pop(0)
        if status is None:
            raise aiohttp.ServerDisconnectedError
        return type("Answer", (), {"status": status})

    def failing(namespace: str = "team") -> float:
        return float(WATCH_FAILING.labels(namespace, SECRET.plural)._value.get())

    def request(path: str) -> Any:
        return type("Request", (), {"url": URL(f"http://api{path}?watch=true")})

    for shown in (1, 1):
        await lists.note_failures(request(SECRETS), send)
        assert failing() == shown
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await lists.note_failures(request(SECRETS), send)
    assert failing() == 1
    await lists.note_failures(request(SECRETS), send)
    assert failing() == 0, "a list follows by itself"
    await lists.note_failures(request("/api/v1/namespaces/other/secrets"), send)
    assert failing("other") == 0


async def test_the_session_that_kopf_gets_shows_failures(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serving(403, b"{}")
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "one"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    WATCH_FAILING.clear()
    offered = await Taker().lists.login()()
    assert offered is not None
    async with offered.aiohttp_session as session, session.get(server + POLICIES) as answer:
        assert answer.status == 403
    assert WATCH_FAILING.labels("team", POLICY.plural)._value.get() == 1


def test_a_watch_is_tried_again_without_an_end() -> None:
    pauses = build_settings(70.0, ["team"]).networking.error_backoffs
    assert [*islice(iter(pauses), 8)] == [1, 1, 2, 3, 5, 8, 10, 10]
    assert [*islice(iter(pauses), 100_000)][-1] == 10
