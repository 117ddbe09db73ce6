"""`kubectl kvstrata keys add|list|remove`: API keys of a model's callers.

A key is printed once and stored nowhere: the model's Secret has its SHA-256 alone. Exit
codes: 0 done; 1 no such key; 2 it cannot be done, for the printed reason.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from kvstrata.cli.kubectl import Cluster, KubectlError, add_cluster, cluster, unserved
from kvstrata.cli.text import CommandError, table
from kvstrata.contract.policy.api_keys import KEYS_DATA_KEY, TIME_FORMAT, api_keys_secret

DONE, NO_SUCH_KEY, IMPOSSIBLE = range(3)
KEY_PREFIX = "kvs_"
"""Beginning of every key, by which scanners for leaked secrets find it."""
KEY_BYTES = 32
SHOWN_DIGITS = 8
LEAST_DIGITS = 4
MAX_DAYS = 36_500
ATTEMPTS = 20
"""Attempts to write a Secret that others write, too."""

Entry = dict[str, Any]
Change = Callable[[list[Entry]], list[Entry]]


class NoSuchKeyError(CommandError):
    """No key, or several, are meant; the message names those that exist."""

    code = NO_SUCH_KEY


def add_to(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="subcommand", required=True)
    for name, run, what in (
        ("add", _add, "make a key, print it once, and let the gates of a model accept it"),
        ("list", _list, "list the keys of a model by their hashes"),
        ("remove", _remove, "let the gates of a model refuse keys from now on"),
    ):
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        command.add_argument("model", metavar="MODEL", help="name of the CachedModel")
        add_cluster(command, None, "the model's namespace (default: that of kubectl's context)")
        command.add_argument("--tenant", required=name == "add", help="the callers' tenant")
        if name == "add":
            command.add_argument(
                "--days",
                type=_days,
                metavar="N",
                help="days after which gates refuse the key (default: it never expires)",
            )
            command.add_argument("--note", help="text beside the hash, for example the application that has the key")
        if name == "remove":
            command.add_argument("--hash", metavar="DIGITS", help="beginning of the key's hash, as `list` shows it")
        command.set_defaults(run=run, failed=IMPOSSIBLE)


def _days(text: str) -> int:
    days = int(text)
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"not between 1 and {MAX_DAYS}")
    return days


def _add(options: argparse.Namespace) -> int:
    where = cluster(options)
    tenant = options.tenant
    if not tenant or tenant != tenant.strip() or not tenant.isprintable():
        raise CommandError("--tenant takes printable characters without white space at the ends")
    namespace, secret = _secret_of(where, options.model)
    objects = where.get("tenantcachepolicies,cachedomains")["items"]
    warning = unserved(objects) or policy_warning(objects, tenant, options.model, namespace)
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    added = entry(tenant, key, datetime.now(UTC), options.note, options.days)
    _write(where, secret, lambda entries: [*entries, added])
    sys.stdout.write(f"{key}\n")
    sys.stdout.flush()
    until = f" and until {added['expires']}" if options.days else ""
    sys.stderr.write(
        f"{warning}Secret {secret} has the hash {added['sha256'][:SHOWN_DIGITS]} of the key, which is not shown again; "
        f"gates accept it within seconds{until}\n"
    )
    return DONE


def _list(options: argparse.Namespace) -> int:
    where = cluster(options)
    found = _read(where, _secret_of(where, options.model)[1])
    sys.stdout.write(listed(one for one in entries_of(found) if options.tenant in (None, one.get("tenant"))))
    return DONE


def _remove(options: argparse.Namespace) -> int:
    if options.tenant is None and options.hash is None:
        raise CommandError("name the keys to remove by --tenant, --hash or both; `list` shows them")
    removed: list[Entry] = []

    def without(entries: list[Entry]) -> list[Entry]:
        removed[:] = meant(entries, options.tenant, options.hash)
        return [one for one in entries if one not in removed]

    where = cluster(options)
    _write(where, _secret_of(where, options.model)[1], without)
    for one in removed:
        sys.stderr.write(f"removed {one['sha256'][:SHOWN_DIGITS]} of {one['tenant']}; gates refuse it within seconds\n")
    return DONE


def entry(tenant: str, key: str, now: datetime, note: str | None, days: int | None = None) -> Entry:
    """Return the entry of `keys.json` for a new key, which expires after `days`."""
    made = {
        "tenant": tenant,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "created": now.strftime(TIME_FORMAT),
    }
    if days:
        made["expires"] = (now + timedelta(days=days)).strftime(TIME_FORMAT)
    return made | ({"note": note} if note else {})


def meant(entries: Sequence[Entry], tenant: str | None, digits: str | None) -> list[Entry]:
    """Return the entries to remove: all of a tenant, or the one whose hash begins with `digits`. Raises
    NoSuchKeyError."""
    wanted = (digits or "").lower()
    if digits is not None and len(wanted) < LEAST_DIGITS:
        raise NoSuchKeyError(f"--hash takes at least {LEAST_DIGITS} digits of the hash")
    found = [
        one
        for one in entries
        if tenant in (None, one.get("tenant")) and str(one.get("sha256", "")).lower().startswith(wanted)
    ]
    if not found:
        raise NoSuchKeyError(f"no such key; there are:\n{listed(entries)}".rstrip())
    if digits is not None and len(found) > 1:
        raise NoSuchKeyError(f"several hashes begin with {digits}, give more digits:\n{listed(found)}".rstrip())
    return found


def policy_warning(objects: Iterable[Any], tenant: str, model: str, namespace: str) -> str:
    """Return what happens to requests of a tenant without a policy for the model; empty if it has one. A policy that
    selects models by label counts as one."""
    refused = False
    for one in objects:
        spec = one.get("spec") or {}
        named = (spec.get("models") or {}).get("names")
        if one["kind"] == "TenantCachePolicy" and spec.get("tenant") == tenant and (not named or model in named):
            return ""
        refused |= one["kind"] == "CacheDomain" and spec.get("unknownTenants") == "Refuse"
    happens = "are refused (403)" if refused else "are answered and reuse nothing"
    return (
        f"warning: no TenantCachePolicy of namespace {namespace} is for tenant {tenant} and CachedModel {model}: until "
        f"there is one, its requests {happens}\n"
    )


def listed(entries: Iterable[Entry]) -> str:
    """Return the list that people read: no key, and of each hash its first digits."""
    rows: list[Sequence[str]] = [("TENANT", "HASH", "CREATED", "EXPIRES", "NOTE")]
    for one in entries:
        digits = str(one.get("sha256", ""))[:SHOWN_DIGITS]
        texts = (one.get("tenant"), digits, *(one.get(name) for name in ("created", "expires", "note")))
        rows.append(tuple("".join(c for c in str(text or "-") if c.isprintable()) for text in texts))
    return table(*rows)


def entries_of(secret: Any) -> list[Entry]:
    """Return the entries of the Secret, none if it is absent. Raises CommandError if it is malformed."""
    data = (secret or {}).get("data") or {}
    if KEYS_DATA_KEY not in data:
        return []
    try:
        found = json.loads(base64.b64decode(data[KEYS_DATA_KEY]))["keys"]
        if not all(isinstance(one, dict) for one in found):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        name = secret["metadata"]["name"]
        raise CommandError(
            f'Secret {name}: {KEYS_DATA_KEY} is not of the form {{"keys": [{{"tenant": …, "sha256": …}}]}}; gates '
            "use its last good content. Correct it, or delete the Secret, which revokes its keys"
        ) from None
    return list(found)


def with_entries(secret: Any, name: str, entries: Sequence[Entry]) -> Any:
    """Return the Secret with these entries; a new one if `secret` is None. Everything else of it stays."""
    made = secret or {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "kvstrata"}},
        "type": "Opaque",
    }
    text = json.dumps({"keys": list(entries)}, indent=2).encode()
    return {**made, "data": {**(made.get("data") or {}), KEYS_DATA_KEY: base64.b64encode(text).decode()}}


def _secret_of(where: Cluster, model: str) -> tuple[str, str]:
    """Return the model's namespace, and the name of its Secret."""
    models = {one["metadata"]["name"]: one for one in where.get("cachedmodels")["items"]}
    if model not in models:
        place = f"namespace {where.namespace}" if where.namespace else "the namespace of kubectl's context"
        there = f"there: {', '.join(sorted(models))}" if models else "there is none; -n names another namespace"
        raise CommandError(f"CachedModel {model} does not exist in {place} ({there})")
    found = models[model]
    chosen = ((found["spec"].get("gate") or {}).get("authentication") or {}).get("apiKeys") or {}
    named = (chosen.get("secretRef") or {}).get("name")
    return found["metadata"]["namespace"], named or api_keys_secret(model)


def _read(where: Cluster, name: str) -> Any:
    """Return the Secret, None if it does not exist."""
    found = where.run("get", "secret", name, "--ignore-not-found", "--output=json")
    return json.loads(found) if found.strip() else None


def _write(where: Cluster, name: str, change: Change) -> None:
    """Change the entries of the Secret. A write at the same time by others makes this one start again, so that none is
    lost."""
    for _ in range(ATTEMPTS):
        secret = _read(where, name)
        wanted = with_entries(secret, name, change(entries_of(secret)))
        try:
            where.run("create" if secret is None else "replace", "--filename=-", stdin=json.dumps(wanted).encode())
            return
        except KubectlError as error:
            if not any(reason in str(error) for reason in ("(Conflict)", "(AlreadyExists)")):
                raise
        time.sleep(random.uniform(0.05, 0.5))  # noqa: S311  (no secret: it spreads writers)
    raise CommandError(f"Secret {name} is written by others all the time: try again")
