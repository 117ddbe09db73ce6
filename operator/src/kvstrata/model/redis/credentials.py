"""Passwords and certificates of managed servers, as digests and moments: never the values themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class Stage(StrEnum):
    """Where the passwords of a Secret are in their life."""

    CURRENT = "Current"
    STAGED = "Staged"
    OVERLAP = "Overlap"


@dataclass(frozen=True, slots=True)
class PasswordFacts:
    """What the Secret of a managed tier's users says.

    `admitted` gives by the user what admits it by the ACL file: `on`, and the digests (SHA-256, hexadecimal) of
    passwords. `current`, `following` and `previous` give the digest of the password that is used, will be and was.
    `marker` is the name of the user that stands for what all users may. `made` tells one line of passwords from
    another: it stays when they are rotated, and differs when a Secret that was lost was made anew. `changed_at` is when
    the Secret came into its stage, `rotated_at` since when the current passwords are used, `honoured` which wish to
    rotate was last granted. `whole` is whether the Secret has every password and admits exactly those.
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
        """Where the passwords are in their life: it follows from which there are, so that nothing can contradict it."""
        if self.following:
            return Stage.STAGED
        return Stage.OVERLAP if self.previous else Stage.CURRENT


@dataclass(frozen=True, slots=True)
class TlsFacts:
    """What a Secret with a server certificate says.

    `problem` says why servers cannot use it, `missing` which of its keys there are not. `fingerprint` is the
    certificate's (SHA-256, hexadecimal), `trusted` those of the authorities in `ca.crt`, `names` what it is issued for
    and `renew_at` when it should be replaced. `authority` is the operator's own, and `issued_by_it` whether it signed
    the certificate. `changed_at` is when the operator last wrote the Secret.
    """

    fingerprint: str
    not_after: datetime | None = None
    trusted: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    authority: str = ""
    issued_by_it: bool = True
    renew_at: datetime | None = None
    changed_at: datetime | None = None
    missing: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ServerCredentials:
    """What one managed server has, as it said itself; nothing but `reason` and `message` if it did not answer.

    `admitted` gives by the user what admits it: `on`, `nopass`, and digests of passwords; `marked` whether its users
    may what the Secret says, `master` the digest of the password with which it follows a primary (empty for none) and
    `certificate` the fingerprint of the one that it shows, None in plain text.
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
        """Whether it let the operator in and answered everything."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class CredentialLook:
    """One look at all servers of a managed tier, by name, and at the certificate of its user's own Secret, if any.

    `unread` is why a Secret could not be read, empty if all could.
    `told` is whether servers were told something right before: what differs still takes its time.
    """

    servers: Mapping[str, ServerCredentials]
    at: datetime
    tls: TlsFacts | None = None
    told: bool = False
    unread: str = ""
