"""Answers that no API server should give become errors of the API server, never of the operator."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from kvstrata.clients import pki
from kvstrata.clients.kube import Kube, KubeError, NotLeadingError
from kvstrata.clients.kube_auth import authorization, open_api
from kvstrata.clients.resources import POD, SECRET

Answers = Callable[..., Awaitable[Kube]]


@pytest.fixture
async def answering() -> AsyncIterator[Answers]:
    """Make a client of a server that gives one answer to everything."""
    runners: list[web.ServerRunner] = []
    clients: list[Kube] = []

    async def start(**answer: Any) -> Kube:
        async def handle(_: web.BaseRequest) -> web.Response:
            return web.Response(**answer)

        runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        clients.append(Kube(open_api(Configuration(f"http://127.0.0.1:{runner.addresses[0][1]}"))))
        return clients[-1]

    yield start
    for client in clients:
        await client.close()
    for runner in runners:
        await runner.cleanup()


Write = Callable[[Kube], Awaitable[Any]]
RAW = {"metadata": {"name": "one", "namespace": "team", "resourceVersion": "7"}}
WRITES: dict[str, Write] = {
    "create": lambda kube: kube.create(SECRET, "team", RAW),
    "replace": lambda kube: kube.replace(SECRET, "team", RAW),
    "apply": lambda kube: kube.apply(SECRET, "team", RAW, "kvstrata-test", "uid"),
    "status": lambda kube: kube.patch_status(SECRET, "team", "one", {}, "7"),
    "finalizers": lambda kube: kube.set_finalizers(SECRET, "team", "one", (), "7"),
    "scale": lambda kube: kube.scale("team", "one", 0),
    "delete": lambda kube: kube.delete(SECRET, "team", "one", "uid"),
    "evict": lambda kube: kube.request("POST", POD.path("team", "one", "eviction"), body={}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_process_that_leads_no_more_sends_no_write_and_may_read(
    monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    """It loses the lead at the last moment: while it awaits the headers of the request."""
    arrived: list[str] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        arrived.append(request.method)
        return web.json_response({"items": [], "status": {}})

    async def loses(configuration: Configuration) -> dict[str, str]:
        kube.may_write = lambda: False
        return await authorization(configuration)

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kube = Kube(open_api(Configuration(f"http://127.0.0.1:{runner.addresses[0][1]}")))
    await write(kube)
    assert len(arrived) == 1
    monkeypatch.setattr("kvstrata.clients.kube.authorization", loses)
    with pytest.raises(NotLeadingError):
        await write(kube)
    assert len(arrived) == 1, "nothing was sent"
    await kube.get(SECRET, "team", "one")
    await kube.review_token("token", "audience")
    assert arrived[1:] == ["GET", "POST"]
    await kube.close()
    await runner.cleanup()


def test_every_request_that_changes_something_is_among_these_writes() -> None:
    changing = {"create", "replace", "apply", "patch_status", "set_finalizers", "scale", "delete", "request"}
    reading = {"get", "list", "container_log", "is_ending", "review_token", "connect", "close", "require_lead"}
    assert {name for name in vars(Kube) if not name.startswith("_")} == changing | reading


@pytest.mark.parametrize(("version", "refused"), [(None, False), ("7", True)])
async def test_a_deletion_names_the_uid_and_reports_a_change_only_if_it_named_the_version(
    answering: Answers, version: str | None, *, refused: bool
) -> None:
    kube = await answering(status=409, text="{}")
    if refused:
        with pytest.raises(KubeError):
            await kube.delete(SECRET, "team", "one", "uid", version)
    else:
        await kube.delete(SECRET, "team", "one", "uid", version)


async def test_a_cancellation_that_meets_the_timeout_is_not_lost() -> None:
    """A stopped process that goes on finds both due at once."""
    silent = socket.create_server(("127.0.0.1", 0))
    kube = Kube(open_api(Configuration(f"http://127.0.0.1:{silent.getsockname()[1]}")))
    while True:
        begun_s = time.monotonic()
        task = asyncio.create_task(kube.request("GET", "/", timeout_s=0.3))
        await asyncio.sleep(0.1)
        if time.monotonic() - begun_s < 0.3:
            break
        # The machine was busy for so long that the request may have ended.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    time.sleep(0.4)  # noqa: ASYNC251 - nothing of the loop runs
    await asyncio.sleep(0)  # the timeout is the next to run
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await kube.close()
    silent.close()


@pytest.mark.parametrize("body", [b"<html>", b'{"items": [', b"\xff\xfe\x00", b"[]", b'"text"', b"null"])
async def test_an_answer_that_is_no_object_is_no_answer(answering: Answers, body: bytes) -> None:
    kube = await answering(body=body)
    with pytest.raises(KubeError) as raised:
        await kube.get(SECRET, "team", "one")
    assert (raised.value.status, raised.value.reason) == (0, "BadAnswer")
    with pytest.raises(KubeError):
        _ = [one async for one in kube.list(SECRET, "team")]


@pytest.mark.parametrize("body", [b"{}", b'{"items": null}', b'{"items": {}}', b'{"items": ["one"]}'])
async def test_an_answer_that_is_no_list_does_not_say_that_there_is_nothing(answering: Answers, body: bytes) -> None:
    kube = await answering(body=body)
    with pytest.raises(KubeError) as raised:
        _ = [one async for one in kube.list(SECRET, "team")]
    assert (raised.value.status, raised.value.reason) == (0, "BadAnswer")


@pytest.mark.parametrize(
    ("status", "reason"), [(429, "TooManyRequests"), (500, "InternalServerError"), (503, "ServiceUnavailable")]
)
async def test_a_refusal_without_a_reason_is_named_by_its_status(answering: Answers, status: int, reason: str) -> None:
    kube = await answering(status=status, text="busy", headers={"Retry-After": "7"})
    with pytest.raises(KubeError) as raised:
        await kube.get(SECRET, "team", "one")
    assert (raised.value.reason, raised.value.message, raised.value.retry_after_s) == (reason, "busy", 7.0)


async def test_a_refusal_reads_the_same_in_whichever_order_its_causes_come(answering: Answers) -> None:
    causes = [{"field": f"spec.limits[{name}]", "message": f'Invalid value: "{name}": is odd'} for name in "abb"]
    read = set()
    for order in (causes, causes[::-1]):
        listed = ", ".join(dict.fromkeys(f"{cause['field']}: {cause['message']}" for cause in order))
        said = {"message": f'Pod "x" is invalid: [{listed}]', "reason": "Invalid", "details": {"causes": order}}
        kube = await answering(status=422, text=json.dumps(said))
        with pytest.raises(KubeError) as raised:
            await kube.get(SECRET, "team", "one")
        read.add(raised.value.message)
    one, other = ('spec.limits[a]: Invalid value: "a": is odd', 'spec.limits[b]: Invalid value: "b": is odd')
    assert read == {f'Pod "x" is invalid: [{one}, {other}]'}


async def test_what_is_not_of_its_type_reads_the_same_in_whichever_order_its_errors_come(answering: Answers) -> None:
    first, one, other = "failed to create typed patch object (x): errors:", "  .spec.a: is odd", "  .spec.b: is odd"
    for order in ((one, other), (other, one)):
        kube = await answering(status=500, text=json.dumps({"message": "\n".join((first, *order))}))
        with pytest.raises(KubeError) as raised:
            await kube.get(SECRET, "team", "one")
        assert raised.value.message == "\n".join((first, one, other))
        assert raised.value.is_refusal


@pytest.mark.parametrize(
    "said",
    [
        {"message": "x is invalid: [a: b, c: d]", "details": {"causes": [{"field": "a", "message": "b"}]}},
        {"message": "x is invalid: [a: b, c: d]", "details": None},
        {"message": "x is invalid: a: b", "details": {"causes": [{"field": "a", "message": "b"}]}},
        {"message": "x is invalid: [a: b]", "details": {"causes": ["text"]}},
        {"message": "x is invalid: [a: b]", "details": {"causes": 7}},
        {"message": "x is invalid: [a: b]", "details": "text"},
    ],
)
async def test_a_refusal_whose_causes_are_not_what_it_says_is_told_as_it_came(
    answering: Answers, said: dict[str, Any]
) -> None:
    kube = await answering(status=422, text=json.dumps(said))
    with pytest.raises(KubeError) as raised:
        await kube.get(SECRET, "team", "one")
    assert raised.value.message == said["message"]


@pytest.mark.parametrize(("cause", "ends"), [("NamespaceTerminating", True), ("FieldValueInvalid", False)])
async def test_a_namespace_that_creates_nothing_any_more_is_told_by_the_refusal(
    answering: Answers, cause: str, ends: bool
) -> None:
    said = {"message": "forbidden", "reason": "Forbidden", "details": {"causes": [{"reason": cause, "message": "m"}]}}
    kube = await answering(status=403, text=json.dumps(said))
    with pytest.raises(KubeError) as raised:
        await kube.create(SECRET, "team", {"metadata": {"name": "one"}})
    assert raised.value.is_of_ending_namespace == ends


@pytest.mark.parametrize(
    ("status", "metadata", "ends"),
    [(200, {}, False), (200, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, True), (404, {}, True), (403, {}, False)],
)
async def test_a_namespace_is_asked_whether_it_goes(
    answering: Answers, status: int, metadata: dict[str, str], ends: bool
) -> None:
    kube = await answering(status=status, text=json.dumps({"metadata": metadata}))
    assert await kube.is_ending("team") == ends


async def test_a_redirect_is_not_followed(answering: Answers) -> None:
    kube = await answering(status=307, headers={"Location": "/elsewhere"})
    with pytest.raises(KubeError) as raised:
        await kube.create(SECRET, "team", {"metadata": {"name": "one"}})
    assert (raised.value.status, raised.value.reason) == (0, "TooManyRedirects")


async def test_a_replaced_authority_of_the_api_server_is_read_again(tmp_path: Path) -> None:
    async def handle(_: web.BaseRequest) -> web.Response:
        return web.json_response({"kind": "Secret"})

    now = datetime.now(UTC)
    first, second = (pki.create_authority(name, now, pki.generate_key()) for name in ("first", "second"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = pki.issue_server(second, ("localhost",), now, pki.generate_key())
    for name, value in (("tls.crt", pair.certificate_pem), ("tls.key", pair.key_pem)):
        (tmp_path / name).write_bytes(value)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    configuration = Configuration(f"https://localhost:{runner.addresses[0][1]}")
    file = tmp_path / "ca.crt"
    configuration.ssl_ca_cert = str(file)
    file.write_bytes(first.certificate_pem)
    kube = Kube(open_api(configuration))
    for unfit in (first.certificate_pem, b"no authority", second.certificate_pem[:-80]):
        file.write_bytes(unfit)
        with pytest.raises(KubeError) as raised:
            await kube.get(SECRET, "team", "one")
        assert (raised.value.status, raised.value.reason) == (0, "ClientConnectorCertificateError")
    file.write_bytes(second.certificate_pem)
    assert await kube.get(SECRET, "team", "one") == {"kind": "Secret"}
    await kube.close()
    await runner.cleanup()
