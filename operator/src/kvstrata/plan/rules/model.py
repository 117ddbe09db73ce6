"""Problems of a CachedModel that schema and CEL cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.rules.tier import reserved, sentence


def tiers_exist(world: World, model: CachedModel) -> Decision | None:
    missing = [name for name in model.spec.tier_names if name not in world.tiers]
    if not missing:
        return None
    known = ", ".join(sorted(world.tiers)) or "none"
    return Decision(
        ModelReason.TIER_NOT_FOUND,
        f"CacheTier {missing[0]} does not exist in namespace {world.namespace} (there: {known}): create it or correct "
        "spec.tiers",
    )


def tiers_fit_a_pod(world: World, model: CachedModel) -> Decision | None:
    names = [name for name in model.spec.tier_names if world.tiers[name].spec.medium is Medium.CPU]
    if len(names) <= 1:
        return None
    return Decision(
        ModelReason.TIERS_CONFLICT,
        f"CacheTiers {' and '.join(names)} are all of medium CPU, and a pod has one such tier: leave one in spec.tiers",
    )


def chunks_are_whole_blocks(world: World, model: CachedModel) -> Decision | None:
    """A chunk that ends within one of the engine's blocks could never be stored."""
    block = _block_size(model.spec.engine.args)
    chunk = model.spec.cache_server.chunk_size_tokens
    if block is None or chunk % block == 0:
        return None
    return Decision(
        ModelReason.CHUNK_SIZE_MISMATCH,
        f"cacheServer.chunkSize {chunk} is not a multiple of the engine's --block-size {block}: change one of them",
    )


def warms_memory_up_from_tiers(world: World, model: CachedModel) -> Decision | None:
    """Warmup needs a memory tier and a source tier."""
    media = {world.tiers[name].spec.medium for name in model.spec.tier_names}
    if model.spec.cache_server.warmup is None or (Medium.CPU in media and media & {Medium.NVME, Medium.REDIS}):
        return None
    return Decision(
        ModelReason.WARMUP_NEEDS_TIERS,
        "cacheServer.warmup loads a CPU tier from an NVMe or Redis tier: list one of each in spec.tiers, or remove it",
    )


def names_own_secrets(world: World, model: CachedModel) -> Decision | None:
    """A model may mount its user's Secrets, not the operator's."""
    spec = model.spec
    hub = spec.model.source.hub
    token = hub.token_secret_ref if hub else None
    tls = spec.gate.tls.secret_ref if spec.gate.tls else None
    keys = spec.gate.authentication.api_keys.secret_ref
    named = (token.name if token else None, tls.name if tls else None, keys.name)
    name = reserved(named)
    return Decision(ModelReason.SECRET_NOT_ALLOWED, sentence(name, "the model")) if name else None


def _block_size(arguments: Sequence[str]) -> int | None:
    """Return the value of --block-size, in one argument or two, or None without a number."""
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.replace("_", "-").partition("=")
        if flag == "--block-size":
            text = value if equals else next(iter(arguments[number + 1 :]), "")
            return int(text) if text.isdigit() and int(text) > 0 else None
    return None


RULES = (
    tiers_exist,
    tiers_fit_a_pod,
    chunks_are_whole_blocks,
    warms_memory_up_from_tiers,
    names_own_secrets,
)


def tiers_ordered(tiers: Sequence[CacheTier]) -> Finding:
    """Return the warning TiersOrdered for `tiers` in the order of spec.tiers; pods work regardless."""
    kind = ConditionType.TIERS_ORDERED
    for faster, slower in combinations(tiers, 2):
        if _rank(slower) < _rank(faster):
            return false(
                kind,
                ModelReason.NOT_FAST_TO_SLOW,
                f"CacheTier {slower.name} ({slower.spec.medium}) is listed behind {faster.name}"
                f" ({faster.spec.medium}), but serves before it: list it first",
            )
    for faster, slower in combinations(sorted(tiers, key=_rank), 2):
        larger, smaller = faster.spec.capacity_bytes, slower.spec.capacity_bytes
        if _comparable(faster, slower) and smaller < larger:
            return false(
                kind,
                ModelReason.LOWER_TIER_SMALLER,
                f"CacheTier {slower.name} holds {readable(smaller)}{_where(slower)} and the faster {faster.name}"
                f" {readable(larger)}{_where(faster)}: it has mostly evicted the blocks that {faster.name} has no "
                f"room for",
            )
    return true(
        kind, ModelReason.TIERS_ORDERED, "tiers are listed from fast to slow, and none is smaller than a faster"
    )


def _rank(tier: CacheTier) -> int:
    """Return the serving order of media: CPU, then NVMe and Redis in the order of the spec."""
    return 0 if tier.spec.medium is Medium.CPU else 1


def _comparable(faster: CacheTier, slower: CacheTier) -> bool:
    """Whether sizes show which tier holds more. Pods share Redis and their own tiers overlap, so Redis must only hold
    as much as one pod; file tiers behind Redis are not comparable."""
    return faster.spec.per_pod or not slower.spec.per_pod


def _where(tier: CacheTier) -> str:
    return " in each pod" if tier.spec.per_pod else ""
