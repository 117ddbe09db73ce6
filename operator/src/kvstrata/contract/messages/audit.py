"""The audit log: one line of JSON for each event about access to, sharing and erasure of cached data, and about keys.

Lines are made to leave the cluster. None has free text: a line consists of words of fixed lists, numbers, times,
digests, Kubernetes' names and request ids. So no prompt, no data key, no whole keyspace and no epoch can be in one, and
no API key, unless a caller uses another's as its request id; a tenant's name is there only if its CacheDomain allows it
(`spec.auditNames`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from kvstrata.contract import Meaningful
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.wire import Form, HexDigest, encode_line, to_wire, wired

AUDIT_VERSION = 1
LOGGER = "kvstrata.audit"
"""Value of the field `logger` of every line, and of no other line."""

NO_SCOPE = "_none"

Instant = Annotated[str, Form(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", "time in UTC, in milliseconds")]
KubeName = Annotated[str, Form("[0-9A-Za-z._:/-]{1,256}", "name")]
RequestId = Annotated[str, Form("[0-9A-Za-z._-]{1,128}", "request id")]
Token = Annotated[str, Form("[0-9A-Za-z_]{1,64}", "word")]
ScopeRef = Annotated[str, Form(f"[0-9a-f]{{{SCOPE_DIGITS}}}|{NO_SCOPE}", f"{SCOPE_DIGITS} digits, or `{NO_SCOPE}`")]


class Source(StrEnum):
    """The program that writes a line."""

    OPERATOR = "operator"
    GATE = "gate"


class Event(Meaningful):
    """The subject of a line, for routing in a platform."""

    ADMISSION = "Admission", "a guarantee on a tier, or callers' requests, were admitted"
    DENIAL = "Denial", "a guarantee, an object, a pod's report or requests were refused, or a guarantee was withdrawn"
    SHARE = "Share", "sharing of blocks between tenants"
    ERASE = "Erase", "an invalidation, and each step of an erasure"
    KEY = "Key", "keys, passwords and certificates: created, in use, rotated, removed"
    LOG = "Log", "the audit log itself"


_OPERATOR, _GATE, _BOTH = (Source.OPERATOR,), (Source.GATE,), (Source.OPERATOR, Source.GATE)
_OBJECT = ("namespace", "object", "uid")
_POLICY = (*_OBJECT, "tenant")
_GUARANTEE = (*_POLICY, "tier", "bytes", "bytes_before")
_SHARED = (*_POLICY, "model", "scope", "shared_with", "revision")
_REQUESTS = ("namespace", "model", "tenant", "scope", "count", "request_ids", "since")
_COPIES = ("pod_uid", "blocks", "bytes", "remaining")
_SECRET = ("namespace", "object", "material")


class Action(StrEnum):
    """An event of the log. `fields` are those that its lines may have beside those of every line."""

    event: Event
    sources: tuple[Source, ...]
    meaning: str
    fields: tuple[str, ...]

    def __new__(
        cls, value: str, event: Event, meaning: str, names: tuple[str, ...], by: tuple[Source, ...] = _OPERATOR
    ) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.event, member.sources, member.meaning, member.fields = event, by, meaning, names
        return member

    GUARANTEE_ADMITTED = (
        "GuaranteeAdmitted", Event.ADMISSION, "a tier reserved a guarantee, or more bytes for it", _GUARANTEE,
    )  # fmt: skip
    GUARANTEE_RELEASED = (
        "GuaranteeReleased", Event.ADMISSION,
        "an object lowered or removed a guarantee, and the tier released its bytes", _GUARANTEE,
    )  # fmt: skip
    REQUESTS_SERVED = (
        "RequestsServed", Event.ADMISSION, "requests went to the engine under the keyspace of their tenant's scope",
        _REQUESTS, _GATE,
    )  # fmt: skip
    GUARANTEE_DENIED = "GuaranteeDenied", Event.DENIAL, "a guarantee waits for room", (*_POLICY, "reason")
    GUARANTEE_WITHDRAWN = (
        "GuaranteeWithdrawn", Event.DENIAL, "a guarantee lost bytes, because its tier has less room", _GUARANTEE,
    )  # fmt: skip
    OBJECT_STALLED = (
        "ObjectStalled", Event.DENIAL, "an object's spec is not enforced; `reason` is that of its condition Stalled",
        (*_POLICY, "reason"),
    )  # fmt: skip
    REPORT_REFUSED = (
        "ReportRefused", Event.DENIAL, "a pod's report was refused, because it does not prove its pod",
        ("namespace", "model", "pod_uid", "reason"),
    )  # fmt: skip
    REQUESTS_REFUSED = (
        "RequestsRefused", Event.DENIAL,
        "requests were refused, or ended by the gate; `reason` is that of the metric `kvstrata_gate_refusals_total`",
        (*_REQUESTS, "reason"), _GATE,
    )  # fmt: skip
    REUSE_REFUSED = (
        "ReuseRefused", Event.DENIAL,
        "requests went to the engine under random salts, so they reuse no blocks and leave none to others. "
        "`reason` is `unknown_tenant`, `suspended`, `reuse_off`, `stale`, `ungoverned` or `no_fingerprint`",
        (*_REQUESTS, "reason"), _GATE,
    )  # fmt: skip
    SHARING_BEGAN = (
        "SharingBegan", Event.SHARE, "a committed bundle lets a tenant share a scope, or read a pool", _SHARED,
    )  # fmt: skip
    SHARING_ENDED = (
        "SharingEnded", Event.SHARE,
        "a committed bundle ends that; it is in force in a pod that has acknowledged `revision`", _SHARED,
    )  # fmt: skip
    INVALIDATION_MOVED = (
        "InvalidationMoved", Event.ERASE, "a CacheInvalidation entered another phase", (*_OBJECT, "phase"),
    )  # fmt: skip
    SCOPES_ROLLED = (
        "ScopesRolled", Event.ERASE, "every bundle has new epochs instead of the erased ones; `count` of them",
        (*_OBJECT, "count"),
    )  # fmt: skip
    POD_STANDS = (
        "PodStands", Event.ERASE,
        "state of a pod that may have used the erased blocks: `Acked`, `Fenced`, `Ended` or `Open`",
        (*_OBJECT, "pod_uid", "revision", "reason"),
    )  # fmt: skip
    POD_ERASED = (
        "PodErased", Event.ERASE, "a pod reported the erasure of its own memory and files", (*_OBJECT, *_COPIES),
    )  # fmt: skip
    ENGINE_RESET = "EngineReset", Event.ERASE, "a pod's engine emptied its prefix cache", (*_OBJECT, "pod_uid")
    ENGINE_KEPT = "EngineKept", Event.ERASE, "a pod's engine cannot empty its prefix cache", (*_OBJECT, "pod_uid")
    POD_PROBED = (
        "PodProbed", Event.ERASE,
        "a pod was asked for `count` keys that it could have read before, and found `remaining` of them",
        (*_OBJECT, "pod_uid", "count", "remaining"),
    )  # fmt: skip
    SERVER_DELETED = (
        "ServerDeleted", Event.ERASE,
        "a Job that deletes from a server of a shared tier ended; `reason` is `Done` or `Failed`",
        (*_OBJECT, "tier", "server", "reason", "blocks", "bytes", "remaining"),
    )  # fmt: skip
    TIER_VERIFIED = (
        "TierVerified", Event.ERASE,
        "the operator searched `count` servers of a shared tier and found `remaining` blocks",
        (*_OBJECT, "tier", "count", "remaining"),
    )  # fmt: skip
    TIER_LOST = "TierLost", Event.ERASE, "a tier was removed or replaced before it was erased", (*_OBJECT, "tier")
    ERASURE_JUDGED = (
        "ErasureJudged", Event.ERASE, "an erasure ended; `reason` is that of its condition", (*_OBJECT, "reason"),
    )  # fmt: skip
    RECEIPT_WRITTEN = (
        "ReceiptWritten", Event.ERASE, "the signed receipt is in the domain's chain", (*_OBJECT, "receipt"),
    )  # fmt: skip
    COPIES_ERASED = (
        "CopiesErased", Event.ERASE, "this pod was asked to erase `count` keyspaces; `reason` is the outcome",
        ("namespace", "model", "count", "reason"), _GATE,
    )  # fmt: skip
    KEYS_MADE = (
        "KeysMade", Event.KEY,
        "keys, users or a certificate were written to a Secret, or a KMS unwrapped data keys; `count` of them are new",
        (*_SECRET, "count"),
    )  # fmt: skip
    KEYS_REMOVED = (
        "KeysRemoved", Event.KEY, "data keys were removed from a Secret or from the operator's memory",
        (*_SECRET, "count"),
    )  # fmt: skip
    CREDENTIALS_TURNED = (
        "CredentialsTurned", Event.KEY,
        "a step of rotating the passwords or the certificate of a managed tier's servers",
        ("namespace", "object", "reason"),
    )  # fmt: skip
    KEY_REVOKED = (
        "KeyRevoked", Event.KEY, "a data key of erased blocks was removed from its custody and every bundle",
        (*_OBJECT, "fingerprint"),
    )  # fmt: skip
    KEY_DESTROYED = (
        "KeyDestroyed", Event.KEY, "the custody of a data key confirmed that no copy of it exists",
        (*_OBJECT, "fingerprint"),
    )  # fmt: skip
    DATA_KEYS_HELD = (
        "DataKeysHeld", Event.KEY,
        "the pod's files of data keys changed: it has `count` keys, with policy revision `revision` in force",
        ("namespace", "model", "revision", "count"), _GATE,
    )  # fmt: skip
    API_KEYS_HELD = (
        "ApiKeysHeld", Event.KEY, "the API keys in force changed; there are `count`",
        ("namespace", "model", "count"), _GATE,
    )  # fmt: skip
    EVENTS_DROPPED = (
        "EventsDropped", Event.LOG,
        "`count` events of this process have no line, because lines were written faster than collected",
        ("count",), _BOTH,
    )  # fmt: skip


@wired("a line of the audit log", closed=True, camel=True, kw_only=True)
class Happened:
    """An event without its source. Fields that do not apply are None, and not in the line."""

    action: Action
    """The action, see below."""

    namespace: KubeName | None = None
    """The domain's namespace; for the operator's own keys its own."""

    object: KubeName | None = None
    """The object concerned, as `Kind/name`."""

    uid: KubeName | None = None
    """Its uid."""

    tenant: str | None = None
    """The tenant's name, if the domain's `auditNames` is `Tenants`."""

    model: KubeName | None = None
    """The CachedModel."""

    scope: ScopeRef | None = None
    """The first digits of the keyspace, as in metrics; `_none` for callers without one."""

    shared_with: KubeName | None = None
    """The other side: `TenantGroup/name`, `PrefixPool/name`, or `Public`."""

    tier: KubeName | None = None
    """The CacheTier."""

    server: KubeName | None = None
    """Id of the tier's server, as the server reports it."""

    pod_uid: KubeName | None = None
    """Uid of the pod concerned."""

    material: Token | None = None
    """Content of a Secret."""

    fingerprint: HexDigest | None = None
    """SHA-256 that identifies a data key, as in receipts."""

    receipt: HexDigest | None = None
    """Digest of the receipt."""

    phase: Token | None = None
    """The new phase."""

    reason: Token | None = None
    """Cause or outcome."""

    revision: int | None = None
    """A bundle's revision."""

    bytes: int | None = None
    """Current bytes of a guarantee, or erased bytes."""

    bytes_before: int | None = None
    """Former bytes of a guarantee."""

    blocks: int | None = None
    """Blocks that were erased."""

    remaining: int | None = None
    """Remaining blocks."""

    count: int | None = None
    """Number of things that the action counts."""

    request_ids: tuple[RequestId, ...] | None = None
    """`x-request-id` of the first of the counted requests, 8 at most."""

    since: Instant | None = None
    """Start of the counted interval; `time` is its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Happened):
    """One line."""

    logger: KubeName
    """Always `kvstrata.audit`."""

    version: int
    """Version of this format. A new field or action does not change it."""

    time: Instant
    """When the line was written."""

    source: Source
    """The program that wrote it."""

    pod: KubeName
    """The pod that wrote it."""

    boot: KubeName
    """Random for each start of the process."""

    sequence: int
    """Number of the line of this process, from 1; the line of a missing number was lost."""

    event: Event
    """Subject of the action."""


@dataclass(frozen=True, slots=True)
class Emitter:
    """A process that writes lines."""

    source: Source
    pod: str
    boot: str

    def line(self, sequence: int, at_s: float, happened: Happened) -> bytes:
        """Return the line of an event that is written at `at_s`, in seconds since 1970."""
        head: dict[str, Any] = {
            "logger": LOGGER,
            "version": AUDIT_VERSION,
            "time": instant(at_s),
            "source": self.source,
            "pod": self.pod,
            "boot": self.boot,
            "sequence": sequence,
            "event": happened.action.event,
        }
        return encode_line(head | {name: value for name, value in to_wire(happened).items() if value is not None})


def instant(at_s: float) -> str:
    """Return a moment as lines have it."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
