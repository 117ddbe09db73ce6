"""`kubectl kvstrata size MODEL`: options, and the table or JSON that they ask for."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstrata.cli import kubectl, pages
from kvstrata.cli.size.architecture import ConfigError, read_config
from kvstrata.cli.size.declared import CHUNK_TOKENS, MAX_CONFIG_BYTES, config_of, measured_token_bytes, tier_of
from kvstrata.cli.size.estimate import ELEMENT_BYTES, Cache, Figure, Machine, Source, Tier, Workload, figures, kv_dtype
from kvstrata.cli.text import plain, table
from kvstrata.objects.quantities import GIB, KIB, MIB
from kvstrata.quantity import quantity_bytes

FAILED = 1
_DTYPES = ("auto", *ELEMENT_BYTES)


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a CachedModel, or the path of a config.json or of its folder")
    kubectl.add_cluster(parser, None, "the CachedModel's namespace (default: that of kubectl's context)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="config.json of the CachedModel, instead of that of a pod")
    add("--dtype", choices=_DTYPES, help="type of the weights, as the engine's flag")
    add("--kv-cache-dtype", choices=_DTYPES, help="type of the KV cache, as the engine's flag")
    add("--tensor-parallel", type=_count, metavar="N", help="accelerators that a replica spans")
    add("--chunk", type=_count, metavar="TOKENS", help=f"tokens of a chunk (default: the model's, or {CHUNK_TOKENS})")
    add("--tier", action="append", default=[], type=_tier, metavar="NAME=SIZE", help="a further tier, such as ssd=2Ti")
    add("--tenants", type=_count, default=0, metavar="N", help="tenants of the working set")
    add("--conversations", type=_count, default=0, metavar="N", help="conversations of each tenant")
    add("--prompt-tokens", type=_count, default=0, metavar="N", help="tokens of each conversation's prompt")
    add("--tokens", type=_count, default=0, metavar="N", help="tokens of the working set, instead of these three")
    add("--tflops", type=_positive, default=0, metavar="N", help="peak of one replica's accelerators together")
    add("--mfu", type=_share, default=0, metavar="SHARE", help="part of the peak that prefill reaches, such as 0.4")
    add("--bandwidth", type=_positive, default=0, metavar="GB/S", help="bandwidth at which a tier restores")
    add("--latency", type=_positive, default=0, metavar="MS", help="its time to the first byte")
    add("--price-per-gib-month", type=_positive, default=0, metavar="PRICE", help="of a tier, in any currency")
    add("--price-per-hour", type=_positive, default=0, metavar="PRICE", help="of one replica, in the same currency")
    parser.set_defaults(run=_run, failed=FAILED)


def _number(kind: Callable[[str], float], good: Callable[[float], bool], must: str) -> Callable[[str], Any]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not good(value):
            raise argparse.ArgumentTypeError(f"{text!r} must be {must}")
        return value

    return read


_count = _number(int, lambda value: 0 < value < 1 << 50, "a number from 1")
_positive = _number(float, lambda value: 0 < value < 1e18, "a number above 0")
_share = _number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _tier(text: str) -> Tier:
    name, _, size = text.partition("=")
    try:
        return Tier(name, "", quantity_bytes(size), source=Source.GIVEN)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=SIZE, such as ssd=2Ti") from None


def _run(options: argparse.Namespace) -> int:
    cache, tiers, measured = _look(options)
    found = [*figures(cache, _workload(options), _machine(options)), *_measured(measured, cache)]
    kept = _workload(options).kept_tokens(cache.chunk_tokens)
    sys.stdout.write((_as_json if options.output == "json" else _as_table)(found, tiers, cache, kept))
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    if options.tokens and (options.tenants or options.conversations):
        raise ConfigError("--tokens is the whole working set: leave out --tenants and --conversations")
    if (options.tenants or options.conversations) and not options.prompt_tokens:
        raise ConfigError("the working set needs the length of a prompt: add --prompt-tokens")
    return Workload(options.tokens, options.tenants, options.conversations, options.prompt_tokens)


def _machine(options: argparse.Namespace) -> Machine:
    if bool(options.tflops) != bool(options.mfu):
        raise ConfigError("the work of a replica follows from both --tflops and --mfu: give both")
    if (options.bandwidth or options.price_per_hour) and not options.tflops:
        raise ConfigError("restoring is compared with computing: add --tflops and --mfu")
    return Machine(
        flop_per_s=options.tflops * 1e12,
        utilisation=options.mfu,
        bandwidth_bytes_per_s=options.bandwidth * 1e9,
        latency_s=options.latency / 1000,
        price_per_gib_month=options.price_per_gib_month,
        price_per_hour=options.price_per_hour,
    )


def _look(options: argparse.Namespace) -> tuple[Cache, list[Tier], Sequence[pages.Page] | None]:
    """Return the cache, its tiers, and the pages of its pods: None without a cluster."""
    path = Path(options.model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() or "/" in options.model or options.model.endswith(".json"):
        return _cache(options, path, {}), options.tier, None
    cluster = kubectl.cluster(options)
    model = cluster.get("cachedmodel.kvstrata.io", options.model)
    spec, pods = model["spec"], pages.pods_of(cluster, options.model)
    cache = _cache(options, options.config or config_of(cluster, model, pods), spec)
    named = spec.get("tiers")
    names = [options.model] if named is None else [tier["name"] for tier in named]
    declared = {tier["metadata"]["name"]: tier for tier in cluster.get("cachetiers.kvstrata.io")["items"]}
    replicas = (spec.get("engine") or {}).get("replicas", 1)
    tiers = [tier_of(declared[name], replicas) for name in names if name in declared]
    read = [page for page in pages.scrape(cluster, pods) if isinstance(page, pages.Page)]
    return cache, [*tiers, *options.tier], read


def _cache(options: argparse.Namespace, config: Path | str, spec: dict[str, Any]) -> Cache:
    architecture = read_config(_json(config))
    engine, declared = spec.get("engine") or {}, Source.DECLARED
    dtype = options.dtype or (spec.get("model") or {}).get("dtype") or "auto"
    of_cache = options.kv_cache_dtype or engine.get("kvCacheDtype") or "auto"
    source = declared if engine.get("kvCacheDtype") or (spec.get("model") or {}).get("dtype") else Source.CONFIGURATION
    return Cache(
        architecture,
        kv_dtype(architecture, dtype, of_cache),
        Source.GIVEN if options.kv_cache_dtype or options.dtype else source,
        options.tensor_parallel or engine.get("tensorParallelSize") or 1,
        options.chunk or (spec.get("cacheServer") or {}).get("chunkSize") or CHUNK_TOKENS,
    )


def _json(config: Path | str) -> object:
    try:
        if isinstance(config, Path):
            with config.open("rb") as file:
                return json.loads(file.read(MAX_CONFIG_BYTES))
        return json.loads(config)
    except OSError as error:
        raise ConfigError(f"{config} cannot be read, give the path of a config.json: {error.strerror}") from None
    except ValueError:
        where = config if isinstance(config, Path) else "the config.json of the pod"
        raise ConfigError(f"{where} is no JSON: give the config.json beside a model's weights") from None


def _measured(read: Sequence[pages.Page] | None, cache: Cache) -> Iterator[Figure]:
    if read is None:
        return
    found = measured_token_bytes(read, cache.blocks_of_chunk, cache.chunk_tokens)
    value, unit = ("not available: the pods stored no block yet", "") if found is None else (round(found, 1), "bytes")
    yield Figure(
        "model", "measuredBytesPerToken", "KV of a token in tiers, by their pods", value, unit, Source.MEASURED
    )


def _as_json(found: Sequence[Figure], tiers: Sequence[Tier], cache: Cache, kept: int) -> str:
    shown = {one.key: {"value": one.value, "unit": one.unit, "source": one.source} for one in found}
    rows = [
        {
            "name": tier.name, "medium": tier.medium, "bytes": tier.block_bytes, "perPod": bool(tier.pods),
            "pods": tier.pods, "tokens": tier.tokens(cache), "source": tier.source,
            "workingSetShare": tier.tokens(cache) / kept if kept else None,
        }
        for tier in tiers
    ]  # fmt: skip
    return json.dumps({"figures": shown, "tiers": rows}, indent=2) + "\n"


def _as_table(found: Sequence[Figure], tiers: Sequence[Tier], cache: Cache, kept: int) -> str:
    parts = []
    for section in dict.fromkeys(one.section for one in found):
        rows = [(one.label, _shown(one), one.source) for one in found if one.section == section]
        parts.append(table((section.upper(), "", "SOURCE"), *((plain(a), plain(b), c) for a, b, c in rows)))
    if tiers:
        capacities = [
            (
                plain(tier.name), tier.medium or "-", _size(tier.block_bytes) + (" in each pod" if tier.pods else ""),
                f"{tier.tokens(cache):,}", f"{min(1, tier.tokens(cache) / kept):.0%}" if kept else "-", tier.source,
            )
            for tier in tiers
        ]  # fmt: skip
        parts.append(table(("TIER", "MEDIUM", "FOR BLOCKS", "TOKENS", "WORKING SET", "SOURCE"), *capacities))
    return "\n".join(parts)


def _shown(one: Figure) -> str:
    if isinstance(one.value, str):
        return one.value
    if one.unit == "bytes":
        return f"{one.value:,} ({_size(one.value)})" if one.value >= KIB else f"{one.value:,} bytes"
    whole = isinstance(one.value, int) or one.value >= 1000
    number = f"{one.value:,.0f}" if whole else f"{one.value:.4g}"
    return f"{number} {one.unit}" if one.unit not in ("", "price") else number


def _size(size_bytes: float) -> str:
    for unit, name in ((GIB * 1024, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:,.1f} {name}"
    return f"{size_bytes:,.0f} bytes"
