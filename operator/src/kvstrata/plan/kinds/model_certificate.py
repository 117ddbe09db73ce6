"""The certificate that a CachedModel's pods show to callers."""

from __future__ import annotations

from collections.abc import Collection

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.common import TlsMode
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason
from kvstrata.model.pods import SecretFacts
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.conditions import Finding, false, true


def is_usable(secret: SecretFacts, subjects: Collection[str]) -> bool:
    """Whether a certificate that the operator issued stays: it is whole, of the present authority, not about to expire,
    and for exactly these names."""
    tls = secret.tls
    if tls is None or tls.problem or not tls.issued_by_it or secret.renewal_due:
        return False
    return tls.trusted == {tls.authority} and tls.names == frozenset(subjects)


def certificate_shown(world: World, model: CachedModel) -> Finding | None:
    """Return the condition CertificateCurrent, by the reports of pods that serve or start; None without TLS, or
    without the report of each pod that serves."""
    kind, tls = ConditionType.CERTIFICATE_CURRENT, model.spec.gate.tls
    if tls.mode is TlsMode.DISABLED:
        return None
    name, remedy = names.gate_tls(model.name), "delete the Secret, and the operator issues another certificate"
    if tls.secret_ref is not None:
        name, remedy = tls.secret_ref.name, "store a valid certificate and its own key as tls.crt and tls.key"
    for pod in world.live_pods(model.name):
        reported = world.states.get(pod.uid)
        if reported is not None and reported.state.certificate:
            message = f"Secret {name}, pod {pod.name}: {reported.state.certificate}; {remedy}"
            return false(kind, ModelReason.CERTIFICATE_UNUSABLE, message, lasting=True)
    serving = world.serving_pods(model.name)
    if not serving or any(pod.uid not in world.states for pod in serving):
        return None
    return true(kind, ModelReason.CERTIFICATE_SHOWN, f"every serving pod shows the certificate of Secret {name}")
