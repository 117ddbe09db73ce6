"""The four ways to the same engine: none between, our gate, Envoy with Lua, LiteLLM's proxy.

Each proxy runs as one worker on a core of its own, checks the caller's key, and puts that tenant's `cache_salt` and the
model into the body. Our gate and Envoy reach the engine over the same unix socket; LiteLLM knows TCP only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench.environment import ROOT, install
from bench.gate import bodies
from bench.gate.fairness import Target
from bench.gate.processes import Process
from e2e.cluster.ports import free_port
from e2e.cluster.progress import ClusterError, Progress
from kvstrata_sidecar.gate.settings import Settings
from tests.gate.world import World, entry, keyspace

TENANT = "acme"
TENANTS = 1000
LITELLM_KEY = "sk-" + hashlib.sha256(b"litellm").hexdigest()
KEY = hashlib.sha256(b"bench").hexdigest()
START_TIMEOUT_S = 60.0
_GATE = "import sys; from kvstrata_sidecar.gate.main import main; sys.exit(main())"
_TYPES = "type.googleapis.com/envoy.extensions."


@dataclass(frozen=True, slots=True)
class Proxy:
    """A way to the engine. `pid` is 0 and `tls_port` is 0 where there is none; callers present `key`."""

    name: str
    port: int
    pid: int = 0
    tls_port: int = 0
    key: str = KEY


@dataclass(frozen=True, slots=True)
class Stand:
    """All of them, running, and the authority of the certificates that two of them show."""

    direct: Proxy
    gate: Proxy
    envoy: Proxy
    litellm: Proxy
    fairness: Target
    authority: str
    pids: tuple[int, ...]
    """Every process of the stand, the engine's too."""

    @property
    def all(self) -> tuple[Proxy, ...]:
        """The four, in the order in which rounds go."""
        return (self.direct, self.gate, self.envoy, self.litellm)


@contextlib.asynccontextmanager
async def running(directory: Path, load_core: int, proxy_core: int, progress: Progress) -> AsyncIterator[Stand]:
    """Start everything, check that each way works as it should, and stop it all at the end."""
    environments = {name: install(name, progress) for name in ("envoy", "litellm")}
    (directory / "logs").mkdir()
    world = World(directory)
    async with contextlib.AsyncExitStack() as stack:
        starter = _Starter(directory / "logs", stack)
        await _start_operator_stand_ins(world, stack)
        engine_port = free_port()
        starter.start(
            "engine",
            [sys.executable, "-m", "bench.gate.engine", "--socket", str(world.engine.socket_path), "--port",
             str(engine_port)],
            core=load_core,
        )  # fmt: skip
        idle_port = free_port()
        starter.start(
            "idle", [sys.executable, "-m", "bench.gate.engine", "--socket", str(directory / "idle.sock"), "--port",
             str(idle_port)],
            core=proxy_core,
        )  # fmt: skip
        gate, fairness = _start_gate(world, starter, proxy_core, idle_port)
        stand = Stand(
            direct=Proxy("direct", engine_port),
            gate=gate,
            envoy=_start_envoy(environments["envoy"], world, starter, proxy_core),
            litellm=_start_litellm(environments["litellm"], directory, engine_port, starter, proxy_core),
            fairness=fairness,
            authority=str(world.gate_tls / "ca.crt"),
            pids=tuple(process.pid for process in starter.processes),
        )
        with progress.step("start the engine stand-in, the gate, Envoy and LiteLLM"):
            for proxy in stand.all:
                await _wait_until_it_answers(proxy, starter)
        for proxy in stand.all:
            await _check(proxy, engine_port)
        yield stand


class _Starter:
    """Starts processes in the repository's root and stops them when the stack unwinds."""

    def __init__(self, logs: Path, stack: contextlib.AsyncExitStack) -> None:
        self._logs = logs
        self._stack = stack
        self.processes: list[Process] = []

    def start(self, name: str, arguments: list[str], *, core: int, **environment: str) -> Process:
        inherited = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "operator/src", ROOT / "sidecar/src")))
        process = Process(
            arguments, core=core, log=self._logs / f"{name}.log",
            environment={**inherited, "PYTHONPATH": paths, **environment},
        )  # fmt: skip
        self._stack.callback(process.stop)
        self.processes.append(process)
        return process


async def _start_operator_stand_ins(world: World, stack: contextlib.AsyncExitStack) -> None:
    """Give the gate its API server and adapter, with a bundle and keys of many tenants."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.gate_tls / "tls.crt", world.gate_tls / "tls.key")
    await world.api.start(context)
    stack.push_async_callback(world.api.stop)
    await world.adapter.start()
    stack.push_async_callback(world.adapter.stop)
    others = [f"tenant-{number}" for number in range(TENANTS - 1)]
    await world.publish_keys(**{TENANT: KEY}, **{name: f"{KEY}-{name}" for name in others})
    await world.publish([entry(name) for name in sorted((TENANT, *others))])


def gate_command(settings: Settings) -> list[str]:
    """Return the command of a gate in a process of its own."""
    flags = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        flags += ["--" + field.name.replace("_", "-"), str(value).lower() if isinstance(value, bool) else str(value)]
    return [sys.executable, "-c", _GATE, *flags]


def _start_gate(world: World, starter: _Starter, core: int, idle_port: int) -> tuple[Proxy, Target]:
    settings = world.settings(https_port=free_port(), http_port=free_port(), health_port=free_port())
    flags = gate_command(settings)[3:]
    process = starter.start("gate", [sys.executable, "-m", "bench.gate.watched_gate", *flags], core=core)
    target = Target(
        settings.http_port, settings.health_port, idle_port, process.pid, process.log, KEY, f"{KEY}-tenant-0"
    )
    return Proxy("gate", settings.http_port, process.pid, settings.https_port), target


def _start_envoy(environment: Path, world: World, starter: _Starter, core: int) -> Proxy:
    port, tls_port = free_port(), free_port()
    script = (Path(__file__).with_name("rewrite.lua")).read_text().replace("@SALT@", keyspace(TENANT))
    configuration = world.directory / "envoy.json"
    configuration.write_text(json.dumps(_envoy(world, script, port, tls_port)))
    binary = next(environment.glob("lib/python3*/site-packages/envoy/_bin/envoy"))
    process = starter.start(
        "envoy",
        [str(binary), "--config-path", str(configuration), "--concurrency", "1", "--log-level", "warning",
         "--disable-hot-restart"],
        core=core,
    )  # fmt: skip
    return Proxy("envoy", port, process.pid, tls_port)


def _envoy(world: World, script: str, port: int, tls_port: int) -> dict[str, Any]:
    """Return Envoy's configuration: its own API-key filter, the Lua filter, one route, no access log, no limits."""
    certificate = {
        "certificate_chain": {"filename": str(world.gate_tls / "tls.crt")},
        "private_key": {"filename": str(world.gate_tls / "tls.key")},
    }
    tls = {
        "name": "tls",
        "typed_config": {
            "@type": f"{_TYPES}transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {"tls_certificates": [certificate]},
        },
    }
    filters = [
        _filter("api_key_auth", "http.api_key_auth.v3.ApiKeyAuth", {
            "credentials": [{"key": KEY, "client": TENANT}] + [
                {"key": f"{KEY}-tenant-{number}", "client": f"tenant-{number}"} for number in range(TENANTS - 1)
            ],
            "key_sources": [{"header": "Authorization"}],
            "forwarding": {"header": "x-tenant", "hide_credentials": True},
        }),
        _filter("lua", "http.lua.v3.Lua", {"default_source_code": {"inline_string": script}}),
        _filter("router", "http.router.v3.Router", {"suppress_envoy_headers": True}),
    ]  # fmt: skip
    route = {"match": {"path": bodies.PATH}, "route": {"cluster": "engine", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPES}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "tenants",
        "generate_request_id": False,
        "route_config": {"virtual_hosts": [{"name": "engine", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    limits = {"per_connection_buffer_limit_bytes": 8 * 2**20}
    engine = {
        "name": "engine",
        "type": "STATIC",
        "connect_timeout": "5s",
        **limits,
        "load_assignment": {
            "cluster_name": "engine",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(world.engine.socket_path)}}}}]}
            ],
        },
    }
    return {
        "static_resources": {
            "listeners": [
                {"name": "http", "address": _address(port), "filter_chains": [chain], **limits},
                {"name": "https", "address": _address(tls_port), **limits,
                 "filter_chains": [{**chain, "transport_socket": tls}]},
            ],
            "clusters": [engine],
        }
    }  # fmt: skip


def _filter(name: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}filters.{kind}", **fields}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _start_litellm(environment: Path, directory: Path, engine_port: int, starter: _Starter, core: int) -> Proxy:
    port = free_port()
    configuration = directory / "litellm.yaml"
    parameters = {
        "model": f"openai/{bodies.MODEL}",
        "api_base": f"http://127.0.0.1:{engine_port}/v1",
        "api_key": "none",
        "extra_body": {"cache_salt": keyspace(TENANT)},
    }
    configuration.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": bodies.MODEL, "litellm_params": parameters}],
                "general_settings": {"master_key": LITELLM_KEY},
                "litellm_settings": {"telemetry": False, "set_verbose": False},
            }
        )
    )
    arguments = [
        str(environment / "bin/litellm"), "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip
    process = starter.start(
        "litellm", arguments, core=core, PYTHONPATH="", LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR",
        LITELLM_MODE="PRODUCTION",
    )  # fmt: skip
    return Proxy("litellm", port, process.pid, key=LITELLM_KEY)


async def _wait_until_it_answers(proxy: Proxy, starter: _Starter) -> None:
    request = bodies.post(bodies.chat(200), proxy.key)
    status = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while status != 200:
                for process in starter.processes:
                    process.require_alive()
                status, _ = await ask(proxy.port, request)
                await asyncio.sleep(0.1)
            return
    logs = {process.log.stem: process.log for process in starter.processes}
    raise ClusterError(f"{proxy.name} answers {status} after {START_TIMEOUT_S:.0f} s", log=logs.get(proxy.name))


async def _check(proxy: Proxy, engine_port: int) -> None:
    """Raise ClusterError unless a proxy refuses a wrong key and gives the engine its own salt."""
    if not proxy.pid:
        return
    status, _ = await ask(proxy.port, bodies.post(bodies.chat(200), proxy.key + "x"))
    # LiteLLM without a database answers 400: it looks a key that is not its master key up there.
    if status not in (400, 401):
        raise ClusterError(f"{proxy.name} answers {status} to a wrong key")
    sent = bodies.chat(8000)
    status, _ = await ask(proxy.port, bodies.post(sent, proxy.key))
    _, last = await ask(engine_port, b"GET /last HTTP/1.1\r\nHost: engine\r\n\r\n")
    seen = json.loads(last)
    if status != 200 or seen.get("cache_salt") != keyspace(TENANT) or seen.get("messages") != sent["messages"]:
        raise ClusterError(f"{proxy.name} answers {status} and does not rewrite the body as it should")


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    """Return status and body of an answer with a Content-Length; status 0 when no process listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0, b""
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        return int(head.split(b" ", 2)[1]), await reader.readexactly(int(lines.get(b"content-length", b"0")))
    except (OSError, asyncio.IncompleteReadError):
        return 0, b""
    finally:
        writer.close()
