"""API keys of a model's callers: a Secret has the SHA-256 of each key with its tenant, never a key.

`keys.json` is `{"keys": [{"tenant": "acme", "sha256": "<hex of sha256(key)>"}]}`. An entry may have `expires`, the time
from which gates refuse the key (RFC 3339 in UTC, `2027-01-31T12:00:00Z`). Gates ignore an entry's other fields.
"""

from __future__ import annotations

import re
from datetime import datetime

KEYS_DATA_KEY = "keys.json"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", re.ASCII)


def expiry_s(text: object) -> float:
    """Return the time of `expires` in seconds since the epoch. Raises ValueError for anything but such a time."""
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise ValueError("no time of RFC 3339 in UTC")
    return datetime.fromisoformat(text).timestamp()


def api_keys_secret(model: str) -> str:
    """Return the name of the Secret of a CachedModel that names none."""
    return f"{model}-api-keys"
