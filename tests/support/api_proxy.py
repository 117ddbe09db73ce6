"""A TLS proxy in front of a real API server that misbehaves on demand, request by request and watch by watch.

It runs in a thread of the test and shows the API server's own certificate, so a client needs nothing but another port::

    with ApiProxy(plane.kubeconfig, tmp_path) as proxy, proxy.fault(Answer(500), path="/status", methods=WRITES):
        ...
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from tests.support.api_proxy_faults import (
    EXPIRED,
    READS,
    Answer,
    BreakAfter,
    Delay,
    Drop,
    Event,
    Fault,
    Garble,
    Hang,
    Held,
    Hold,
    Rule,
    Truncate,
)

HOP_BY_HOP = {"connection", "content-length", "transfer-encoding", "keep-alive", "content-encoding", "host", "date"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request: when it came and was answered (monotonic seconds), and the answer. No status: never answered."""

    at: float
    method: str
    path: str
    watch: bool
    status: int | None
    fault: Fault | None
    until: float = 0.0

    @property
    def is_write(self) -> bool:
        """Whether it asked for a change."""
        return self.method != "GET"


@dataclass(eq=False, slots=True)
class _Stream:
    """One running watch. A dead one carries nothing any more, in either direction; neither side is notified."""

    path: str
    response: web.StreamResponse
    request: web.Request
    dead: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ApiProxy:
    """The proxy. `kubeconfig` is the API server's administrator; clients of the proxy are that administrator."""

    def __init__(self, kubeconfig: Path, folder: Path, certificate: Path, key: Path) -> None:
        self._config = yaml.safe_load(kubeconfig.read_text())
        self._folder, self._certificate, self._key = folder, certificate, key
        self._upstream = self._config["clusters"][0]["cluster"]["server"].rstrip("/")
        self._rules: list[Rule] = []
        self._drops: list[Drop] = []
        self._streams: set[_Stream] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="api-proxy", daemon=True)
        self.journal: list[Exchange] = []
        self.kubeconfig = folder / "proxy.kubeconfig"

    def __enter__(self) -> ApiProxy:
        self._thread.start()
        if not self._started.wait(60):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)

    @contextmanager
    def fault(
        self,
        fault: Fault,
        *,
        path: str = "",
        methods: Collection[str] = READS,
        watch: bool | None = False,
        times: int | None = None,
        where: Callable[[str, bytes], bool] = lambda _path, _body: True,
    ) -> Iterator[Rule]:
        """Give a fault to the requests that a `Rule` of these arguments takes, while the block runs."""
        rule = Rule(fault, path, frozenset(methods), watch, times, where)
        self._rules.append(rule)
        try:
            yield rule
        finally:
            self._rules.remove(rule)

    @contextmanager
    def lost_events(self, path: str, where: Callable[[Event], bool], times: int | None = None) -> Iterator[Drop]:
        """Lose these events of watches, now and in the future, while the block runs."""
        drop = Drop(path, where, times)
        self._drops.append(drop)
        try:
            yield drop
        finally:
            self._drops.remove(drop)

    def silence(self, path: str = "", at_least: int = 0) -> int:
        """Let all running watches of such paths die silently, unless they are fewer than `at_least`; new ones live.
        Return how many ran."""
        return self._each(path, self._silence, at_least)

    def reset(self, path: str = "") -> int:
        """Break the connections of all running watches of such paths; return how many."""
        return self._each(path, self._reset)

    def send(self, event: Event | bytes, path: str = "") -> int:
        """Send an event (or raw bytes) on all running watches of such paths and end them; return how many."""
        data = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
        return self._each(path, lambda stream: self._send(stream, data))

    def expire(self, path: str = "") -> int:
        """End all running watches of such paths with 410 Expired; return how many."""
        return self.send(EXPIRED, path)

    def requests(
        self,
        path: str = "",
        *,
        methods: Collection[str] | None = None,
        since: float = 0.0,
        watch: bool = False,
    ) -> list[Exchange]:
        """The answered requests so far whose path has `path` (or the ended watches), by the time when they came."""
        found = [
            e
            for e in tuple(self.journal)
            if e.at >= since
            and e.watch == watch
            and re.search(path, e.path)
            and (methods is None or e.method in methods)
        ]
        return sorted(found, key=lambda e: e.at)

    def running_watches(self) -> int:
        """Return how many watches run now."""
        return self._each("", lambda stream: None)

    def _each(self, path: str, act: Callable[[_Stream], Any], at_least: int = 0) -> int:
        async def run() -> int:
            chosen = [s for s in self._streams if not s.dead and re.search(path, s.path)]
            for stream in chosen if len(chosen) >= at_least else ():
                result = act(stream)
                if asyncio.iscoroutine(result):
                    await result
            return len(chosen)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    @staticmethod
    def _silence(stream: _Stream) -> None:
        stream.dead = True

    @staticmethod
    def _reset(stream: _Stream) -> None:
        stream.dead = True
        stream.ended.set()
        _abort(stream.request)

    @staticmethod
    async def _send(stream: _Stream, data: bytes) -> None:
        stream.dead = True
        await stream.response.write(data)
        stream.ended.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        user, cluster = self._config["users"][0]["user"], self._config["clusters"][0]["cluster"]
        upstream_tls = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority"))
        certificate, key = self._folder / "proxy-client.crt", self._folder / "proxy-client.key"
        certificate.write_text(_pem(user, "client-certificate"))
        key.write_text(_pem(user, "client-key"))
        upstream_tls.load_cert_chain(certificate, key)
        own_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own_tls.load_cert_chain(self._certificate, self._key)
        connector = aiohttp.TCPConnector(ssl=upstream_tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=own_tls)
            await site.start()
            port = runner.addresses[0][1]
            self._config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
            self.kubeconfig.write_text(yaml.safe_dump(self._config))
            self._started.set()
            await self._ended.wait()
            for stream in tuple(self._streams):
                stream.ended.set()
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        at, watch = time.monotonic(), "watch" in request.query
        body = await request.read()
        rule = next((r for r in tuple(self._rules) if r.takes(request.method, request.path, watch, body)), None)
        fault = rule.fault if rule else None
        status: int | None = None
        try:
            response = await self._answer(request, body, watch, fault)
            status = response.status if response else None
        finally:
            self.journal.append(Exchange(at, request.method, request.path, watch, status, fault, time.monotonic()))
        if response is None:
            _abort(request)
            return web.Response(status=502)
        return response

    async def _answer(
        self, request: web.BaseRequest, body: bytes, watch: bool, fault: Fault | None
    ) -> web.StreamResponse | None:
        """Return the answer, or None if the connection is to be broken instead."""
        match fault:
            case Answer():
                headers = {"Content-Type": "application/json", **fault.headers}
                return web.Response(status=fault.status, body=fault.encoded(), headers=headers)
            case Hang(after=False):
                await self._until_gone(request)
                return None
            case Delay(seconds=seconds):
                await asyncio.sleep(seconds)
            case Hold(on_arrival=on_arrival):
                return await self._hold(request, body, on_arrival)
        if watch:
            return await self._watch(request)
        async with self._forward(request, body) as answer:
            data = await answer.read()
            headers = _passed_on(answer.headers)
        match fault:
            case BreakAfter():
                return None
            case Hang():
                await self._until_gone(request)
                return None
            case Garble():
                return web.Response(status=200, body=fault.body, headers={"Content-Type": "application/json"})
            case Truncate():
                half = web.StreamResponse(status=answer.status, headers={**headers, "Content-Length": str(len(data))})
                await half.prepare(request)
                await half.write(data[: len(data) // 2])
                return None
        return web.Response(status=answer.status, body=data, headers=headers)

    async def _hold(
        self, request: web.BaseRequest, body: bytes, on_arrival: Callable[[Held], None]
    ) -> web.StreamResponse | None:
        held = Held(body, request.method, request.path)
        on_arrival(held)
        # A client that gives up, or dies, ends this handler; its request continues.
        return await asyncio.shield(asyncio.create_task(self._held(request, body, held)))

    async def _held(self, request: web.BaseRequest, body: bytes, held: Held) -> web.StreamResponse | None:
        while not (held.goes.is_set() or self._ended.is_set()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        try:
            async with self._forward(request, body) as answer:
                data = await answer.read()
        finally:
            held.done.set()
        if held.mute:
            await self._until_gone(request)
            return None
        return web.Response(status=answer.status, body=data, headers=_passed_on(answer.headers))

    def _forward(self, request: web.BaseRequest, body: bytes | None) -> Any:
        return self._session.request(
            request.method,
            self._upstream + request.raw_path,
            data=body or None,
            headers={**_passed_on(request.headers), "Accept-Encoding": "identity"},
            allow_redirects=False,
        )

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse | None:
        async with self._forward(request, None) as answer:
            response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await response.prepare(request)
            stream = _Stream(request.path, response, request)  # type: ignore[arg-type]
            self._streams.add(stream)
            reading = asyncio.ensure_future(self._carry(answer, stream))
            ending = asyncio.ensure_future(stream.ended.wait())
            leaving = asyncio.ensure_future(self._until_gone(request))
            try:
                # A dead watch lasts until its client gives up, also when the API server ends its side.
                await asyncio.wait({reading, ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._streams.discard(stream)
                for task in (reading, ending, leaving):
                    task.cancel()
                await asyncio.gather(reading, ending, leaving, return_exceptions=True)
            return response

    async def _carry(self, answer: aiohttp.ClientResponse, stream: _Stream) -> None:
        rest = b""
        async for data in answer.content.iter_any():
            rest += data
            while not stream.dead and b"\n" in rest:
                line, rest = rest.split(b"\n", 1)
                event = json.loads(line)
                if not any(drop.takes(stream.path, event) for drop in tuple(self._drops)):
                    await stream.response.write(line + b"\n")
            if stream.dead:
                rest = b""
        if stream.dead:
            await stream.ended.wait()

    async def _until_gone(self, request: web.BaseRequest) -> None:
        while not (self._ended.is_set() or request.transport is None or request.transport.is_closing()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _passed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def _pem(section: dict[str, str], name: str) -> str:
    if f"{name}-data" in section:
        return base64.b64decode(section[f"{name}-data"]).decode()
    return Path(section[name]).read_text()
