"""Passwords and certificates of managed servers, as digests and times, never as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class Stage(StrEnum):
    CURRENT = "Current"
    STAGED = "Staged"
    OVERLAP = "Overlap"


@dataclass(frozen=True, slots=True)
class PasswordFacts:
    """Content of the Secret of a managed tier's users.

    `admitted` gives each user's `on` and password digests (SHA-256, hexadecimal) by the ACL file; `current`,
    `following` and `previous` map users to digests. `marker` is the name of the user that represents the permissions of
    all users. `made` stays through rotations and differs when a lost Secret was recreated. `changed_at` is when the
    stage began, `rotated_at` since when the current passwords are used, `honoured` the last rotation request that was
    granted. `whole`: the Secret has every password and admits exactly those.
    """

    admitted: Mapping[str, frozenset[str]]
    current: Mapping[str, str]
    following: Mapping[str, str]
    previous: Mapping[str, str]
    marker: str
    made: str
    changed_at: datetime
    rotated_at: datetime
    honoured: str = ""
    whole: bool = True

    @property
    def stage(self) -> Stage:
        """Derived from the passwords that exist, so that it cannot contradict them."""
        if self.following:
            return Stage.STAGED
        return Stage.OVERLAP if self.previous else Stage.CURRENT


@dataclass(frozen=True, slots=True)
class TlsFacts:
    """Content of a Secret with a server certificate.

    `problem` is the reason why servers cannot use it. `fingerprint` is the certificate's (SHA-256, hexadecimal),
    `trusted` those of the authorities in `ca.crt`, `names` its subjects. `authority` is the operator's own,
    `issued_by_it` whether it signed. `changed_at` is when the operator last wrote the Secret.
    """

    fingerprint: str
    not_after: datetime | None = None
    trusted: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    authority: str = ""
    issued_by_it: bool = True
    renew_at: datetime | None = None
    changed_at: datetime | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ServerCredentials:
    """Credentials that one managed server reported; only `reason` and `message` are set if it did not answer.

    `admitted` gives each user's `on`, `nopass` and password digests; `marked`: its users' permissions match the Secret.
    `master` is the digest of the password with which it follows a primary (empty for none), `certificate` the
    fingerprint of its own, None in plain text.
    """

    server: str
    reason: str = ""
    message: str = ""
    admitted: Mapping[str, frozenset[str]] = field(default_factory=dict)
    marked: bool = False
    master: str = ""
    certificate: str | None = None

    @property
    def answered(self) -> bool:
        """Whether it admitted the operator and answered everything."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class CredentialLook:
    """One look at all servers of a managed tier, by name, and at the certificate of its user's own Secret, if any.

    `unread` is why a Secret could not be read. `updated`: servers were updated just before, so differences may be
    transient.
    """

    servers: Mapping[str, ServerCredentials]
    at: datetime
    tls: TlsFacts | None = None
    updated: bool = False
    unread: str = ""
