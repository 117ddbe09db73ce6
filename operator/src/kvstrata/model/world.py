"""The world of one domain: everything that a plan may look at."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain, CacheDomainSpec
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import TenantGroup
from kvstrata.model.erasure.record import ErasureNow
from kvstrata.model.guarantees import Claim, TierClaims
from kvstrata.model.namespace_end import Ending
from kvstrata.model.pods import (
    BackendReport,
    ClusterReport,
    CommittedBundle,
    Departure,
    Pod,
    SecretFacts,
    Unreadable,
    VerifiedState,
)
from kvstrata.model.pools import HoldingReport, RenderReport, SourceReport, WarmReport
from kvstrata.model.probe import ProbeReport
from kvstrata.model.reclaim import ReclaimReport
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.model.redis.credentials import CredentialLook

from .memo import Memo
from .refs import Key

LiveObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class World:
    """A snapshot of one namespace; a plan reads it and nothing else.

    The mappings are read-only views, so a snapshot costs nothing to take; it is valid until the plan returns, because
    plans never wait. `term` is the leader's, `entropy` 64 fresh random bytes for this plan alone. `memo` keeps
    results of earlier plans and changes none.

    `contested` is the part of `policies_of_tenant` with several for a tenant. `policy_names` gives the name of a policy
    by its UID, `unsettled` names the policies whose generation was never enforced, `claims` gives by tier who declares
    guarantees there, `claimants` the same by who does, `granting` what statuses that are being written will say is
    admitted, in bytes by tier, and `owned` gives kind and name of the children that the object of a UID controls.
    `foreign` gives, by kind and name, the UID of the object that needs a name which an object of others has. Watches go
    by a label and do not show that object: a write met it.

    `credentials` gives what the servers of a managed tier were last seen to have of users and certificates.

    `sources` gives what a ConfigMap's key holds by name and key, `renders` what a pod, by UID, made of a prefix, by its
    digest, `warmed` what became of warming it there, by the digits of the version's scope and that digest, and
    `holdings` what a pod's tiers hold of a pool, by the pool's UID.

    `probes` gives what a pod, by UID, found when it probed isolation.

    `reclaims` gives how the deletion of a former cache stands, by its order and round.

    `erasures` gives what is kept of an erasure, by the UID of what ordered it, `ending` what is known of objects that
    are gone, for erasures in a namespace that is being deleted.

    `servers` gives the pods of a managed tier by the tier's name and their own, `clusters` the last look at a managed
    cluster.

    `data_keys` gives the data key of an epoch, or its id where a KMS wraps it. `judged_epochs` are those of them which
    no status names unless one in this snapshot does; of the others a status may still be news to come.
    `keys_unwrapping` are epochs whose keys are being unwrapped, `keys_lost` those whose keys cannot be had any more.
    `keys_problem` is why the KMS cannot be used, for people.
    """

    namespace: str
    term: int
    entropy: bytes
    domain_key: bytes | None = field(default=None, repr=False)
    data_keys: Mapping[str, bytes | str] = field(default_factory=dict, repr=False)
    judged_epochs: Set[str] = frozenset()
    keys_unwrapping: Set[str] = frozenset()
    keys_lost: Set[str] = frozenset()
    keys_problem: str = ""
    domains: Mapping[str, CacheDomain] = field(default_factory=dict)
    tiers: Mapping[str, CacheTier] = field(default_factory=dict)
    models: Mapping[str, CachedModel] = field(default_factory=dict)
    policies: Mapping[str, TenantCachePolicy] = field(default_factory=dict)
    groups: Mapping[str, TenantGroup] = field(default_factory=dict)
    pools: Mapping[str, PrefixPool] = field(default_factory=dict)
    invalidations: Mapping[str, CacheInvalidation] = field(default_factory=dict)
    unreadable: Mapping[Key, Unreadable] = field(default_factory=dict)
    policies_of_tenant: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    policy_names: Mapping[str, str] = field(default_factory=dict)
    unsettled: Set[str] = frozenset()
    claims: Mapping[str, TierClaims] = field(default_factory=dict)
    claimants: Mapping[Key, Mapping[str, Claim]] = field(default_factory=dict)
    granting: Mapping[Key, Mapping[str, int]] = field(default_factory=dict)
    children: Mapping[tuple[str, str], LiveObject] = field(default_factory=dict)
    owned: Mapping[str, Set[tuple[str, str]]] = field(default_factory=dict)
    foreign: Mapping[tuple[str, str], str] = field(default_factory=dict)
    secrets: Mapping[str, SecretFacts] = field(default_factory=dict)
    pods: Mapping[str, Mapping[str, Pod]] = field(default_factory=dict)
    departures: Mapping[str, tuple[Departure, ...]] = field(default_factory=dict)
    states: Mapping[str, VerifiedState] = field(default_factory=dict)
    bundles: Mapping[str, CommittedBundle] = field(default_factory=dict)
    backends: Mapping[str, BackendReport] = field(default_factory=dict)
    credentials: Mapping[str, CredentialLook] = field(default_factory=dict)
    probes: Mapping[str, ProbeReport] = field(default_factory=dict)
    servers: Mapping[str, Mapping[str, ServerPod]] = field(default_factory=dict)
    clusters: Mapping[str, ClusterReport] = field(default_factory=dict)
    sources: Mapping[tuple[str, str], SourceReport] = field(default_factory=dict)
    renders: Mapping[str, Mapping[str, RenderReport]] = field(default_factory=dict)
    warmed: Mapping[str, Mapping[tuple[str, str], WarmReport]] = field(default_factory=dict)
    holdings: Mapping[str, Mapping[str, HoldingReport]] = field(default_factory=dict)
    erasures: Mapping[str, ErasureNow] = field(default_factory=dict)
    reclaims: Mapping[tuple[str, int], ReclaimReport] = field(default_factory=dict)
    ending: Ending = field(default_factory=Ending)
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @property
    def domain(self) -> CacheDomain | None:
        """The namespace's CacheDomain."""
        return self.domains.get(DOMAIN_NAME)

    @property
    def domain_spec(self) -> CacheDomainSpec:
        """The domain's settings, or their defaults while it does not exist yet."""
        return self.domain.spec if self.domain else CacheDomainSpec()

    @property
    def domain_id(self) -> str | None:
        """The domain's random id, once it has one."""
        return self.domain.status.domain_id if self.domain else None

    @property
    def identity(self) -> tuple[bytes, str] | None:
        """The domain's key and id, as they are or were last: by these its blocks and its receipts are named."""
        key, domain = self.domain_key or self.ending.domain_key, self.domain_id or self.ending.domain_id
        return (key, domain) if key is not None and domain is not None else None

    def live_pods(self, model: str) -> tuple[Pod, ...]:
        """Every pod of a model that may hold a policy, by name: what an invalidation waits for."""
        pods = self.pods.get(model) or {}
        return tuple(pod for _, pod in sorted(pods.items()) if pod.live)

    def serving_pods(self, model: str) -> tuple[Pod, ...]:
        """The live pods that take requests: ready, or past their first acknowledgement.

        A pod that starts reads the newest bundle and is not ready before it acknowledged it, so policies need not wait
        for it; otherwise every rollout would rewrite the status of every policy.
        """
        return tuple(pod for pod in self.live_pods(model) if pod.ready or self.acked_revision(pod) > 0)

    def acked_revision(self, pod: Pod) -> int:
        """The revision that this pod enforces; 0 for none.

        It stands when the pod cannot be reached or its cache server restarts: what was enforced stays enforced, and a
        cache server without policy answers every lookup with a miss. What it acknowledged of a history that the API
        server has lost says nothing of the revisions that there are.
        """
        verified = self.states.get(pod.uid)
        return verified.state.acked if verified and not verified.contradicted else 0
