"""Opens connections to a tier: TCP, TLS, credentials, all by deadline."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path

from kvstrata.contract.policy.tiers import AllowedServers, password_in
from kvstrata_sidecar.adapter.params import TierParams, TlsParams
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import AccessError, PeerTimeoutError, TransportError, reason
from kvstrata_sidecar.adapter.redis.client.slots import Address

OP_CLEANSE_PLAINTEXT = 1 << 1
"""OpenSSL's SSL_OP_CLEANSE_PLAINTEXT (since 3.0), which Python does not name: overwrites read bytes in the buffer.
Otherwise each connection would keep up to 16 KB of the last block that it loaded."""


def dial(address: Address, tier: TierParams) -> Connection:
    """Return an authenticated connection to a server. All files are read now, so that rotated ones count. Credentials
    are sent only after the server's certificate was verified. Raises AccessError if they are missing or refused, or the
    installation does not allow them or an address of the server, TransportError or ReplyError for other failures."""
    connect_timeout_s, io_timeout_s = tier.connect_timeout_ms / 1000, tier.io_timeout_ms / 1000
    password = None if tier.password_file is None else read_password(tier.password_file)
    if password is not None and tier.tls is None and tier.allowed is not None and not tier.allowed.plain_passwords:
        raise AccessError(f"{address}: the installation allows no password without TLS (externalRedis of the chart)")
    try:
        raw = _reach(address, tier.allowed, connect_timeout_s)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot connect to {address}: {reason(error)}") from error
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tier.tls is not None:
            raw = _start_tls(raw, tier.tls, tier.tls.server_name or address.proves)
        connection = Connection(raw, io_timeout_s)
        connection.greet(tier.username, password, give_up_after_s=connect_timeout_s + io_timeout_s)
    except AccessError as error:
        raw.close()
        raise AccessError(f"{address}: {error}") from error
    except TransportError as error:
        raw.close()
        # With TLS 1.3 a server refuses a client's certificate only after the handshake.
        if isinstance(error.__cause__, ssl.SSLError) and "ALERT" in str(error):
            raise AccessError(f"{address}: the server refuses this client or its certificate: {error}") from error
        raise TransportError(f"{address}: {error}") from error
    except (OSError, ValueError) as error:
        raw.close()
        raise TransportError(f"{address}: {reason(error)}") from error
    except BaseException:
        raw.close()
        raise
    return connection


def read_password(path: str) -> bytes:
    """Return the password in a file, without a line end. Raises AccessError if there is none."""
    try:
        password = password_in(Path(path).read_bytes())
    except OSError as error:
        raise AccessError(f"the password file {path} cannot be read: {reason(error)}") from error
    if not password:
        raise AccessError(f"the password file {path} is empty")
    return password


def _reach(address: Address, allowed: AllowedServers | None, timeout_s: float) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    places = list(dict.fromkeys(str(place[0]) for *_, place in found))
    if allowed is not None and not allowed.allows(address.host, places, address.port):
        raise AccessError(f"{address}: the installation does not allow its address (externalRedis of the chart)")
    for place in places[:-1]:
        with suppress(OSError):
            return socket.create_connection((place, address.port), timeout=timeout_s)
    return socket.create_connection((places[-1], address.port), timeout=timeout_s)


def _start_tls(raw: socket.socket, tls: TlsParams, server_name: str) -> ssl.SSLSocket:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except OSError as error:
        raise AccessError(f"the CA file {tls.ca_file} cannot be read: {reason(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= OP_CLEANSE_PLAINTEXT
    try:
        secured = context.wrap_socket(raw, server_hostname=server_name, do_handshake_on_connect=False)
        # On connect it would be left out for a peer that has gone. The socket's timeout bounds the whole handshake: a
        # peer that sends a byte a second gains no time.
        secured.do_handshake()
        return secured
    except ssl.SSLCertVerificationError as error:
        raise AccessError(f"the server's certificate is not trusted: {error.verify_message}") from error
    except TimeoutError as error:
        raise PeerTimeoutError("the TLS handshake timed out") from error


class Dialing:
    """A connection opened by its own thread, because name resolution cannot be bounded or interrupted otherwise."""

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._open_connection = open_connection
        self._outcome: Future[Connection] = Future()
        self.over = False
        threading.Thread(target=self._run, name="kvs-dial", daemon=True).start()

    def wait(self, timeout_s: float) -> Connection:
        """Return the connection. Raises the error of opening it, PeerTimeoutError when it was given up."""
        try:
            return self._outcome.result(timeout_s)
        except TimeoutError:
            self.give_up("connecting took too long")
            return self._outcome.result()

    def give_up(self, why: str) -> None:
        self._fail(PeerTimeoutError(why))

    def _run(self) -> None:
        try:
            connection = self._open_connection()
        except Exception as error:
            self.over = True
            self._fail(error)
            return
        self.over = True
        try:
            self._outcome.set_result(connection)
        except InvalidStateError:  # it was given up
            connection.close()

    def _fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # it has ended
            self._outcome.set_exception(error)
