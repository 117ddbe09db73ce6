"""The operator's client of gates: mutual TLS to a pod's address, with kept connections.

A pod's IP may pass to another pod at any time, so the certificate is checked against the *model's* gate name. The token
in the answer identifies the pod; this module returns it unchecked and the caller has the API server review it.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

import aiohttp

from kvstrata.clients.http import CONNECT_TIMEOUT, causes, failure_of, read_capped
from kvstrata.contract import ContractError
from kvstrata.contract.messages import pools
from kvstrata.contract.messages.engine_reset import MAX_RESET_BYTES, RESET_PATH, EngineResetAnswer, ResetRequest
from kvstrata.contract.messages.erase import (
    ERASE_PATH,
    MAX_ERASED_BYTES,
    VERIFY_PATH,
    Erased,
    EraseRequest,
    Verified,
    VerifyRequest,
)
from kvstrata.contract.messages.key_delivery import CONTENT_TYPE, KEYS_PATH, MAX_KEYS_BYTES, KeysLacking
from kvstrata.contract.messages.pod_state import ACK_TOKEN_HEADER, CONTROL_PORT, STATE_PATH, PodState
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.messages.probe import MAX_PROBED_BYTES, PROBE_PATH, Probed, ProbeRequest

T = TypeVar("T")

MAX_STATE_BYTES = 256 * 1024
MAX_TOKEN_BYTES = 8 * 1024
LOOK_TIMEOUT_S = 40.0
"""Beyond the wait that the request asks for."""

MAX_WORK_PER_POD = 8
"""Concurrent requests to one pod, apart from long polls."""

ANSWER_GRACE_S = 5.0
"""Beyond the wait of a long poll."""

KEEPALIVE_S = 90.0


class GateFailure(StrEnum):
    """Why a gate's answer could not be read; a reason in logs, metrics and conditions."""

    UNREACHABLE = "Unreachable"
    CONNECTION_REFUSED = "ConnectionRefused"
    TIMEOUT = "Timeout"
    TLS_FAILED = "TLSFailed"
    DISCONNECTED = "Disconnected"
    REFUSED = "Refused"
    TOO_LARGE = "TooLarge"
    MALFORMED = "Malformed"
    NO_TOKEN = "NoToken"  # noqa: S105  (a reason's name)


class GateError(Exception):
    """`reason` is stable; the message holds no secret."""

    def __init__(self, reason: GateFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """A request that gates know, and the limits of its answer."""

    method: str
    path: str
    decode: Callable[[bytes], T]
    timeout_s: float
    max_answer_bytes: int
    content_type: str = "application/json"


_STATE = _Call("GET", STATE_PATH, PodState.decode, 0.0, MAX_STATE_BYTES)
# A pod renders one prefix at a time, and its engine may be busy.
_RENDER = _Call("POST", pools.RENDER_PATH, pools.Rendered.decode, 120.0, pools.MAX_ANSWER_BYTES)
_WARM = _Call("POST", pools.WARM_PATH, pools.Warmed.decode, 0.0, pools.MAX_ANSWER_BYTES)
_POOL = _Call("GET", pools.POOL_PATH, pools.PoolReport.decode, 30.0, pools.MAX_ANSWER_BYTES)
_ERASE = _Call("POST", ERASE_PATH, Erased.decode, LOOK_TIMEOUT_S, MAX_ERASED_BYTES)
_VERIFY = _Call("POST", VERIFY_PATH, Verified.decode, LOOK_TIMEOUT_S, MAX_ERASED_BYTES)
_RESET = _Call("POST", RESET_PATH, EngineResetAnswer.decode, LOOK_TIMEOUT_S, MAX_RESET_BYTES)
# The engine computes four prompts of one chunk, and may be busy.
_PROBE = _Call("POST", PROBE_PATH, Probed.decode, 180.0, MAX_PROBED_BYTES)
# A pod only reads or writes small files in memory.
_KEYS = _Call("GET", KEYS_PATH, KeysLacking.decode, 20.0, MAX_KEYS_BYTES)
_BRING_KEYS = _Call("POST", KEYS_PATH, KeysLacking.decode, 20.0, MAX_KEYS_BYTES, CONTENT_TYPE)


class GateClient:
    """Client of gates, to be used as a context manager within one event loop. Certificates are PEM; raises ssl.SSLError
    or ValueError when they are unusable.

    Every request returns the answer and the pod's token, unchecked. `server_name` is that of
    `contract.messages.pod_state.gate_server_name(model, namespace)`. A request raises GateError, and ContractError for
    a message that no gate accepts.
    """

    def __init__(
        self, ca_pem: bytes, client_certificate_pem: bytes, client_key_pem: bytes, *, port: int = CONTROL_PORT
    ) -> None:
        self._port = port
        self._tls = _client_context(ca_pem, client_certificate_pem, client_key_pem)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._seen: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> GateClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    async def state(self, pod_ip: str, server_name: str, after: int, wait_s: float) -> tuple[PodState, str]:
        """Return a pod's state. The gate answers at once when its acknowledged revision differs from `after`, or its
        state has changed since its last answer to this client, else within `wait_s`."""
        query = {"after": str(after), "wait": f"{wait_s:g}"}
        return await self._ask(pod_ip, server_name, _STATE, None, ANSWER_GRACE_S + wait_s, query)

    def forget(self, pod_ip: str, server_name: str) -> None:
        """Forget a pod that is gone."""
        self._seen.pop((pod_ip, server_name), None)

    async def render(self, pod_ip: str, server_name: str, prefix: PrefixSource) -> tuple[pools.Rendered, str]:
        return await self._ask(pod_ip, server_name, _RENDER, pools.RenderRequest(prefix).encode())

    async def warm(
        self, pod_ip: str, server_name: str, request: pools.WarmRequest, timeout_s: float
    ) -> tuple[pools.Warmed, str]:
        """Have a pod compute a prefix; it stops when this is cancelled or takes longer than `timeout_s`."""
        return await self._ask(pod_ip, server_name, _WARM, request.encode(), timeout_s)

    async def pool(self, pod_ip: str, server_name: str, uid: str) -> tuple[pools.PoolReport, str]:
        return await self._ask(pod_ip, server_name, _POOL, query={"uid": uid})

    async def erase(self, pod_ip: str, server_name: str, request: EraseRequest) -> tuple[Erased, str]:
        """Have a pod erase its copies of keyspaces. The pod answers when nothing is left, or after `request.wait_s`;
        the erasure then continues in the background."""
        return await self._ask(pod_ip, server_name, _ERASE, request.encode(), request.wait_s)

    async def verify(self, pod_ip: str, server_name: str, request: VerifyRequest) -> tuple[Verified, str]:
        return await self._ask(pod_ip, server_name, _VERIFY, request.encode())

    async def reset(self, pod_ip: str, server_name: str, request: ResetRequest) -> tuple[EngineResetAnswer, str]:
        return await self._ask(pod_ip, server_name, _RESET, request.encode(), request.wait_s)

    async def probe(self, pod_ip: str, server_name: str, request: ProbeRequest) -> tuple[Probed, str]:
        return await self._ask(pod_ip, server_name, _PROBE, request.encode())

    async def keys(self, pod_ip: str, server_name: str) -> tuple[KeysLacking, str]:
        """Return the data keys that a pod's bundle names and it lacks."""
        return await self._ask(pod_ip, server_name, _KEYS)

    async def bring_keys(self, pod_ip: str, server_name: str, message: bytearray) -> tuple[KeysLacking, str]:
        """Send a pod data keys (`pack_keys`), and return those that it still lacks; after an error they may have
        arrived. The caller overwrites `message`."""
        return await self._ask(pod_ip, server_name, _BRING_KEYS, message)

    async def _ask(
        self,
        pod_ip: str,
        server_name: str,
        call: _Call[T],
        body: bytes | bytearray | None = None,
        wait_s: float = 0.0,
        query: Mapping[str, str] | None = None,
    ) -> tuple[T, str]:
        """Return the answer and the pod's token. `wait_s` is added to the call's time."""
        host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
        headers = {} if body is None else {"Content-Type": call.content_type}
        if call is _STATE and (seen := self._seen.get((pod_ip, server_name))):
            headers["If-None-Match"] = seen
        try:
            async with (
                asyncio.timeout(call.timeout_s + wait_s),
                self._open_session(states=call is _STATE).request(
                    call.method,
                    f"https://{host}:{self._port}{call.path}",
                    params=dict(query or {}),
                    headers=headers,
                    data=body,
                    server_hostname=server_name,
                    allow_redirects=False,
                    timeout=CONNECT_TIMEOUT,
                ) as response,
            ):
                if response.status != 200:
                    message = f"the gate at {pod_ip} answered HTTP {response.status}"
                    raise GateError(GateFailure.REFUSED, message)
                token = response.headers.get(ACK_TOKEN_HEADER, "")
                if not token:
                    raise GateError(GateFailure.NO_TOKEN, f"the gate at {pod_ip} sent no {ACK_TOKEN_HEADER} header")
                encoded = await read_capped(response, call.max_answer_bytes)
                if encoded is None:
                    message = f"the gate at {pod_ip} sent more than {call.max_answer_bytes} bytes"
                    raise GateError(GateFailure.TOO_LARGE, message)
                answer = call.decode(encoded)
                if call is _STATE:
                    self._seen[pod_ip, server_name] = response.headers.get("ETag", "")
                return answer, token
        except ContractError as error:
            raise GateError(GateFailure.MALFORMED, f"the gate at {pod_ip}: {error}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise GateError(_reason(error), f"the gate at {pod_ip}: {error!r}") from error

    def _open_session(self, *, states: bool) -> aiohttp.ClientSession:
        """Return the session of long polls, or that of all other requests, so that acknowledgements never queue."""
        session = self._sessions.get(states)
        if session is None:
            # A limit over all pods would starve those beyond it.
            per_pod = 2 if states else MAX_WORK_PER_POD
            connector = aiohttp.TCPConnector(
                ssl=self._tls, limit=0, limit_per_host=per_pod, keepalive_timeout=KEEPALIVE_S
            )
            session = self._sessions[states] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                max_field_size=MAX_TOKEN_BYTES,
            )
        return session


def _client_context(ca_pem: bytes, certificate_pem: bytes, key_pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    # The ssl module loads a client's key from a path only; the directory is private and gone before the first request.
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as directory:
        pair = Path(directory) / "client.pem"
        pair.touch(mode=0o600)
        pair.write_bytes(certificate_pem + b"\n" + key_pem)
        context.load_cert_chain(pair)
    return context


def _reason(error: BaseException) -> GateFailure:
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return GateFailure.CONNECTION_REFUSED
    reason = GateFailure(failure_of(error))
    if reason is not GateFailure.DISCONNECTED or isinstance(error, aiohttp.ClientPayloadError):
        return reason
    # A server reports the refusal of a TLS 1.3 client certificate after the client's handshake has ended.
    return GateFailure.TLS_FAILED if any(isinstance(one, ssl.SSLError) for one in causes(error)) else reason
