"""Renderings of a pool's prefixes by a model's pods, which pods to ask, and whether they agree.

Every serving pod with the newest template is asked, because one with other tokens could not use the warmed chunks. An
unreachable pod blocks no pool. For an erasure every live pod must answer (`by_all`), because a copy under an unknown
name would be found again. An answer expires after `RENDER_AGAIN_S`: a template may include the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.reasons import PoolReason, SharedReason
from kvstrata.contract.messages.pools import MAX_PREFIX_TOKENS, Rendered, RenderRefusal, manifest_hashes
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, MAX_CHUNKS
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import Pod
from kvstrata.model.pools import PodAnswer
from kvstrata.model.world import World
from kvstrata.objects.pod.identity import render_id
from kvstrata.plan.actions import Decision, RenderPool
from kvstrata.plan.conditions import listed
from kvstrata.plan.pools.content import Content, Progress, content_of

ASK_AGAIN_S = 10.0

RENDER_AGAIN_S = 6 * 3600.0
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Agreed:
    """The common rendering: the manifest of all chunks, and tokens and chunks of each prefix."""

    manifest: str
    hashes: bytes = field(repr=False)
    prefixes: Mapping[str, Rendered]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.prefixes.values())

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES


def newest_render_id(world: World, model: CachedModel) -> str:
    return world.memo.get(render_id, model.name, (model.spec,), lambda: render_id(model))


def render(
    world: World,
    model: CachedModel,
    name: str,
    content: Content,
    now: datetime,
    *,
    asker: str = PrefixPool.INFO.kind,
    by_all: bool = False,
) -> Progress[Agreed]:
    """Return the state of rendering `content`, for the object of kind `asker` and this name. With `by_all` nothing is
    agreed while a live pod has another template, or has not answered."""
    wanted = newest_render_id(world, model)
    serving = [pod for pod in world.serving_pods(model.name) if not pod.deleting]
    pods = list(world.live_pods(model.name)) if by_all else serving
    current = [pod for pod in pods if pod.render_id == wanted]
    if not current:
        return Progress(pending=_no_pod(model, serving))
    rendered_by_pod = {pod: _answer_of(world, pod, wanted, content) for pod in current}
    asked = [_asked(world, pod, rendered_by_pod[pod], content, now) for pod in current]
    questions = tuple(RenderPool(name, pod, due, asker) for pod, (due, _) in zip(current, asked, strict=True) if due)
    again_s = min((after for _, after in asked if after is not None), default=None)
    objection = _objection(content, rendered_by_pod.values())
    if objection is not None:
        return Progress(objection=objection, questions=questions, again_s=again_s)
    manifests = _manifests(content, rendered_by_pod)
    if len(set(manifests.values())) > 1:
        return Progress(objection=_disagreement(manifests), questions=questions, again_s=again_s)
    if by_all and len(current) < len(pods):
        return Progress(pending=_differing(model, pods, wanted), questions=questions, again_s=again_s)
    late = [pod for pod in current if pod not in manifests and (by_all or not manifests or can_be_asked(world, pod))]
    if late:
        message = f"waiting for {late[0].name}" + (" and others" if late[1:] else "")
        waiting = Decision(PoolReason.RENDERING, message)
        return Progress(pending=waiting, questions=questions, again_s=again_s)
    first = rendered_by_pod[next(iter(manifests))]
    hashes = manifest_hashes(list(first.values()))
    if len(hashes) > MAX_CHUNKS * CHUNK_HASH_BYTES:
        return Progress(objection=_too_many(hashes), questions=questions, again_s=again_s)
    prefixes = {name: first[digest] for name, digest in content.digests.items()}
    return Progress(Agreed(next(iter(manifests.values())), hashes, prefixes), questions=questions, again_s=again_s)


def rendered_manifest(world: World, pool: PrefixPool, digest: str) -> bytes | None:
    """Return the chunk hashes with that digest, if a pod rendered them from the present content; else None."""
    content = content_of(world, pool)
    if not isinstance(content, Content):
        return None
    for pod in world.pods.get(pool.spec.model_ref.name, {}).values():
        reports = world.renders.get(pod.uid, {})
        made = [report.answer for one in content.distinct if (report := reports.get(one)) is not None]
        whole = [rendered for rendered in made if rendered is not None and rendered.chunks]
        if len(whole) == len(content.distinct) and digest_bytes(hashes := manifest_hashes(whole)) == digest:
            return hashes
    return None


def _no_pod(model: CachedModel, serving: list[Pod]) -> Decision:
    if not serving:
        return Decision(SharedReason.NO_LIVE_PODS, f"no pod of CachedModel {model.name} serves, so no pod can render")
    message = f"no pod with the newest template of CachedModel {model.name} serves yet: see its rollout"
    return Decision(SharedReason.ROLLING_OUT, message)


def _differing(model: CachedModel, pods: list[Pod], wanted: str) -> Decision:
    others = [pod for pod in pods if pod.render_id != wanted]
    more = " and others have" if others[1:] else " has"
    return Decision(
        SharedReason.ROLLING_OUT,
        f"{others[0].name}{more} another template than the newest of CachedModel {model.name}, and may make other "
        "chunks of it: waiting for the rollout to end",
    )


def _answer_of(world: World, pod: Pod, wanted: str, content: Content) -> dict[str, Rendered]:
    verified = world.states.get(pod.uid)
    reports = world.renders.get(pod.uid, {})
    if verified is None:
        return {}
    boots = (verified.state.gate_boot, verified.state.cache_boot)
    return {
        digest: made
        for digest in content.distinct
        if (report := reports.get(digest)) is not None
        and (made := report.answer) is not None
        and (made.gate_boot, made.cache_boot, made.render_id) == (*boots, wanted)
    }


def _asked(
    world: World, pod: Pod, rendered_by_pod: Mapping[str, Rendered], content: Content, now: datetime
) -> tuple[tuple[PrefixSource, ...], float | None]:
    """Return the prefixes to ask a pod for now, and seconds until the next."""
    if not can_be_asked(world, pod):
        return (), None
    reports = world.renders.get(pod.uid, {})
    waits = {digest: _wait_s(reports.get(digest), digest in rendered_by_pod, now) for digest in content.distinct}
    due = tuple(source for digest, source in content.distinct.items() if waits[digest] <= 0)
    later = [wait_s for wait_s in waits.values() if wait_s > 0]
    return due, min(later, default=None)


def can_be_asked(world: World, pod: Pod) -> bool:
    """Whether a pod's gate, engine and cache server are all present."""
    verified = world.states.get(pod.uid)
    if verified is None or not verified.in_contact or not pod.ip:
        return False
    return verified.state.engine_ready and bool(verified.state.cache_boot)


def _wait_s(report: PodAnswer[Rendered] | None, valid: bool, now: datetime) -> float:
    if report is None:
        return 0.0
    return (RENDER_AGAIN_S if valid else ASK_AGAIN_S) - (now - report.at).total_seconds()


def _objection(content: Content, rendered: Iterable[Mapping[str, Rendered]]) -> Decision | None:
    answers = list(rendered)
    for name, digest in content.digests.items():
        for made in (answer[digest] for answer in answers if digest in answer):
            decision = _refusal(name, made) or _size_problem(name, made)
            if decision is not None:
                return decision
    return None


def _refusal(name: str, made: Rendered) -> Decision | None:
    match made.refused:
        case RenderRefusal.SOURCE_REFUSED:
            return Decision(
                PoolReason.SOURCE_REFUSED,
                f"prefix {name}: the gate or the engine refuses it as it would refuse a caller's: send it to "
                "/v1/chat/completions or /v1/completions to learn why",
            )
        case RenderRefusal.DATED:
            return Decision(
                PoolReason.UNSTABLE_TEMPLATE,
                f"prefix {name}: the chat template writes today's date into it, so it would be another one tomorrow: "
                "give the template a fixed one for all requests in the model's spec.engine.args, for example "
                """["--default-chat-template-kwargs", "{\\"date_string\\": \\"26 Jul 2024\\"}"]""",
            )
        case RenderRefusal.CHANGING:
            return Decision(
                PoolReason.UNSTABLE_TEMPLATE,
                f"prefix {name}: rendered twice it is two different prefixes: the chat template writes a time or a "
                "random value into it; choose another with --chat-template in the model's spec.engine.args",
            )
        case None:
            return None


def _size_problem(name: str, made: Rendered) -> Decision | None:
    if made.too_long:
        return Decision(
            PoolReason.PREFIX_TOO_LONG,
            f"prefix {name} has {made.total} tokens; the engine takes requests of {made.max_model_tokens}, and a "
            f"prefix has at most {MAX_PREFIX_TOKENS}: shorten it",
        )
    if made.chunks:
        return None
    if made.total >= made.chunk_tokens:
        why = "the chat template puts it behind the following messages, or changes it with them"
    else:
        why = "make it longer, or the model's cacheServer.chunkSize smaller"
    return Decision(
        PoolReason.NO_WHOLE_CHUNK,
        f"prefix {name}: {made.tokens} of its {made.total} tokens are the same for every continuation, and a chunk has "
        f"{made.chunk_tokens}: {why}",
    )


def _manifests(content: Content, rendered_by_pod: Mapping[Pod, Mapping[str, Rendered]]) -> dict[Pod, str]:
    """Return the manifest of each pod that rendered all prefixes; equal ones are computed once."""
    known: dict[tuple[bytes, ...], str] = {}
    manifests: dict[Pod, str] = {}
    for pod, made in rendered_by_pod.items():
        if len(made) < len(content.distinct):
            continue
        named = tuple(made[digest].hashes for digest in content.distinct)
        if named not in known:
            known[named] = digest_bytes(manifest_hashes(list(made.values())))
        manifests[pod] = known[named]
    return manifests


def _disagreement(manifests: Mapping[Pod, str]) -> Decision:
    reported = [f"{pod.name} ({manifest[:_SHOWN]})" for pod, manifest in manifests.items()]
    return Decision(
        PoolReason.REPLICAS_DISAGREE,
        f"pods make different tokens of the same prefixes: {listed(reported, _SHOWN)}: name a fixed revision of the "
        "weights and the tokenizer",
    )


def _too_many(hashes: bytes) -> Decision:
    return Decision(
        PoolReason.TOO_MANY_CHUNKS,
        f"the prefixes have {len(hashes) // CHUNK_HASH_BYTES} chunks together, and a pool holds {MAX_CHUNKS}: make two "
        "pools of it, or the model's cacheServer.chunkSize larger",
    )
