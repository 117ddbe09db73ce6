"""The operator's client of gates: mutual TLS to a pod's address, one kept connection for each pod.

A gate is addressed by its pod's IP, which may pass to another pod at any time, so the certificate is checked against
the *model's* gate name. Which pod answered is decided by the token in the answer, which the caller has reviewed by
the API server: this module only carries it.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import aiohttp

from kvstrata.contract import ContractError
from kvstrata.contract.ack import ACK_TOKEN_HEADER, CONTROL_PORT, STATE_PATH, PodState

MAX_STATE_BYTES = 256 * 1024
MAX_TOKEN_BYTES = 8 * 1024
CONNECT_TIMEOUT_S = 3.0
ANSWER_GRACE_S = 5.0
"""How long after the end of a long poll an answer may still arrive."""

KEEPALIVE_S = 90.0


class GateFailure(StrEnum):
    """Why a gate's state could not be read; used as a reason in logs, metrics and conditions."""

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
    """A gate's state could not be read. `reason` is stable, the message is for people and holds no secret."""

    def __init__(self, reason: GateFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GateClient:
    """Asks gates for their state. Use it as a context manager, within one event loop.

    The certificates are PEM: the operator's authority, and the client certificate that it issued to the operator.
    Raises ssl.SSLError or ValueError when they are unusable.
    """

    def __init__(
        self, ca_pem: bytes, client_certificate_pem: bytes, client_key_pem: bytes, *, port: int = CONTROL_PORT
    ) -> None:
        self._port = port
        self._tls = _client_context(ca_pem, client_certificate_pem, client_key_pem)
        self._session: aiohttp.ClientSession | None = None
        self._seen: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> GateClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def state(self, pod_ip: str, server_name: str, after: int, wait_s: float) -> tuple[PodState, str]:
        """Return a pod's state and the token that it sent with it, unchecked.

        The gate answers at once when its acknowledged revision differs from `after`, or when its state has changed
        since it last answered this client, else within `wait_s` seconds.
        `server_name` is `contract.ack.gate_server_name(model, namespace)`. Raises GateError.
        """
        host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
        seen = self._seen.get((pod_ip, server_name))
        try:
            async with self._open_session().get(
                f"https://{host}:{self._port}{STATE_PATH}",
                params={"after": str(after), "wait": f"{wait_s:g}"},
                headers={"If-None-Match": seen} if seen else {},
                server_hostname=server_name,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=wait_s + ANSWER_GRACE_S, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                if response.status != 200:
                    raise GateError(GateFailure.REFUSED, f"the gate at {pod_ip} answered HTTP {response.status}")
                token = response.headers.get(ACK_TOKEN_HEADER, "")
                if not token:
                    raise GateError(GateFailure.NO_TOKEN, f"the gate at {pod_ip} sent no {ACK_TOKEN_HEADER} header")
                state = PodState.decode(await _read_capped(response, pod_ip))
                self._seen[pod_ip, server_name] = response.headers.get("ETag", "")
                return state, token
        except GateError:
            raise
        except ContractError as error:
            raise GateError(GateFailure.MALFORMED, f"the gate at {pod_ip}: {error}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise GateError(_reason(error), f"the gate at {pod_ip}: {error!r}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Long polls hold one connection for each pod: a limit on all of them would starve the pods beyond it.
            connector = aiohttp.TCPConnector(ssl=self._tls, limit=0, limit_per_host=2, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                max_field_size=MAX_TOKEN_BYTES,
            )
        return self._session


async def _read_capped(response: aiohttp.ClientResponse, pod_ip: str) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_STATE_BYTES:
            response.close()
            raise GateError(GateFailure.TOO_LARGE, f"the gate at {pod_ip} sent more than {MAX_STATE_BYTES} bytes")
    return bytes(body)


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
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return GateFailure.TIMEOUT
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return GateFailure.TLS_FAILED
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return GateFailure.CONNECTION_REFUSED if refused else GateFailure.UNREACHABLE
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        # A server that refuses a TLS 1.3 client certificate says so after the client's handshake has ended.
        return GateFailure.TLS_FAILED if _mentions_tls(error) else GateFailure.DISCONNECTED
    if isinstance(error, aiohttp.ClientPayloadError):
        return GateFailure.DISCONNECTED
    if isinstance(error, aiohttp.ClientResponseError):
        return GateFailure.MALFORMED
    return GateFailure.UNREACHABLE


def _mentions_tls(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, ssl.SSLError):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
