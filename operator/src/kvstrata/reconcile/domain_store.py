"""What the operator knows of one namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.model.erasure.record import ErasureNow
from kvstrata.model.guarantees import ClaimIndex
from kvstrata.model.memo import Memo
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
from kvstrata.model.refs import Key
from kvstrata.reconcile.parse import OWN_KINDS
from kvstrata.reconcile.versions import Versions


@dataclass(slots=True)
class DomainStore:
    """Everything about one namespace. Read it through `Store.world`."""

    namespace: str
    versions: Versions
    objects: dict[str, dict[str, Any]] = field(default_factory=lambda: {kind: {} for kind in OWN_KINDS})
    unreadable: dict[Key, Unreadable] = field(default_factory=dict)
    policies_of_tenant: dict[str, tuple[str, ...]] = field(default_factory=dict)
    contested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    policy_names: dict[str, str] = field(default_factory=dict)
    unsettled: set[str] = field(default_factory=set)
    claims: ClaimIndex = field(default_factory=ClaimIndex)
    granting: dict[Key, Mapping[str, int]] = field(default_factory=dict)
    """What statuses that are being written will say is admitted, by tier."""
    children: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    owned: dict[str, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    secrets: dict[str, SecretFacts] = field(default_factory=dict)
    domain_key: bytes | None = field(default=None, repr=False)
    data_keys: Mapping[str, bytes | str] = field(default_factory=dict, repr=False)
    """By epoch; replaced as a whole when one changes. A text is the id of a key that is in no Secret."""
    keys_awaited: frozenset[str] = frozenset()
    keys_lost: frozenset[str] = frozenset()
    keys_problem: str = ""
    judged_epochs: set[str] = field(default_factory=set)
    """Of the data keys' epochs those that were seen to leave a status, or whose key was known before a whole list of
    objects was read: a key is drawn for an epoch that a status has, so a later list shows whether one still does."""
    pods: dict[str, dict[str, Pod]] = field(default_factory=lambda: defaultdict(dict))
    departures: dict[str, tuple[Departure, ...]] = field(default_factory=dict)
    states: dict[str, VerifiedState] = field(default_factory=dict)
    bundles: dict[str, CommittedBundle] = field(default_factory=dict)
    suspected_bundles: dict[str, float] = field(default_factory=dict)
    """By model, the newest resourceVersion of its root that a watch told; infinite when a shard was touched."""
    committed_at: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By model, the revision that this process committed last and when, in monotonic seconds."""
    backends: dict[str, BackendReport] = field(default_factory=dict)
    credentials: dict[str, CredentialLook] = field(default_factory=dict)
    servers: dict[str, dict[str, ServerPod]] = field(default_factory=lambda: defaultdict(dict))
    """Pods of managed tiers, by the tier's name and their own."""
    clusters: dict[str, ClusterReport] = field(default_factory=dict)
    sources: dict[tuple[str, str], SourceReport] = field(default_factory=dict)
    """By a ConfigMap's name and key."""
    renders: dict[str, dict[str, RenderReport]] = field(default_factory=lambda: defaultdict(dict))
    """By a pod's UID and a prefix's digest."""
    warmed: dict[str, dict[tuple[str, str], WarmReport]] = field(default_factory=lambda: defaultdict(dict))
    """By a pod's UID, and the digits of a version's scope with a prefix's digest."""
    holdings: dict[str, dict[str, HoldingReport]] = field(default_factory=lambda: defaultdict(dict))
    """By a pod's UID and a pool's."""
    probes: dict[str, ProbeReport] = field(default_factory=dict)
    """By a pod's UID."""
    erasures: dict[str, ErasureNow] = field(default_factory=dict)
    """By the UID of what ordered them."""
    reclaims: dict[tuple[str, int], ReclaimReport] = field(default_factory=dict)
    """By order and round."""
    ending: Ending = field(default_factory=Ending)
    memo: Memo = field(default_factory=Memo)

    def forget_ending(self) -> None:
        """Forget what the namespace left, if nothing of it is there any more that could need it."""
        if not (self.erasures or self.unreadable or any(self.objects.values())):
            self.ending = Ending()
