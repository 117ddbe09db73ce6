"""Data of the Secret of a managed tier's users at each stage of rotation (`plan.redis.passwords`).

Beside `password` there may be `next-password` or `previous-password`, the same for each user; the ACL file admits all
that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from kvstrata.contract.wire import digest_bytes
from kvstrata.model.redis.credentials import PasswordFacts
from kvstrata.objects import names
from kvstrata.objects.redis.users import MARKER_PREFIX, user_words
from kvstrata.objects.secret import PASSWORD_KEYS, redis_auth_data

Draw = Callable[[], str]
"""Returns a fresh ASCII password of at least 128 random bits."""

Values = Mapping[str, bytes]
_FOLLOWING, _PREVIOUS = "next-", "previous-"


def made(domain_id: str, there: Values, draw: Draw) -> dict[str, bytes]:
    current = {user: _text(there.get(key)) or draw() for user, key in PASSWORD_KEYS.items()}
    return _data(domain_id, current, _all(there, _FOLLOWING), _all(there, _PREVIOUS))


def staged(domain_id: str, there: Values, draw: Draw) -> dict[str, bytes]:
    return _data(domain_id, _all(there, ""), {user: draw() for user in PASSWORD_KEYS}, {})


def promoted(domain_id: str, there: Values) -> dict[str, bytes]:
    return _data(domain_id, _all(there, _FOLLOWING), {}, _all(there, ""))


def retired(domain_id: str, there: Values) -> dict[str, bytes]:
    return _data(domain_id, _all(there, ""), {}, {})


def to_try(there: Values, user: str) -> tuple[str, ...]:
    """Return the passwords to try as `user`, in order: a server with an older file has only the previous one."""
    several = (_all(there, prefix).get(user) for prefix in ("", _PREVIOUS, _FOLLOWING))
    return tuple(password for password in several if password)


def password_facts(
    there: Values, *, lineage: str, changed_at: datetime, rotated_at: datetime, honoured: str
) -> PasswordFacts:
    users = user_words(there.get(names.ACL_FILE_KEY, b""))
    sets = [_all(there, prefix) for prefix in ("", _FOLLOWING, _PREVIOUS)]
    held = {user: {_digest(one[user]) for one in sets if user in one} for user in PASSWORD_KEYS}
    admitted = {user: admission(words) for user, words in users.items() if not user.startswith(MARKER_PREFIX)}
    current, following, previous = ({user: _digest(text) for user, text in one.items()} for one in sets)
    return PasswordFacts(
        admitted=admitted,
        current=current,
        following=following,
        previous=previous,
        marker=next((user for user in users if user.startswith(MARKER_PREFIX)), ""),
        made=lineage,
        changed_at=changed_at,
        rotated_at=rotated_at,
        honoured=honoured,
        whole=len(current) == len(PASSWORD_KEYS)
        and all(admitted.get(user) == frozenset({"on", *digests}) for user, digests in held.items()),
    )


def admission(words: tuple[str, ...]) -> frozenset[str]:
    """Return the words that decide admission: `on`, `nopass`, and password digests."""
    return frozenset(word.removeprefix("#") for word in words if word in ("on", "nopass") or word.startswith("#"))


def _data(
    domain_id: str, current: Mapping[str, str], following: Mapping[str, str], previous: Mapping[str, str]
) -> dict[str, bytes]:
    admitted = {
        user: tuple(one[user] for one in (current, following, previous) if user in one) for user in PASSWORD_KEYS
    }
    others = {_FOLLOWING: following, _PREVIOUS: previous}
    return redis_auth_data(domain_id, admitted) | {
        f"{prefix}{PASSWORD_KEYS[user]}": text.encode() for prefix, one in others.items() for user, text in one.items()
    }


def _all(there: Values, prefix: str) -> dict[str, str]:
    """Return the passwords of one set by user; of next and previous ones all or none."""
    found = {user: _text(there.get(f"{prefix}{key}")) for user, key in PASSWORD_KEYS.items()}
    usable = {user: text for user, text in found.items() if text}
    return usable if not prefix or len(usable) == len(PASSWORD_KEYS) else {}


def _text(value: bytes | None) -> str:
    """Return a usable password, or nothing: the operator writes only ASCII."""
    return value.decode() if value and value.isascii() else ""


def _digest(password: str) -> str:
    return digest_bytes(password.encode())
