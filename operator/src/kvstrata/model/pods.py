"""Facts that are not API objects: reports of pods and backends, committed bundles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain

from kvstrata.api.cachetier import SlotLoss
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle, Entry
from kvstrata.contract.policy.data_key import what_is_kept
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.model.redis.cluster import Cluster
from kvstrata.model.redis.credentials import PasswordFacts, TlsFacts
from kvstrata.model.redis.external import ExternalReport


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not come up: a reason of the API, and a sentence that stays the same while that holds. `lasting`:
    it does not end by itself, so a person must act. `since`: since when the pod does not run, if known."""

    reason: str
    message: str
    lasting: bool = False
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Warned:
    """A Kubernetes Event of type Warning."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class EventLook:
    """The warnings about an object at one time, the newest last."""

    at: datetime
    warnings: tuple[Warned, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a CachedModel as the API server shows it.

    `ever_ran`: the kubelet reported a container as running or terminated. Before that the pod holds no policy, and its
    gate reads the newest bundle when it starts. `reported`: the kubelet reported the pod at all; until then it
    may have started its containers. `finished`: all ended. `images` are names of containers with the digests of their
    images, as the kubelet reported them.
    """

    name: str
    uid: str
    model: str
    ip: str | None
    scheduled: bool
    finished: bool
    ever_ran: bool
    reported: bool
    ready: bool
    deleting: bool
    identity: str
    render_id: str = ""
    scheduled_at: datetime | None = None
    trouble: Trouble | None = None
    images: tuple[tuple[str, str], ...] = ()
    node: str = ""

    @property
    def live(self) -> bool:
        """Whether this pod may serve requests, so that a policy needs its acknowledgement."""
        return self.scheduled and (self.ever_ran or not self.reported) and not self.finished


@dataclass(frozen=True, slots=True)
class Departure:
    """A pod whose object disappeared. `clean`: all containers were reported before, as ended or never started, or its
    node is known to be gone. `acked`: the last revision known to be enforced."""

    name: str
    uid: str
    at: datetime
    clean: bool
    acked: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class VerifiedState:
    """The state reported by a pod's gate, after its certificate and pod-bound token were checked.

    `in_contact`: it answered the last request. Without, an acknowledgement stands, but freshness does not.
    `contradicted`: the API server, read after the report, held an older bundle, or another one of that revision; the
    acknowledgement is then of another history.
    """

    state: PodState
    at: datetime
    in_contact: bool = True
    contradicted: bool = False


@dataclass(frozen=True, slots=True)
class CommittedBundle:
    """The bundle that the API server holds for a model, and the resourceVersion of its root.

    `compiled` maps a policy's UID to the generation compiled last and the first revision with it, `keyless` an epoch to
    the first revision without its data key; both cover only commits of this process. `pool_indexes` maps a pool to its
    index in the root.
    """

    bundle: Bundle
    resource_version: str
    compiled: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    keyless: Mapping[str, int] = field(default_factory=dict, compare=False)
    pool_indexes: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def whole(self) -> bool:
        """Whether every shard could be read; of a damaged bundle the keyspaces that pods hold are unknown."""
        root = self.bundle.root
        return bool(root.shards) and all(ref.digest for ref in root.shards) and all(ref.digest for ref in root.pools)

    def holds_since(self, policy_uid: str, generation: int) -> int:
        """Return the first revision with this `generation` of a policy; the newest if unknown."""
        known = self.compiled.get(policy_uid)
        return known[1] if known and known[0] == generation else self.bundle.root.revision

    @property
    def data_keys(self) -> frozenset[bytes | str]:
        return keys_in(self.bundle.entries, self.bundle.pools)

    def keyless_since(self, epoch: str) -> int:
        """Return the first revision without an epoch's data key; the newest if unknown."""
        return self.keyless.get(epoch, self.bundle.root.revision)


def keys_in(entries: Mapping[str, Entry], pools: Mapping[str, PoolShard]) -> frozenset[bytes | str]:
    """Return the data keys of entries and pools, or the ids of wrapped ones."""
    versions = (version for shard in pools.values() for version in shard.versions)
    keys = chain((entry.keys for entry in entries.values()), (version.keys for version in versions))
    return frozenset(what_is_kept(key) for held in keys for key in held)


@dataclass(frozen=True, slots=True)
class BackendAccess:
    """How the operator asks a server of a Redis tier, in an external `cluster` each primary. Certificates name
    `server_name`; password and authority are (Secret, key), None without a password or TLS."""

    endpoint: str
    server_name: str
    username: str | None = None
    password: tuple[str, str] | None = None
    authority: tuple[str, str] | None = None
    cluster: bool = False


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Answer to the operator; one to another `access` does not apply. `reason` is empty when it was reachable.

    Figures are known if `version` is not empty. `max_bytes` 0 means unbounded. Figures of a cluster are sums over the
    primaries that answered. `external` is set for external tiers.
    """

    access: BackendAccess
    reachable: bool
    reason: str
    message: str
    at: datetime
    used_bytes: int = 0
    max_bytes: int = 0
    evicts: bool = False
    version: str = ""
    software: str = "Redis"
    external: ExternalReport | None = None


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The last look at a managed cluster; `cluster` is None if no server could be asked.

    `reason` and `message` explain why not, or why the last step failed; both are empty on success. `lost` is the last
    loss known to this process. `moved` counts the slots that changed shards since the look.
    """

    cluster: Cluster | None
    at: datetime
    reason: str = ""
    message: str = ""
    lost: SlotLoss | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """A Secret that the operator made, without its values.

    `users` are the permissions of a Redis server's users, without password digests. `drawn_for` is the restore after
    which the domain's key or its data keys were drawn, empty for none. `owners` are UIDs; `parent` is kind and name in
    a mark that holds, else None.
    """

    keys: frozenset[str]
    resource_version: str
    users: str = ""
    renewal_due: bool = False
    passwords: PasswordFacts | None = None
    tls: TlsFacts | None = None
    drawn_for: str = ""
    owners: frozenset[str] = frozenset()
    parent: tuple[str, str] | None = None
    of_bundle: bool = False
    uid: str = ""

    def has_same_content_as(self, other: SecretFacts) -> bool:
        return replace(self, resource_version="") == replace(other, resource_version="")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that this version cannot read. `reported`: its status shows that already. `finalizers` are those of an
    object under deletion."""

    problem: str
    generation: int
    resource_version: str
    reported: bool
    finalizers: tuple[str, ...] = ()
