"""Facts that are not objects of the API: what pods said, what backends answered, what was committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain

from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle, Entry
from kvstrata.contract.policy.data_key import what_is_kept
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.model.redis.cluster import Cluster
from kvstrata.model.redis.credentials import PasswordFacts, TlsFacts
from kvstrata.model.redis.external import ExternalReport


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a CachedModel as the API server shows it.

    `ever_ran` is whether the kubelet reported any of its containers as running or terminated: before that it cannot
    hold a policy, and its gate will read the newest bundle when it starts. `render_id` is empty on pods of a version
    that renders nothing.
    """

    name: str
    uid: str
    model: str
    ip: str | None
    scheduled: bool
    finished: bool
    ever_ran: bool
    ready: bool
    deleting: bool
    identity: str
    render_id: str = ""

    @property
    def live(self) -> bool:
        """Whether this pod may serve requests, so that a policy is not enforced without its acknowledgement."""
        return self.scheduled and self.ever_ran and not self.finished


@dataclass(frozen=True, slots=True)
class Departure:
    """A pod whose object disappeared.

    `clean` is whether it had reported all containers as ended before, `acked` the revision that it enforced last as far
    as this operator knows.
    """

    name: str
    uid: str
    at: datetime
    clean: bool
    acked: int = 0


@dataclass(frozen=True, slots=True)
class VerifiedState:
    """What a pod's gate said, after its certificate and its pod-bound token were checked.

    `in_contact` is whether it was still believed when it was asked last: what was acknowledged stands without it, but
    that the policy is fresh does not. `contradicted` is whether the API server, asked after the pod spoke, held an
    older bundle than the pod serves under, or another of its revision: then its acknowledgement is of another history.
    """

    state: PodState
    at: datetime
    in_contact: bool = True
    contradicted: bool = False


@dataclass(frozen=True, slots=True)
class CommittedBundle:
    """The bundle that the API server holds for a model, and the resourceVersion of its root.

    `compiled` tells, by the UID of a policy, the generation of it that was compiled last and the first revision that
    was, `keyless` by an epoch the first revision that no longer had its data key; both are known of what this process
    committed only. `pool_indexes` tells which of the root's pools is which.
    """

    bundle: Bundle
    resource_version: str
    compiled: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    keyless: Mapping[str, int] = field(default_factory=dict, compare=False)
    pool_indexes: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def whole(self) -> bool:
        """Whether every shard could be read; of a damaged bundle nobody knows which keyspaces pods hold."""
        root = self.bundle.root
        shards = bool(root.shards) and all(ref.digest for ref in root.shards)
        return shards and all(ref.digest for ref in root.pools)

    def holds_since(self, policy_uid: str, generation: int) -> int:
        """Return a revision that says all that a policy says in `generation`; the newest where none is known."""
        known = self.compiled.get(policy_uid)
        return known[1] if known and known[0] == generation else self.bundle.root.revision

    @property
    def data_keys(self) -> frozenset[bytes | str]:
        """The data keys that its entries and its pools have, or the ids of those that they name."""
        return keys_in(self.bundle.entries, self.bundle.pools)

    def keyless_since(self, epoch: str) -> int:
        """Return a revision that came without an epoch's data key, of a bundle that has it no more.

        The newest one where none is known.
        """
        return self.keyless.get(epoch, self.bundle.root.revision)


def keys_in(entries: Mapping[str, Entry], pools: Mapping[str, PoolShard]) -> frozenset[bytes | str]:
    """Return the data keys of entries and pools, or the ids of those that are only named."""
    versions = (version for shard in pools.values() for version in shard.versions)
    keys = chain((entry.keys for entry in entries.values()), (version.keys for version in versions))
    return frozenset(what_is_kept(key) for held in keys for key in held)


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What the server at `endpoint` answered to the operator as `username`. `reason` is empty when it was reachable.

    `password_secret` and `authority_secret` are the Secrets and keys in them that it was asked with, `cluster` whether
    as one of a cluster: an answer to another question says nothing of this one.

    Its figures are known if `version`, that of its `software`, is not empty. `max_bytes` 0 is no bound; `evicts`: it
    makes room itself. Of a cluster the figures are sums over the primaries that answered. `external` is what else the
    servers of an external tier said.
    """

    endpoint: str
    username: str | None
    reachable: bool
    reason: str
    message: str
    at: datetime
    used_bytes: int = 0
    max_bytes: int = 0
    evicts: bool = False
    version: str = ""
    software: str = "Redis"
    password_secret: tuple[str, str] | None = None
    authority_secret: tuple[str, str] | None = None
    cluster: bool = False
    external: ExternalReport | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """So many slots of a managed cluster were given, at a whole second, to servers without what they held."""

    at: datetime
    slots: int


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The last look at the servers of a managed cluster; `cluster` is None if nobody could be asked.

    `reason` and `message` tell why not, or why the last step could not be carried out; both are empty if all went well.
    `lost` is the last loss that this process caused or met, None if there was none. `moved` counts the slots that have
    gone to another shard since the look.
    """

    cluster: Cluster | None
    at: datetime
    reason: str = ""
    message: str = ""
    lost: Loss | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """A Secret that the operator made: which keys it has, whether its certificate is due; never its values.

    `users` is what the users of a Redis server may, without their passwords' digests. `passwords` and `tls` are known
    of Secrets with passwords of managed servers and with a certificate. `drawn_for` is the restore after which the
    domain's key or its data keys were drawn, empty for none. `owners` are the UIDs of the objects that it belongs to.
    """

    name: str
    keys: frozenset[str]
    resource_version: str
    users: str = ""
    renewal_due: bool = False
    issued_by_current_ca: bool = True
    passwords: PasswordFacts | None = None
    tls: TlsFacts | None = None
    drawn_for: str = ""
    owners: frozenset[str] = frozenset()

    def tells_the_same_as(self, other: SecretFacts) -> bool:
        """Whether nothing but the version differs."""
        return replace(self, resource_version="") == replace(other, resource_version="")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that this version cannot read. `told` is whether its status says so already."""

    problem: str
    generation: int
    resource_version: str
    told: bool
