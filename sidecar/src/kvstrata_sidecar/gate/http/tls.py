"""Certificates from mounted Secrets, reloaded when Kubernetes replaces them."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvstrata_sidecar.gate import log

CERTIFICATE = "tls.crt"
PRIVATE_KEY = "tls.key"
AUTHORITY = "ca.crt"


class ServerTls:
    def __init__(self, directory: Path, *, client_authority: bool) -> None:
        self._directory = directory
        self._client_authority = client_authority
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        if client_authority:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._loaded = self._stamps()
        self._load()

    def reload_if_changed(self) -> bool:
        """Reload changed files; a broken pair leaves the old one in use and is tried again."""
        stamps = self._stamps()
        if stamps == self._loaded or not stamps:
            return False
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            log.warning("the new certificate cannot be used", directory=str(self._directory), problem=str(error))
            return False
        self._loaded = stamps
        log.info("a new certificate is in use", directory=str(self._directory))
        return True

    def _load(self) -> None:
        self.context.load_cert_chain(self._directory / CERTIFICATE, self._directory / PRIVATE_KEY)
        if self._client_authority:
            # A context only adds authorities: a replaced one stays trusted until the next start.
            self.context.load_verify_locations(self._directory / AUTHORITY)

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        names = (CERTIFICATE, PRIVATE_KEY, AUTHORITY) if self._client_authority else (CERTIFICATE, PRIVATE_KEY)
        try:
            stats = [(self._directory / name).stat() for name in names]
        except OSError:
            return ()
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)
