"""The world of one domain: all that a plan may read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain, CacheDomainSpec, Installation
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import TenantGroup
from kvstrata.contract.messages.pools import PoolReport, Rendered
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.erasure.record import ErasureNow
from kvstrata.model.guarantees import ClaimIndex
from kvstrata.model.pods import (
    BackendReport,
    ClusterReport,
    CommittedBundle,
    Departure,
    EventLook,
    Pod,
    SecretFacts,
    Unreadable,
    VerifiedState,
)
from kvstrata.model.pools import PodAnswer, SourceReport, WarmReport
from kvstrata.model.probe import ProbeReport
from kvstrata.model.reclaim import ReclaimReport
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.model.redis.credentials import CredentialLook

from .memo import Memo
from .refs import Key

LiveObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dispute:
    """A field of a child that another writer, `by`, changed after it was written, and how often it was put back. The
    next time is not before `due`."""

    field: str
    by: str
    repairs: int
    due: datetime


OBJECTS = {
    "CacheDomain": "domains", "CacheTier": "tiers", "CachedModel": "models", "TenantCachePolicy": "policies",
    "TenantGroup": "groups", "PrefixPool": "pools", "CacheInvalidation": "invalidations",
}  # fmt: skip
"""Where a world has the objects of a kind, by name."""


@dataclass(slots=True)
class Ending:
    """Memory of a namespace under deletion: its objects go in any order, and the last policy may need them all.

    The first five fields are the last known values of deleted objects. `refused` are UIDs of policies for which the API
    server creates nothing any more. `untouched` are UIDs of tiers that no operator had reported about when this process
    saw them, and since then no pod of the namespace may have run. It is dropped when neither an object nor an erasure
    of the namespace is left.
    """

    domain_id: str | None = None
    served_by: Installation | None = None
    domain_key: bytes | None = field(default=None, repr=False)
    tiers: dict[str, CacheTier] = field(default_factory=dict)
    models: dict[str, CachedModel] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    untouched: set[str] = field(default_factory=set)


@dataclass(slots=True)
class World:
    """All that is known of one namespace; a plan reads nothing else, and changes nothing in it.

    It is the store's own, so it is valid until the plan returns: plans never wait. `term` is the leader's, `entropy` 64
    fresh random bytes for each plan; no two plans have the same. `memo` keeps results of earlier plans. `installation`
    is the operator's own, None in a process that knows none. `led_since` is when this process began to lead, by its own
    clock, None if it never read a former leader's records; `rolled_since` when it first knew that an invalidation's
    epochs were rolled, by the invalidation's UID. `allowed_servers` limits external servers; tiers may name the folder
    of their namespace's name in `allowed_folders` of nodes. None: any.

    `mark_key` is of the installation's marks, empty until it is read. `contested`: tenants with several policies.
    `policy_names`: by UID. `unsettled`: policies with a generation that was never enforced. `granting`: admitted bytes
    by tier in status writes under way. `owned`: kind and name of children that an object controls, by its UID.
    `foreign`: by kind and name of a foreign object, which watches do not show, the UID of the object that needs its
    name. `rewritten`: by kind and name, fields of a child as the API server answered its last write, where that is not
    as they were sent. `refused`: of bundles and a CacheDomain, the API server's reason to refuse the last write.

    Keys: `sources` ConfigMap name and key; `renders` pod UID, then the prefix's digest; `warmed` pod UID, then the
    digits of the version's scope and that digest; `holdings` pod UID, then pool UID; `probes` pod UID; `event_looks`
    UID of a pod or StatefulSet; `reclaims` order and round; `erasures` the UID of the ordering object; `servers` tier
    name, then pod name; `lost_servers` tier name, of vanished pods whose end no kubelet reported.

    `access`: values that were read for a Redis tier, by its name, then by name and key of the Secret.

    `data_keys` maps an epoch to its data key, or to the id of one wrapped by a KMS; it is replaced as a whole.
    `judged_epochs`: epochs that no status names unless one in this snapshot does; a status may still arrive for the
    others. `keys_unwrapping`: epochs whose key is being unwrapped; `keys_lost`: those whose key cannot be recovered.
    `keys_problem`: why the KMS cannot be used.
    """

    namespace: str
    term: int
    entropy: bytes
    _: KW_ONLY
    installation: Installation | None = None
    allowed_servers: AllowedServers | None = None
    allowed_folders: tuple[str, ...] | None = None
    led_since: datetime | None = None
    rolled_since: dict[str, datetime] = field(default_factory=dict)
    domains: dict[str, CacheDomain] = field(default_factory=dict)
    tiers: dict[str, CacheTier] = field(default_factory=dict)
    models: dict[str, CachedModel] = field(default_factory=dict)
    policies: dict[str, TenantCachePolicy] = field(default_factory=dict)
    groups: dict[str, TenantGroup] = field(default_factory=dict)
    pools: dict[str, PrefixPool] = field(default_factory=dict)
    invalidations: dict[str, CacheInvalidation] = field(default_factory=dict)
    claims: ClaimIndex = field(default_factory=ClaimIndex)
    mark_key: bytes = field(default=b"", repr=False)
    domain_key: bytes | None = field(default=None, repr=False)
    data_keys: Mapping[str, bytes | str] = field(default_factory=dict, repr=False)
    judged_epochs: set[str] = field(default_factory=set)
    keys_unwrapping: frozenset[str] = frozenset()
    keys_lost: frozenset[str] = frozenset()
    keys_problem: str = ""
    unreadable: dict[Key, Unreadable] = field(default_factory=dict)
    policies_of_tenant: dict[str, tuple[str, ...]] = field(default_factory=dict)
    contested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    policy_names: dict[str, str] = field(default_factory=dict)
    unsettled: set[str] = field(default_factory=set)
    granting: dict[Key, Mapping[str, int]] = field(default_factory=dict)
    children: dict[tuple[str, str], LiveObject] = field(default_factory=dict)
    owned: dict[str, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    foreign: dict[tuple[str, str], str] = field(default_factory=dict)
    rewritten: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    disputes: dict[tuple[str, str], Dispute] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)
    secrets: dict[str, SecretFacts] = field(default_factory=dict)
    pods: dict[str, dict[str, Pod]] = field(default_factory=lambda: defaultdict(dict))
    departures: dict[str, tuple[Departure, ...]] = field(default_factory=dict)
    states: dict[str, VerifiedState] = field(default_factory=dict)
    bundles: dict[str, CommittedBundle] = field(default_factory=dict)
    backends: dict[str, BackendReport] = field(default_factory=dict)
    credentials: dict[str, CredentialLook] = field(default_factory=dict)
    access: dict[str, Mapping[tuple[str, str], bytes]] = field(default_factory=dict, repr=False)
    probes: dict[str, ProbeReport] = field(default_factory=dict)
    lost_servers: dict[str, tuple[Departure, ...]] = field(default_factory=dict)
    servers: dict[str, dict[str, ServerPod]] = field(default_factory=lambda: defaultdict(dict))
    event_looks: dict[str, EventLook] = field(default_factory=dict)
    clusters: dict[str, ClusterReport] = field(default_factory=dict)
    sources: dict[tuple[str, str], SourceReport] = field(default_factory=dict)
    renders: dict[str, dict[str, PodAnswer[Rendered]]] = field(default_factory=lambda: defaultdict(dict))
    warmed: dict[str, dict[tuple[str, str], WarmReport]] = field(default_factory=lambda: defaultdict(dict))
    holdings: dict[str, dict[str, PodAnswer[PoolReport]]] = field(default_factory=lambda: defaultdict(dict))
    erasures: dict[str, ErasureNow] = field(default_factory=dict)
    reclaims: dict[tuple[str, int], ReclaimReport] = field(default_factory=dict)
    ending: Ending = field(default_factory=Ending)
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    def objects(self, kind: str) -> dict[str, Any]:
        """The objects of a kind by name; of bundles, their models."""
        found: dict[str, Any] = getattr(self, OBJECTS.get(kind, "models"))
        return found

    @property
    def domain(self) -> CacheDomain | None:
        return self.domains.get(DOMAIN_NAME)

    @property
    def domain_awaited(self) -> str:
        """Why the domain has no identity yet."""
        why = self.refused.get(Key("CacheDomain", self.namespace, DOMAIN_NAME))
        if why is None or self.domain is not None:
            return "the domain's identity, key and epochs are being drawn"
        return f"CacheDomain {DOMAIN_NAME} cannot be created: {why}; create it, with an empty spec, or admit it"

    @property
    def domain_spec(self) -> CacheDomainSpec:
        """The domain's settings; the defaults while it does not exist."""
        return self.domain.spec if self.domain else CacheDomainSpec()

    @property
    def domain_id(self) -> str | None:
        return self.domain.status.domain_id if self.domain else None

    @property
    def identity(self) -> tuple[bytes, str] | None:
        """The domain's key and id, present or last known: blocks and receipts are named by them."""
        key, domain = self.domain_key or self.ending.domain_key, self.domain_id or self.ending.domain_id
        return (key, domain) if key is not None and domain is not None else None

    def live_pods(self, model: str) -> tuple[Pod, ...]:
        pods = self.pods.get(model) or {}
        return tuple(pod for _, pod in sorted(pods.items()) if pod.live)

    def serving_pods(self, model: str) -> tuple[Pod, ...]:
        """The live pods that take requests: ready, or past their first acknowledgement.

        A starting pod acknowledges the newest bundle before it is ready, so policies need not wait for it; otherwise
        every rollout would rewrite the status of every policy.
        """
        return tuple(pod for pod in self.live_pods(model) if pod.ready or self.acked_revision(pod) > 0)

    def acked_revision(self, pod: Pod) -> int:
        """The revision that this pod enforces; 0 for none.

        It holds while the pod is unreachable or its cache server restarts: without policy, every lookup is a miss. An
        acknowledgement of a history that the API server has lost does not count.
        """
        verified = self.states.get(pod.uid)
        return verified.state.acked if verified and not verified.contradicted else 0
