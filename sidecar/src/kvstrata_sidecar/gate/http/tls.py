"""Certificates of the gate's ports. Files that were replaced are built into a context of their own and tried in a
handshake before that takes the place of the one in use, which never changes: OpenSSL would keep a certificate without
its key, and authorities that are gone.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata_sidecar.gate import log

CHECK_S = 10.0
RETRY_S = 1.0
"""Pauses between two looks at certificates, and after a connection to the own port that failed."""

_CONNECT_S = 5.0
_NO_CHECK_TIME = 1 << 21
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name: the dates are judged here, again and again."""

_HANDSHAKE_TURNS = 4
"""More than the flights of a handshake in TLS 1.2 or 1.3."""

Stamps = tuple[tuple[int, int], ...]
_FORM = "%Y-%m-%dT%H:%M:%SZ"


class ServerTls:
    """A certificate from a mounted Secret.

    `context` is for the next connections; without a usable pair from the start it refuses each handshake. `caller` is
    the context of a client that trusts this certificate alone. `problem` is empty, or why the files are not in use, or
    the certificate in use is not valid now.
    """

    def __init__(self, directory: Path, *, client_authority: bool, now_s: Callable[[], float] = time.time) -> None:
        names = ("tls.crt", "tls.key", "ca.crt") if client_authority else ("tls.crt", "tls.key")
        self._directory, self._files, self._now_s = directory, [directory / name for name in names], now_s
        self._read: Stamps | None = None
        self._valid_s: tuple[float, float] | None = None
        self.context, self.caller = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.problem = ""
        self.reload_if_changed()

    def reload_if_changed(self) -> bool:
        """Replace the context if files changed and it works; else keep the one in use, and try them again next time."""
        problem, changed = "", False
        try:
            stamps = stamps_of(*self._files)
            if stamps != self._read:
                context, caller = self._made()
                valid_s = _tried(context, caller)
                problem = self._untimely(valid_s)
                if not problem or self._valid_s is None:
                    self.context, self.caller, self._valid_s, self._read = context, caller, valid_s, stamps
                    changed = True
        except (OSError, ValueError) as error:
            problem = reason_of(error)
        if self._valid_s is None:
            problem = f"the certificate in {self._directory} cannot be used, and there is no other: {problem}"
        elif problem and not changed:
            problem = f"the new certificate in {self._directory} cannot be used, and the former one is: {problem}"
        elif problem := self._untimely(self._valid_s):
            problem = f"the certificate in {self._directory} is in use, and callers refuse it: {problem}"
        if problem != self.problem or changed:
            log.event("warning" if problem else "info", "certificate", directory=str(self._directory), problem=problem)
        self.problem = problem
        return changed

    def _made(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Raises OSError, of which ssl.SSLError is one, also for a certificate with another key."""
        certificate, key, *authorities = self._files
        context, caller = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(certificate, key)
        for authority in authorities:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(authority)
        caller.check_hostname = False
        caller.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        caller.load_verify_locations(certificate)
        return context, caller

    def _untimely(self, valid_s: tuple[float, float]) -> str:
        since, until = (time.strftime(_FORM, time.gmtime(one)) for one in valid_s)
        return "" if valid_s[0] <= self._now_s() <= valid_s[1] else f"it is valid from {since} until {until}"


def stamps_of(*files: Path) -> Stamps:
    """Return the identity of each file, which differs once Kubernetes replaced it. Raises OSError."""
    return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in files))


class OwnPort:
    """Whether callers can connect. `problem` is why a connection to the gate's own port failed with its handshake, or
    empty; after a success, one failure may be chance and does not count."""

    def __init__(self) -> None:
        self.problem = "its own port was not tried yet"
        self._failures = 1

    async def try_now(self, address: tuple[str, int], tls: ServerTls | None) -> bool:
        """Return whether it succeeded; a port of -1, which is closed, needs no success. All addresses (`::`) are tried
        by that of IPv4, which a pod without IPv6 has, too."""
        host, port = address
        host = "127.0.0.1" if host == "::" else host
        problem = ""
        try:
            if port >= 0:
                async with asyncio.timeout(_CONNECT_S):
                    _, writer = await asyncio.open_connection(host, port, ssl=tls.caller if tls is not None else None)
                writer.close()
        except TimeoutError:
            problem = f"no handshake within {_CONNECT_S:.0f} s"
        except (OSError, ValueError) as error:
            problem = tls.problem if tls is not None and tls.problem else reason_of(error)
        self._failures = self._failures + 1 if problem else 0
        if self._failures != 1:
            self.problem = problem
        return not problem


def _tried(context: ssl.SSLContext, caller: ssl.SSLContext) -> tuple[float, float]:
    """Return the dates of the certificate that a caller gets in a handshake, in Unix time. Raises ssl.SSLError if it
    gets none or does not accept it, as with a key on a curve that clients do not use."""
    sent, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = caller.wrap_bio(answered, sent)
    server = context.wrap_bio(sent, answered, server_side=True)
    for _ in range(_HANDSHAKE_TURNS):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            if side is client:  # The server may still wait for a certificate, which only the operator has.
                shown = client.getpeercert() or {}
                dates = (str(shown[name]) for name in ("notBefore", "notAfter"))
                since_s, until_s = map(ssl.cert_time_to_seconds, dates)
                return since_s, until_s
    raise ssl.SSLError("the handshake does not end")


def reason_of(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(error.filename).name}"
    return str(error)
