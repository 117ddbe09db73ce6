"""The users of a managed Redis server, as the lines of its ACL file.

The file holds digests of passwords. The default user is the data plane's: it reaches its own domain's keys only, and
cannot list keys, because SCAN, RANDOMKEY and DBSIZE would show those of others. It may send scripts, in which the
server checks every command and key as if it were sent alone. The operator's user reaches no key.
"""

from __future__ import annotations

import hashlib

from kvstrata.contract.keys import domain_pattern
from kvstrata.contract.scripts import COMMANDS

from .tierlinks import OPERATOR_USER

_DATA_RULES = " ".join(("-@all", *(f"+{command}" for command in COMMANDS)))
_OPERATOR_RULES = "-@all +auth +ping +info +config|get +memory|stats +memory|purge +time +wait"
"""Commands by name, never by category: `@connection` holds CLIENT TRACKING, which tells every key that anybody touches,
and `@scripting` holds SCRIPT FLUSH and FUNCTION, which reach every domain's scripts."""


def users_acl(domain_id: str, password: str, operator_password: str) -> bytes:
    """Return the ACL file. The passwords enter it as SHA-256, which is safe for random ones of 128 bits or more."""
    lines = (
        ("user", "default", "on", _digest(password), f"~{domain_pattern(domain_id)}", "resetchannels", _DATA_RULES),
        ("user", OPERATOR_USER, "on", _digest(operator_password), "resetkeys", "resetchannels", _OPERATOR_RULES),
    )
    return ("\n".join(" ".join(line) for line in lines) + "\n").encode()


def what_users_may(acl: bytes) -> str:
    """Return what an ACL file allows to whom, without the digests: it differs when another version, or for another
    domain, would write another file."""
    lines = acl.decode(errors="replace").splitlines()
    return "\n".join(" ".join(word for word in line.split() if not word.startswith("#")) for line in lines)


def _digest(password: str) -> str:
    return "#" + hashlib.sha256(password.encode()).hexdigest()
