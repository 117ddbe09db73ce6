"""Opens connections to a tier: TCP, TLS, credentials, all by deadline."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata_sidecar.adapter.params import Endpoint, TlsParams
from kvstrata_sidecar.adapter.redis.client.connection import (
    AccessError,
    Connection,
    PeerTimeoutError,
    TransportError,
    reason,
)
from kvstrata_sidecar.adapter.redis.client.slots import Address

OP_CLEANSE_PLAINTEXT = 1 << 1
"""OpenSSL's SSL_OP_CLEANSE_PLAINTEXT (since 3.0), which Python does not name: overwrites read bytes in the buffer.
Otherwise each connection would keep up to 16 KB of the last block that it loaded."""


def dial(
    endpoint: Endpoint | Address,
    *,
    tls: TlsParams | None,
    username: str | None,
    password_file: str | None,
    connect_timeout_s: float,
    io_timeout_s: float,
) -> Connection:
    """Return an authenticated connection. All files are read now, so that rotated ones count.

    Credentials are sent only after the server's certificate was verified. Raises AccessError if they are missing or
    refused, TransportError or ReplyError for other failures.
    """
    password = None if password_file is None else read_password(password_file)
    try:
        raw = socket.create_connection((endpoint.host, endpoint.port), timeout=connect_timeout_s)
    except OSError as error:
        raise TransportError(f"cannot connect to {endpoint}: {reason(error)}") from error
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            proves = endpoint.proves if isinstance(endpoint, Address) else endpoint.host
            raw = _start_tls(raw, tls, tls.server_name or proves, connect_timeout_s)
        connection = Connection(raw, io_timeout_s)
        connection.greet(username, password, give_up_after_s=connect_timeout_s + io_timeout_s)
    except AccessError as error:
        raw.close()
        raise AccessError(f"{endpoint}: {error}") from error
    except TransportError as error:
        raw.close()
        # With TLS 1.3 a server refuses a client's certificate only after the handshake.
        if isinstance(error.__cause__, ssl.SSLError) and "ALERT" in str(error):
            raise AccessError(f"{endpoint}: the server refuses this client or its certificate: {error}") from error
        raise TransportError(f"{endpoint}: {error}") from error
    except (OSError, ValueError) as error:
        raw.close()
        raise TransportError(f"{endpoint}: {reason(error)}") from error
    except BaseException:
        raw.close()
        raise
    return connection


def read_password(path: str) -> bytes:
    """Return the password in a file, without a line end. Raises AccessError if there is none."""
    try:
        password = Path(path).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise AccessError(f"the password file {path} cannot be read: {reason(error)}") from error
    if not password:
        raise AccessError(f"the password file {path} is empty")
    return password


def _start_tls(raw: socket.socket, tls: TlsParams, server_name: str, timeout_s: float) -> ssl.SSLSocket:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except OSError as error:
        raise AccessError(f"the CA file {tls.ca_file} cannot be read: {reason(error)}") from error
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except OSError as error:
            raise AccessError(f"the certificate {tls.cert_file} cannot be used: {reason(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= OP_CLEANSE_PLAINTEXT
    raw.setblocking(False)
    secured = context.wrap_socket(raw, server_hostname=server_name, do_handshake_on_connect=False)
    try:
        _shake_hands(secured, time.monotonic() + timeout_s)
    except ssl.SSLCertVerificationError as error:
        secured.close()
        raise AccessError(f"the server's certificate is not trusted: {error.verify_message}") from error
    except BaseException:
        secured.close()
        raise
    return secured


def _shake_hands(secured: ssl.SSLSocket, give_up_at_s: float) -> None:
    """Run the TLS handshake with one deadline for all of it: a peer that sends a byte a second gains no time."""
    while True:
        left_s = give_up_at_s - time.monotonic()
        if left_s <= 0:
            raise PeerTimeoutError("the TLS handshake timed out")
        try:
            secured.do_handshake()
            return
        except ssl.SSLWantReadError:
            _wait(secured, select.POLLIN, left_s)
        except ssl.SSLWantWriteError:
            _wait(secured, select.POLLOUT, left_s)


def _wait(waited_for: socket.socket, event: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(waited_for, event)
    poller.poll(timeout_s * 1000)


class Dialing:
    """A connection opened by its own thread, because name resolution cannot be bounded or interrupted otherwise."""

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._open_connection = open_connection
        self._changed = threading.Condition()
        self._outcome: Connection | Exception | None = None
        self._given_up: str | None = None
        threading.Thread(target=self._run, name="kvs-dial", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._outcome is not None

    def wait(self, timeout_s: float) -> Connection:
        """Return the connection. Raises the error of opening it, PeerTimeoutError when it was given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None or self._given_up is not None, timeout_s)
            outcome = self._outcome
            if outcome is None or self._given_up is not None:
                self._given_up = self._given_up or "connecting took too long"
                if isinstance(outcome, Connection):
                    outcome.close()
                raise PeerTimeoutError(self._given_up)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def give_up(self, why: str) -> None:
        with self._changed:
            self._given_up = self._given_up or why
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            outcome: Connection | Exception = self._open_connection()
        except Exception as error:
            outcome = error
        with self._changed:
            self._outcome = outcome
            if self._given_up is not None and isinstance(outcome, Connection):
                outcome.close()
            self._changed.notify_all()
