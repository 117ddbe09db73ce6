"""A model's attention and parameters, by its `config.json`.

Fields and their absence have the meaning of Transformers' classes of configurations. A configuration with an unknown KV
layout is refused: a wrong size is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.cli.text import CommandError

_WITHOUT_FIELD: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window_pattern": 6,
        "tie_word_embeddings": True, "vocab_size": 262_208,
    },
    "cohere2": {"sliding_window_pattern": 4, "tie_word_embeddings": True},
    "llama4_text": {"n_shared_experts": 1, "sliding_window_pattern": 4},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip
"""Values that absent fields have by their class of configuration, where it is not zero, false or the other rules'."""

_SEVERAL_HEADS = frozenset({"llama"})
"""Classes whose absent `num_key_value_heads` means one KV head for each head."""

_UNKNOWN_LAYOUTS = {
    "attn_layer_period": "its attention layers",
    "block_configs": "KV heads of each layer",
    "hybrid_override_pattern": "its attention layers",
    "index_head_dim": "the keys of its indexer",
    "num_kv_shared_layers": "layers that share KV",
    "attention_types": "its attention layers",
    "multi_query": "its KV heads",
}

_FULL, _WINDOW, _STATE = "full", "window", "state"
_KINDS = {
    "full_attention": _FULL, "attention": _FULL, "sliding_attention": _WINDOW, "chunked_attention": _WINDOW,
    "linear_attention": _STATE, "mamba": _STATE, "conv": _STATE, "recurrent": _STATE,
}  # fmt: skip


class ConfigError(CommandError):
    """A configuration from which no size follows. The message names the field."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Layers of a model by the part of a context that they keep: all tokens, the last `window_tokens`, or a state of
    constant size. MLA keeps one latent vector of `latent_dim` for a token and layer; it is 0 for other models.

    `active_parameters` are those that one token uses, embeddings included, without the experts that it does not meet.
    `attention_width` is the sum over heads of the dimensions of a query and of a value.
    """

    model_type: str
    dtype: str
    full_layers: int
    window_layers: int
    state_layers: int
    window_tokens: int
    kv_heads: int
    head_dim: int
    latent_dim: int
    attention_width: int
    parameters: int
    active_parameters: int
    kv_scheme: bool
    """The checkpoint has a quantisation of its own for the KV cache."""

    @property
    def kv_layers(self) -> int:
        return self.full_layers + self.window_layers


class _Fields:
    """Fields of a configuration, with the values that absent ones have."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config")
        self._all = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
        self.model_type = str(self._all.get("model_type", ""))
        self._absent = _WITHOUT_FIELD.get(self.model_type, {})

    def get(self, name: str) -> Any:
        found = self._all.get(name)
        return self._absent.get(name) if found is None else found

    def count(self, name: str, default: int | None = None) -> int:
        found = self.get(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise ConfigError(f"config.json lacks {name}: give the file of a decoder-only model")
        least = 1 if default is None else 0
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise ConfigError(f"{name} in config.json must be a whole number from {least}, it is {found!r}")
        return found

    def first(self, *names: str) -> int:
        """Return the first of these counts that is there, 0 without any."""
        return next((self.count(name, 0) for name in names if self.get(name) is not None), 0)


def read_config(config: object) -> Architecture:
    """Raises ConfigError for anything but a `config.json` from which the size of the KV cache follows."""
    if not isinstance(config, Mapping):
        raise ConfigError("config.json is no JSON object")
    fields = _Fields(config)
    for name, unknown in _UNKNOWN_LAYOUTS.items():
        if fields.get(name):
            raise ConfigError(f"config.json has {name}, and how that changes {unknown} is not known here")
    layers, heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads")
    latent, head_dim = fields.count("kv_lora_rank", 0), 0
    if latent:
        latent_dim = latent + fields.count("qk_rope_head_dim")
        kv_heads, query_dim = 0, fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        value_dim = fields.count("v_head_dim")
    else:
        latent_dim = 0
        kv_heads = fields.count("num_key_value_heads", heads if fields.model_type in _SEVERAL_HEADS else None)
        head_dim = query_dim = value_dim = fields.first("head_dim") or fields.count("hidden_size") // heads
    kinds = _layer_kinds(fields, layers)
    window = fields.first("sliding_window", "attention_chunk_size") if _WINDOW in kinds else 0
    parameters, active = _parameters(fields, layers, heads, kv_heads, query_dim, value_dim)
    quantised = fields.get("quantization_config")
    return Architecture(
        model_type=fields.model_type,
        dtype=str(fields.get("torch_dtype") or fields.get("dtype") or ""),
        full_layers=kinds.count(_FULL),
        window_layers=kinds.count(_WINDOW),
        state_layers=kinds.count(_STATE),
        window_tokens=window,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        attention_width=heads * (query_dim + value_dim),
        parameters=parameters,
        active_parameters=active,
        kv_scheme=isinstance(quantised, Mapping)
        and bool(quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")),
    )


def _layer_kinds(fields: _Fields, layers: int) -> Sequence[str]:
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(f"layer_types in config.json has not one entry for each of the {layers} layers")
        unknown = sorted({str(name) for name in types} - _KINDS.keys())
        if unknown:
            raise ConfigError(f"layer_types in config.json has {unknown[0]!r}, a kind of layer that is not known here")
        return [_KINDS[name] for name in types]
    if every := fields.first("full_attention_interval"):
        return [_STATE if (layer + 1) % every else _FULL for layer in range(layers)]
    if not fields.first("sliding_window", "attention_chunk_size") or fields.get("use_sliding_window") is False:
        return [_FULL] * layers
    if every := fields.first("sliding_window_pattern"):
        return [_WINDOW if (layer + 1) % every else _FULL for layer in range(layers)]
    if fields.get("use_sliding_window"):
        return [_WINDOW if layer >= fields.count("max_window_layers", 0) else _FULL for layer in range(layers)]
    return [_WINDOW] * layers


def _parameters(
    fields: _Fields, layers: int, heads: int, kv_heads: int, query_dim: int, value_dim: int
) -> tuple[int, int]:
    """Return the number of weights, and those that one token uses. Norms and biases, below a thousandth, are left out,
    and so are parts for images and for predicting several tokens."""
    hidden, dense = fields.count("hidden_size"), fields.first("intermediate_size_mlp", "intermediate_size")
    embeddings = fields.count("vocab_size") * hidden * (1 if fields.get("tie_word_embeddings") else 2)
    if latent := fields.count("kv_lora_rank", 0):
        queries = fields.first("q_lora_rank")
        projected = queries * (hidden + heads * query_dim) if queries else hidden * heads * query_dim
        rope = fields.count("qk_rope_head_dim")
        projected += hidden * (latent + rope) + latent * heads * (query_dim - rope + value_dim)
        attention = projected + heads * value_dim * hidden
    else:
        attention = 2 * hidden * (heads + kv_heads) * query_dim
    experts = fields.first("n_routed_experts", "num_experts", "num_local_experts")
    if not experts:
        total = embeddings + layers * (attention + 3 * hidden * dense)
        return total, total
    expert = 3 * hidden * fields.first("moe_intermediate_size", "intermediate_size")
    shared = expert * fields.first("n_shared_experts") + 3 * hidden * fields.first("shared_expert_intermediate_size")
    dense_layers = fields.first("first_k_dense_replace")
    sparse_layers = (layers - dense_layers) // (
        fields.first("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step") or 1
    )
    dense_layers = layers - sparse_layers
    common = embeddings + layers * attention + dense_layers * 3 * hidden * dense
    common += sparse_layers * (shared + hidden * experts)
    met = fields.count("num_experts_per_tok", fields.first("experts_per_token"))
    return common + sparse_layers * expert * experts, common + sparse_layers * expert * met
