"""Which keyspace a tenant gets, and which API key a request carries."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata.contract.messages.engine_identity import NO_FINGERPRINT, UNGOVERNED
from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata.contract.policy.rate import UNLIMITED, RateLimit
from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.policy.api_keys import KeyRing, MalformedKeysError, credential
from kvstrata_sidecar.gate.policy.grants import Grant, PoolSubject, decide, rate_limit, still_granted, warming_version

from .world import entry, keyspace


def version(name: str, chunk: int = 0) -> PoolVersion:
    return PoolVersion(keyspace(name), "r", PoolState.PUBLISHED, pack_hashes([bytes([chunk]) * 32]), ("shared",))


def bundle(*entries: Entry, versions: tuple[PoolVersion, ...] = (), **rules: Any) -> Bundle:
    root = Root("d" * 16, "tiny", "uid", 1, 1, Rules(**rules), ())
    pools = {"docs": PoolShard("docs", "uid-docs", versions), "more": PoolShard("more", "uid-more", ())}
    return Bundle(root, {one.tenant: one for one in entries}, pools)


def salt() -> str:
    return "random"


KEYSPACE = Grant(keyspace("acme"), True)


@pytest.mark.parametrize(
    ("rules", "fresh", "fields", "grant"),
    [
        ({}, True, {}, KEYSPACE),
        ({"on_stale": "Fence"}, True, {}, KEYSPACE),
        ({"on_stale": "Fence"}, False, {}, Grant("random", False, "stale")),
        ({"on_stale": "ServeStale"}, False, {}, KEYSPACE),
        ({"reuse": "Disabled"}, True, {}, Grant("random", False, "reuse_off")),
        ({"reuse": "Disabled", "on_stale": "Fence"}, False, {}, Grant("random", False, "reuse_off")),
        ({}, True, {"suspended": True}, Grant("random", False, "suspended")),
        ({"reuse": "Disabled"}, False, {"suspended": True}, Grant("random", False, "suspended")),
        ({"unknown_tenants": "Refuse"}, True, {}, KEYSPACE),
    ],
    ids=str,
)
def test_a_tenant_with_a_policy(rules: dict[str, Any], fresh: bool, fields: dict[str, Any], grant: Grant) -> None:
    assert decide(bundle(entry("acme", **fields), **rules), "acme", fresh, "", salt) == grant


@pytest.mark.parametrize("why", [UNGOVERNED, NO_FINGERPRINT])
def test_a_pod_that_must_not_reuse_gives_random_salts_for_its_reason(why: str) -> None:
    assert decide(bundle(entry("acme")), "acme", True, why, salt) == Grant("random", False, why)


def test_a_tenant_without_a_policy() -> None:
    assert decide(bundle(entry("acme")), "globex", True, "", salt) == Grant("random", False, "unknown_tenant")
    with pytest.raises(Refusal) as refusal:
        decide(bundle(unknown_tenants="Refuse"), "globex", True, "", salt)
    assert (refusal.value.status, refusal.value.reason) == (403, Reason.UNKNOWN_TENANT)
    assert json.loads(refusal.value.body())["error"]["type"] == "permission_error"
    with pytest.raises(Refusal) as refusal:
        decide(None, "acme", True, "", salt)
    assert (refusal.value.status, refusal.value.reason, refusal.value.retry_after_s) == (503, Reason.NO_POLICY, 1)


def test_a_limit_that_a_policy_does_not_set_is_that_of_the_model() -> None:
    made = bundle(entry("acme", rate=RateLimit(requests_per_minute=9)), entry("globex"), rate=RateLimit(1, 2))
    assert [rate_limit(made, name) for name in ("acme", "globex", "unknown")] == [
        RateLimit(9, 2), RateLimit(1, 2), RateLimit(1, 2),
    ]  # fmt: skip
    assert rate_limit(bundle(entry("acme")), "acme") == rate_limit(None, "acme") == UNLIMITED


def test_a_warm_up_writes_under_the_version_with_its_manifest() -> None:
    first, second = version("docs-1", 1), version("docs-2", 2)
    one, two = first.manifest, second.manifest
    made = bundle(versions=(first, second))
    assert warming_version(made, "uid-docs", second.keyspace[:8], two) == second
    assert warming_version(made, "uid-docs", "", one) == first
    assert warming_version(made, "uid-docs", first.keyspace[:8], two) is None
    assert warming_version(made, "uid-more", second.keyspace[:8], two) is None
    assert warming_version(bundle(versions=(first,), reuse="Disabled"), "uid-docs", "", one) is None
    assert warming_version(None, "uid-docs", "", one) is None


@pytest.mark.parametrize(
    ("made", "granted"),
    [
        (bundle(entry("acme")), True),
        (bundle(entry("acme", "other")), False),
        (bundle(entry("globex", "acme")), False),
        (bundle(entry("acme", suspended=True)), False),
        (bundle(entry("acme"), reuse="Disabled"), False),
    ],
    ids=["as before", "another keyspace", "another tenant", "suspended", "reuse is off"],
)
def test_a_request_stays_while_its_tenant_would_get_the_keyspace_again(made: Bundle, granted: bool) -> None:
    assert still_granted(made, "acme", keyspace("acme")) is granted


def test_a_warm_up_stays_while_its_version_is_in_the_policy() -> None:
    docs, kept = PoolSubject("uid-docs"), (version("docs-1"), version("docs-2"))
    assert still_granted(bundle(versions=kept), docs, keyspace("docs-2"))
    assert not still_granted(bundle(versions=kept[:1]), docs, keyspace("docs-2"))
    assert not still_granted(bundle(versions=kept), PoolSubject("uid-more"), keyspace("docs-1"))
    assert not still_granted(bundle(versions=kept, reuse="Disabled"), docs, keyspace("docs-1"))


BEARER, KEY = b"authorization", b"x-api-key"


@pytest.mark.parametrize(
    "headers",
    [
        {BEARER: b"Bearer k"},
        {BEARER: b"bearer   k  "},
        {BEARER: b"  BEARER k"},
        {KEY: b"k"},
        {KEY: b" k "},
        {BEARER: b"Bearer k", KEY: b"k"},
        {BEARER: b"Bearer k", KEY: b""},
    ],
    ids=str,
)
def test_a_key_is_in_either_header(headers: dict[bytes, bytes]) -> None:
    assert credential(headers) == b"k"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({KEY: b""}, 401),
        ({BEARER: b""}, 401),
        ({BEARER: b"Bearer"}, 401),
        ({BEARER: b"Bearer "}, 401),
        ({BEARER: b"Basic k"}, 401),
        ({BEARER: b"Basic k", KEY: b"k"}, 401),
        ({BEARER: b"Bearer k", KEY: b"other"}, 400),
        ({KEY: b"k" * 513}, 401),
    ],
    ids=str,
)
def test_a_request_without_one_key_is_refused(headers: dict[bytes, bytes], status: int) -> None:
    with pytest.raises(Refusal) as refusal:
        credential(headers)
    assert (refusal.value.status, refusal.value.reason) == (status, Reason.UNAUTHENTICATED)
    code = json.loads(refusal.value.body())["error"]["code"]
    assert code == ("invalid_api_key" if status == 401 else "unauthenticated")
    assert (b'WWW-Authenticate: Bearer realm="kvstrata"\r\n' in refusal.value.headers()) is (status == 401)


def test_the_longest_key_is_read() -> None:
    assert credential({KEY: b"k" * 512}) == b"k" * 512


def ring(*rows: Any) -> KeyRing:
    return KeyRing.decode(json.dumps({"keys": list(rows)}).encode())


def row(tenant: Any, key: str) -> dict[str, Any]:
    return {"tenant": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest()}


NOW_S = datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("expires", ["2027-01-31T12:00:00Z", "2027-01-31T12:00:00.000Z"])
def test_a_key_is_refused_from_its_expiry_on_with_a_message(expires: str) -> None:
    made = ring({**row("acme", "a"), "expires": expires}, row("globex", "b"), {**row("t", "c"), "expires": None})
    assert made.tenant_of(b"a", NOW_S - 0.5) == "acme"
    with pytest.raises(Refusal, match="this API key has expired") as refusal:
        made.tenant_of(b"a", NOW_S)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    assert [made.tenant_of(b"b", NOW_S), made.tenant_of(b"c", NOW_S)] == ["globex", "t"]
    assert made != ring(row("acme", "a"), row("globex", "b"), row("t", "c"))


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_entries_of_a_key_the_one_that_expires_first_counts(order: int) -> None:
    entries = [row("acme", "a"), {**row("acme", "a"), "expires": "2027-01-31T12:00:00Z"}]
    with pytest.raises(Refusal):
        ring(*entries[::order]).tenant_of(b"a", NOW_S)


def test_a_ring_knows_the_tenant_of_each_key() -> None:
    made = ring(row("acme", "a"), row("acme", "b"), row("globex", "c"), row("acme", "a"), row("t" * 253, "d"))
    assert [made.tenant_of(key, NOW_S) for key in (b"a", b"b", b"c", b"d", b"e", b"")] == [
        "acme", "acme", "globex", "t" * 253, None, None,
    ]  # fmt: skip
    assert len(made) == 4
    assert (len(KeyRing()), KeyRing().tenant_of(b"a", NOW_S)) == (0, None)
    assert made == ring(row("globex", "c"), row("acme", "b"), row("acme", "a"), row("t" * 253, "d"))
    assert made != ring(row("acme", "a"))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"{}", b"[]", b'{"keys":{}}'[:-2] + b'7}', b'{"keys":[{}]}', b'{"keys":["x"]}',
        json.dumps({"keys": [row("", "a")]}).encode(),
        json.dumps({"keys": [row("t" * 254, "a")]}).encode(),
        json.dumps({"keys": [row(7, "a")]}).encode(),
        json.dumps({"keys": [row("acme", "a"), row("globex", "a")]}).encode(),
        json.dumps({"keys": [{"tenant": "acme", "sha256": "ab" * 31}]}).encode(),
        json.dumps({"keys": [{"tenant": "acme", "sha256": "ab" * 33}]}).encode(),
        json.dumps({"keys": [{"tenant": "acme", "sha256": "xy" * 32}]}).encode(),
        *(json.dumps({"keys": [{**row("acme", "a"), "expires": expires}]}).encode() for expires in (
            "", "soon", 1, True, [], "2027-01-31", "2027-01-31T12:00:00", "2027-01-31T12:00:00+01:00",
            "2027-02-31T12:00:00Z", "20270131T120000Z",
        )),
    ],
)  # fmt: skip
def test_malformed_keys_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedKeysError):
        KeyRing.decode(data)
