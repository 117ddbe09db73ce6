"""Bytes of KV, the work that computes them, and capacity, break-even and cost. Every figure states its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from kvstrata.cli.size.architecture import Architecture, ConfigError
from kvstrata.contract.store.block_file import file_bytes
from kvstrata.contract.store.block_value import value_bytes
from kvstrata.objects.quantities import GIB

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
MAX_PROMPT_TOKENS = 1 << 27


def kv_dtype(architecture: Architecture, dtype: str = "auto", kv_cache_dtype: str = "auto") -> str:
    """Return the type of the cache's elements under the engine's flags `--dtype` and `--kv-cache-dtype`. With `auto`
    for both, vLLM loads weights of float32 as bfloat16. Raises ConfigError."""
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    if architecture.kv_scheme:
        raise ConfigError("the checkpoint has a KV cache quantisation of its own: state the type by --kv-cache-dtype")
    if dtype != "auto":
        return dtype
    if architecture.dtype not in ELEMENT_BYTES:
        raise ConfigError("config.json lacks torch_dtype: state the type of the weights by --dtype")
    return "bfloat16" if architecture.dtype == "float32" else architecture.dtype


def layer_bytes(architecture: Architecture, element_bytes: int, tensor_parallel: int = 1) -> int:
    """Return the bytes that a token takes in one layer of one rank, K and V together. Raises ConfigError."""
    if architecture.latent_dim:
        return architecture.latent_dim * element_bytes
    heads = architecture.kv_heads
    if max(heads, tensor_parallel) % min(heads, tensor_parallel):
        raise ConfigError(f"{tensor_parallel} ranks cannot share {heads} KV heads evenly: choose another size")
    return 2 * max(1, heads // tensor_parallel) * architecture.head_dim * element_bytes


def bytes_per_token(architecture: Architecture, element_bytes: int, tensor_parallel: int = 1) -> int:
    """Return the bytes that a token takes in a tier, of all ranks together: LMCache stores each token for every layer,
    with a window or not. Ranks beyond the number of KV heads store copies; of MLA, whose ranks hold equal bytes, one
    stores. `2 x layers x KV heads x head size x element`, of MLA `layers x (kv_lora_rank + rope) x element`."""
    stored_ranks = 1 if architecture.latent_dim else tensor_parallel
    return architecture.kv_layers * layer_bytes(architecture, element_bytes, tensor_parallel) * stored_ranks


def prefill_flop(architecture: Architecture, tokens: int) -> int:
    """Return the floating-point operations that compute a prompt: two for each active parameter and token, and two for
    each pair of positions in each dimension of queries and values."""
    window = min(tokens, architecture.window_tokens or tokens)
    pairs = architecture.full_layers * tokens**2 + architecture.window_layers * (2 * tokens * window - window**2)
    return 2 * architecture.active_parameters * tokens + architecture.attention_width * pairs


class Source(StrEnum):
    """`given` by the caller, `declared` in the cluster's objects, read from the model's `configuration`, `measured` by
    pods, or `computed` from the others."""

    GIVEN = "given"
    DECLARED = "declared"
    CONFIGURATION = "configuration"
    MEASURED = "measured"
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Figure:
    section: str
    key: str
    label: str
    value: float | str
    unit: str = ""
    source: Source = Source.COMPUTED


@dataclass(frozen=True, slots=True)
class Cache:
    """The engine's cache: elements, ranks (tensor parallel) and chunks."""

    architecture: Architecture
    kv_dtype: str
    kv_dtype_source: Source = Source.CONFIGURATION
    ranks: int = 1
    chunk_tokens: int = 256

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.kv_dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a tier."""
        return bytes_per_token(self.architecture, self.element_bytes, self.ranks)

    @property
    def blocks_of_chunk(self) -> int:
        """Blocks of a chunk in a tier: one of each rank that stores."""
        return 1 if self.architecture.latent_dim else self.ranks


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier's bytes for blocks, in each of `pods`, or in all together if that is 0."""

    name: str
    medium: str
    block_bytes: int
    pods: int = 0
    source: Source = Source.DECLARED

    def tokens(self, cache: Cache) -> int:
        """Return the tokens of whole chunks that fit, with the headers of stored blocks."""
        body = cache.token_bytes * cache.chunk_tokens // cache.blocks_of_chunk
        stored = {"Redis": value_bytes(body), "NVMe": file_bytes(body)}.get(self.medium, body)
        return self.block_bytes // (stored * cache.blocks_of_chunk) * cache.chunk_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens that are to be kept: `tokens`, or the whole chunks of every prompt. 0 was not given."""

    tokens: int = 0
    tenants: int = 0
    conversations: int = 0
    prompt_tokens: int = 0

    def kept_tokens(self, chunk_tokens: int) -> int:
        """Return 0 without a workload. The end of a prompt that fills no chunk is not stored."""
        if self.tokens:
            return self.tokens
        whole = self.prompt_tokens // chunk_tokens * chunk_tokens
        return max(1, self.tenants) * max(1, self.conversations) * whole


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica's accelerators together, a tier's bandwidth, and prices. 0 was not given."""

    flop_per_s: float = 0
    utilisation: float = 0
    bandwidth_bytes_per_s: float = 0
    latency_s: float = 0
    price_per_gib_month: float = 0
    price_per_hour: float = 0

    def compute_s(self, cache: Cache, tokens: int) -> float:
        return prefill_flop(cache.architecture, tokens) / (self.flop_per_s * self.utilisation)

    def restore_s(self, cache: Cache, tokens: int) -> float:
        return self.latency_s + cache.token_bytes * tokens / self.bandwidth_bytes_per_s

    def break_even_bandwidth(self, cache: Cache, tokens: int) -> float:
        """Return the bytes per second above which restoring a prompt beats computing it. For 0 tokens: the limit of
        short prompts, `bytes per token x FLOPS x utilisation / (2 x active parameters)`."""
        if tokens:
            return cache.token_bytes * tokens / self.compute_s(cache, tokens)
        work = self.flop_per_s * self.utilisation
        return cache.token_bytes * work / (2 * cache.architecture.active_parameters)

    def break_even_tokens(self, cache: Cache) -> int:
        """Return the shortest prompt, in whole chunks, that the tier restores faster than it is computed; 0 if there is
        none. Computing grows faster than restoring, so longer prompts pay as well."""
        least, most = 1, MAX_PROMPT_TOKENS // cache.chunk_tokens
        while least < most:
            middle = (least + most) // 2
            if self._restores(cache, middle):
                most = middle
            else:
                least = middle + 1
        return least * cache.chunk_tokens if self._restores(cache, least) else 0

    def _restores(self, cache: Cache, chunks: int) -> bool:
        tokens = chunks * cache.chunk_tokens
        return self.restore_s(cache, tokens) <= self.compute_s(cache, tokens)


def figures(cache: Cache, workload: Workload, machine: Machine) -> Iterator[Figure]:
    """Raises ConfigError where a figure was asked for that does not follow from the configuration."""
    yield from _of_model(cache)
    yield from _of_workload(cache, workload, machine)
    if machine.flop_per_s:
        if cache.architecture.state_layers:
            raise ConfigError("the work of layers without attention is not known here: leave out --tflops")
        yield from _of_machine(cache, workload, machine)


def _of_model(cache: Cache) -> Iterator[Figure]:
    figure, read, model = partial(Figure, "model"), Source.CONFIGURATION, cache.architecture
    yield figure("architecture", "architecture", model.model_type or "not named", "", read)
    yield figure("fullLayers", "layers that keep all tokens", model.full_layers, "", read)
    if model.window_layers:
        yield figure("windowLayers", "layers with a window", model.window_layers, "", read)
        yield figure("windowTokens", "their window", model.window_tokens, "tokens", read)
    if model.state_layers:
        yield figure("stateLayers", "layers with a state of constant size, not counted", model.state_layers, "", read)
    yield figure("kvDtype", "type of the KV cache", cache.kv_dtype, "", cache.kv_dtype_source)
    yield figure("bytesPerToken", "KV of a token in tiers", cache.token_bytes, "bytes")
    chunk_bytes = cache.token_bytes * cache.chunk_tokens
    yield figure("bytesPerChunk", f"KV of a chunk of {cache.chunk_tokens} tokens", chunk_bytes, "bytes")
    in_rank = model.kv_layers * layer_bytes(model, cache.element_bytes, cache.ranks)
    if cache.ranks > 1:
        yield figure(
            "engineBytesPerToken", f"KV of a token in each of the engine's {cache.ranks} ranks", in_rank, "bytes"
        )
    if model.window_layers:
        past = in_rank * model.full_layers // model.kv_layers
        yield figure("engineBytesPastWindow", "KV of a further token in the engine, past the window", past, "bytes")
    if not model.state_layers:
        yield figure("parameters", "parameters", model.parameters)
        yield figure("activeParameters", "parameters that a token uses", model.active_parameters)


def _of_workload(cache: Cache, workload: Workload, machine: Machine) -> Iterator[Figure]:
    figure, given = partial(Figure, "working set"), Source.GIVEN
    if workload.tenants:
        yield figure("tenants", "tenants", workload.tenants, "", given)
    if workload.conversations:
        yield figure("conversations", "conversations of each", workload.conversations, "", given)
    if workload.prompt_tokens:
        yield figure("promptTokens", "prompt of each", workload.prompt_tokens, "tokens", given)
    if tokens := workload.kept_tokens(cache.chunk_tokens):
        source = given if workload.tokens else Source.COMPUTED
        yield figure("workingSetTokens", "tokens to keep", tokens, "tokens", source)
        yield figure("workingSetBytes", "their KV", tokens * cache.token_bytes, "bytes")
        if price := machine.price_per_gib_month:
            yield figure("priceGibMonth", "price of a GiB for a month", price, "price", given)
            yield figure(
                "keepingPrice", "price of keeping them a month", tokens * cache.token_bytes / GIB * price, "price"
            )


def _of_machine(cache: Cache, workload: Workload, machine: Machine) -> Iterator[Figure]:
    figure, given, tokens = partial(Figure, "restore or compute"), Source.GIVEN, workload.prompt_tokens
    prompt = f"a prompt of {tokens:,} tokens"
    yield figure("tflops", "peak of a replica", machine.flop_per_s / 1e12, "TFLOPS", given)
    yield figure("mfu", "share of it that prefill reaches", machine.utilisation * 100, "%", given)
    short = machine.break_even_bandwidth(cache, 0)
    yield figure("breakEvenBandwidth", "restoring beats computing above, short prompts", short / 1e9, "GB/s")
    if tokens:
        bandwidth = machine.break_even_bandwidth(cache, tokens)
        yield figure("breakEvenBandwidthOfPrompt", f"the same, {prompt}", bandwidth / 1e9, "GB/s")
        yield figure("computeSeconds", f"computing {prompt}", machine.compute_s(cache, tokens), "s")
    if machine.bandwidth_bytes_per_s:
        yield figure("bandwidth", "bandwidth of the tier", machine.bandwidth_bytes_per_s / 1e9, "GB/s", given)
        yield figure("latency", "its time to the first byte", machine.latency_s, "s", given)
        if tokens:
            yield figure("restoreSeconds", f"restoring {prompt}", machine.restore_s(cache, tokens), "s")
        least = machine.break_even_tokens(cache)
        yield figure("breakEvenTokens", "it restores faster from", least or "no length", "tokens" if least else "")
    if machine.price_per_hour:
        yield figure("priceHour", "price of a replica for an hour", machine.price_per_hour, "price", given)
    if machine.price_per_hour and tokens:
        computing = machine.compute_s(cache, tokens) / 3600 * machine.price_per_hour
        yield figure("computingPrice", f"price of computing {prompt}", computing, "price")
        if machine.price_per_gib_month:
            keeping = tokens * cache.token_bytes / GIB * machine.price_per_gib_month
            yield figure("keepingPaysFrom", "keeping it costs less from", keeping / computing, "uses a month")
