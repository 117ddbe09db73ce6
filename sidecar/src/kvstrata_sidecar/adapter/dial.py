"""Opening a connection to a tier: TCP, TLS, credentials, all by deadline."""

from __future__ import annotations

import select
import socket
import ssl
import time
from pathlib import Path

from .params import Endpoint, TlsParams
from .resp import AccessError, Connection, PeerTimeoutError, TransportError, reason

OP_CLEANSE_PLAINTEXT = 1 << 1
"""OpenSSL's SSL_OP_CLEANSE_PLAINTEXT (since 3.0), which Python does not name: what was read is overwritten in the
connection's buffer. Else each connection would keep up to 16 KB of the last block that it loaded."""


def dial(
    endpoint: Endpoint,
    *,
    tls: TlsParams | None,
    username: str | None,
    password_file: str | None,
    connect_timeout_s: float,
    io_timeout_s: float,
) -> Connection:
    """Return a connection that is authenticated and answered a PING.

    The CA and password files are read now, so that rotated ones count. Raises AccessError if they are missing or the
    server refuses them, TransportError or ReplyError for everything else that stands in the way.
    """
    password = None if password_file is None else read_password(password_file)
    try:
        raw = socket.create_connection((endpoint.host, endpoint.port), timeout=connect_timeout_s)
    except OSError as error:
        raise TransportError(f"cannot connect to {endpoint}: {reason(error)}") from error
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            raw = _start_tls(raw, endpoint, tls, connect_timeout_s)
        connection = Connection(raw, io_timeout_s)
        connection.greet(username, password, give_up_after_s=connect_timeout_s + io_timeout_s)
    except AccessError as error:
        raw.close()
        raise AccessError(f"{endpoint}: {error}") from error
    except TransportError as error:
        raw.close()
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


def _start_tls(raw: socket.socket, endpoint: Endpoint, tls: TlsParams, timeout_s: float) -> ssl.SSLSocket:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except OSError as error:
        raise AccessError(f"the CA file {tls.ca_file} cannot be read: {reason(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= OP_CLEANSE_PLAINTEXT
    raw.setblocking(False)
    secured = context.wrap_socket(raw, server_hostname=tls.server_name or endpoint.host, do_handshake_on_connect=False)
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
