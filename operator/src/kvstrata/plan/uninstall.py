"""Uninstall of a release: the objects that would stay Terminating without an operator, and their remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.plan.kinds import model_deletion

POLICY, MODEL = TenantCachePolicy.INFO.kind, CachedModel.INFO.kind
FINALIZERS = frozenset((FINALIZER, model_deletion.FINALIZER))
UNPROVEN = {
    POLICY: "cached blocks are not erased, and deleting it writes no receipt",
    MODEL: "its pods serve on, and end with their owner only",
    CacheTier.INFO.kind: "its servers run on, and end with their owner only",
    CacheInvalidation.INFO.kind: "its erasure is not complete: the remainder is not erased, and no receipt is written",
}
"""The kinds with finalizers, and the consequence of their removal."""


@dataclass(frozen=True, slots=True, order=True)
class HeldObject:
    """An object with a finalizer of the operator; `others` are its further finalizers."""

    kind: str
    namespace: str
    name: str
    resource_version: str
    deleting: bool
    others: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def held_objects(raws: Iterable[Mapping[str, Any]], served: Collection[str]) -> tuple[HeldObject, ...]:
    """Return the objects with a finalizer of the operator in the namespaces `served`, all if that is empty."""
    found = []
    for raw in raws:
        metadata = raw["metadata"]
        finalizers = metadata.get("finalizers") or ()
        if FINALIZERS & set(finalizers) and (not served or metadata["namespace"] in served):
            others = tuple(one for one in finalizers if one not in FINALIZERS)
            version, deleting = metadata["resourceVersion"], "deletionTimestamp" in metadata
            found.append(HeldObject(raw["kind"], metadata["namespace"], metadata["name"], version, deleting, others))
    return tuple(sorted(found))


def refusal(held: Collection[HeldObject], release: str, namespace: str, revision: str) -> str:
    """Return why a release is not uninstalled: every object, then the remedies. `revision` is the release's: Helm
    refuses to upgrade a release after a refused uninstall, but not to roll it back."""
    policies = [one for one in held if one.kind == POLICY]
    delete = [
        f"  kubectl delete tenantcachepolicies --all --namespace {one}"
        for one in sorted({p.namespace for p in policies})
    ]
    helm = f"  helm --namespace {namespace} {{}}"
    lines = (
        f"Release {release} is not uninstalled: only its operator removes the finalizers of {len(held)} "
        "objects. Without it they, and their namespaces, would stay Terminating:",
        *(f"  {one}: {_advice(one)}" for one in held),
        *(
            ("To erase with receipts, delete the policies, and uninstall again when they are gone:", *delete)
            if delete
            else ()
        ),
        "To release all of them without erasing:",
        helm.format(f"rollback {release} {revision}"),
        helm.format(f"upgrade {release} charts/kvstrata --reuse-values --set uninstall.releaseObjects=true"),
        helm.format(f"uninstall {release}"),
        "The rollback alone keeps the release: Helm takes it for half uninstalled until then.",
    )
    return "\n".join(lines)


def released(held: Collection[HeldObject]) -> str:
    """Return which objects lost the finalizer, and which erasures are therefore not proven."""
    return "\n".join(
        (
            f"{len(held)} objects no longer have the operator's finalizers:",
            *(f"  {one}: {UNPROVEN[one.kind]}" for one in held),
        )
    )


def _advice(one: HeldObject) -> str:
    if one.kind == POLICY:
        return "it is being erased: wait until it is gone" if one.deleting else "deleting it erases its cached blocks"
    if one.kind in (MODEL, CacheTier.INFO.kind):
        return "its pods are ending: wait until it is gone" if one.deleting else "deleting it ends its pods"
    return "its erasure is running: wait until it is complete"
