"""The allow-list of a caller's request: endpoints, keys of their bodies, and the bound of each key.

The lists are the keys of vLLM 0.32 that cannot reach another caller's cache, files, addresses or place in the queue.
Any other key is refused by name: a later engine may give it a meaning. Keys of the public APIs that the engine does not
serve are refused with a reason, dropped if they are hints, and accepted with the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.contract.messages.prefix import refused_argument
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.proxy import content
from kvstrata_sidecar.gate.proxy.schemas import MAX_SCHEMA_BYTES, SchemaBudget, WithSchemas, choices
from kvstrata_sidecar.gate.proxy.values import (
    HINTS,
    MAX_NAME_CHARACTERS,
    Bound,
    Json,
    biases,
    by_type,
    flag,
    number,
    one_of,
    record,
    shown,
    text,
    texts,
    token_ids,
    unserved,
    whole,
    wrong,
)

FORBIDDEN: Mapping[str, str] = {
    "cache_salt": "the gate derives the cache namespace from your API key; a caller cannot choose it",
    "kv_transfer_params": "it reads and writes the KV cache of other requests",
    "ec_transfer_params": "it reads and writes the encoder cache of other requests",
    "vllm_xargs": "it reaches extensions of the engine that do not know tenants",
    "request_id": "the engine's ids are shared by all tenants; send the header x-request-id",
    "session_id": "the engine's sessions are shared by all tenants",
    "priority": "the engine's queue is shared by all tenants",
    "prompt_embeds": "embeddings are not keyed by their content and are deserialised by the engine",
    "mm_processor_kwargs": "the engine's multimodal cache is shared by all tenants",
    "media_io_kwargs": "it steers how the engine fetches and decodes files",
    "mm_payload": "it belongs to the engine's internal endpoints",
    "return_mm_kwargs": "it belongs to the engine's internal endpoints",
    "chat_template": "templates are code; the operator of the model chooses them",
    "logits_processors": "it names code to load",
    "previous_response_id": "stored responses are shared by all tenants",
    "watermarking": "the operator of the model chooses it",
    "guided_decoding_backend": "the operator of the model chooses the backend",
}
"""Keys that are refused with the reason, even if the engine does not know them."""

UNSERVED: Mapping[str, tuple[str, object]] = {
    "audio": ("the model answers in text", None),
    "modalities": ("the model answers in text", ["text"]),
    "function_call": ("use 'tool_choice'", "none"),
    "functions": ("use 'tools'", []),
    "moderation": ("no moderation runs here", None),
    "prediction": ("the engine takes no predicted output", None),
    "web_search_options": ("the engine searches nowhere", None),
    "background": ("requests are answered while the caller waits", False),
    "best_of": ("the engine returns every sequence that it computes; use 'n'", 1),
    "use_beam_search": ("a beam occupies the engine for many sequences; use 'n'", False),
    "suffix": ("the engine completes at the end only", ""),
    "compaction": ("the engine edits no context", None),
    "context_management": ("the engine edits no context", None),
    "thread": ("the engine stores no messages; send them all", None),
    "container": ("the engine has no containers", None),
    "mcp_servers": ("the engine calls no servers; offer their tools in 'tools'", []),
    "fallbacks": ("this gate serves one model", []),
    "inference_geo": ("the owner of the cluster chooses where it runs", None),
    "speed": ("the engine has one speed", "standard"),
    "output_format": ("use 'output_config'", None),
}
"""Keys of the public APIs that are refused, with the reason, unless they have this value or null: no change."""

IGNORED = HINTS | {
    "betas", "billing_policy", "diagnostics", "fallback_credit_token", "metadata", "model", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    "user_profile_id", "verbosity", "workspace_id",
}  # fmt: skip
"""Hints about caching, billing, callers and style: accepted, not forwarded. `model` is replaced by the gate's own."""

MAX_SEQUENCES = 64
"""Sequences of one request. The engine admits thousands, which would occupy it for one caller."""

_MOST = 2**31 - 1
_NAME = text(MAX_NAME_CHARACTERS)
_STOP_TEXTS = 16
_STOP_CHARACTERS = 1024
_LOGPROBS = whole(0, 20)
_MAX_TEMPLATE_KEYWORDS = 64


def _template_keywords(value: object, where: str) -> None:
    if not isinstance(value, dict):
        raise wrong(where, "an object")
    if refused_argument(value) is not None:
        raise bad_request(
            Reason.FORBIDDEN_KEY, f"'{where}' takes simple values for names that the template itself defines", where
        )
    if len(value) > _MAX_TEMPLATE_KEYWORDS or any(
        isinstance(inner, str) and len(inner) > MAX_NAME_CHARACTERS for inner in value.values()
    ):
        raise wrong(where, f"at most {_MAX_TEMPLATE_KEYWORDS} values of at most {MAX_NAME_CHARACTERS} characters")


def _response_format(budget: SchemaBudget) -> Bound:
    schema = {"name": _NAME, "description": text(MAX_SCHEMA_BYTES), "schema": budget.take, "strict": flag}
    tag = {"format": budget.take, "structures": budget.listed(128), "triggers": texts(128, MAX_NAME_CHARACTERS)}
    kinds: Mapping[str, Mapping[str, Bound]] = {
        "text": {}, "json_object": {}, "json_schema": {"json_schema": record(schema)}, "structural_tag": tag,
    }  # fmt: skip
    return by_type({name: record({"type": _NAME, **keys}) for name, keys in kinds.items()})


def _structured_outputs(budget: SchemaBudget) -> Bound:
    flags = dict.fromkeys(("json_object", "disable_any_whitespace", "disable_additional_properties"), flag)
    patterns = dict.fromkeys(("regex", "whitespace_pattern"), budget.take_regex)
    schemas = dict.fromkeys(("json", "structural_tag"), budget.take_text)
    return record({**flags, **patterns, **schemas, "choice": choices, "grammar": text(16 * 1024)})


_THINKING = by_type(
    {
        "enabled": record(
            {"type": _NAME, "budget_tokens": whole(0, _MOST), "display": _NAME},
            {"block_binding": "the engine binds no blocks"},
        ),
        "adaptive": record({"type": _NAME, "display": _NAME}, {"block_binding": "the engine binds no blocks"}),
        "disabled": record({"type": _NAME}),
    },
    {"between_tools": "the engine thinks before an answer or not at all"},
)


def _output_config(budget: SchemaBudget) -> Bound:
    formats = by_type({"json_schema": record({"type": _NAME, "schema": budget.take})})
    return record({"effort": _NAME, "format": formats}, {"task_budget": "use 'max_tokens'"})


_SAMPLING: Mapping[str, Bound] = {
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0, 100),
    "length_penalty": number(-100, 100),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": whole(-1, _MOST),
    "min_p": number(0, 1),
    "seed": whole(-(2**63), 2**63 - 1),
    "stop": texts(_STOP_TEXTS, _STOP_CHARACTERS, single=True),
    "stop_token_ids": token_ids(128),
    "max_tokens": whole(0, _MOST),
    "min_tokens": whole(0, _MOST),
    "n": whole(1, MAX_SEQUENCES),
    "logit_bias": biases,
    "prompt_logprobs": _LOGPROBS,
    "logprob_token_ids": token_ids(128),
    "allowed_token_ids": token_ids(4096),
    "bad_words": texts(128, MAX_NAME_CHARACTERS),
    "truncate_prompt_tokens": whole(-1, _MOST),
    "truncation_side": one_of("left", "right"),
    "stream_options": record({"include_usage": flag, "continuous_usage_stats": flag}),
    "response_format": WithSchemas(_response_format),
    "structured_outputs": WithSchemas(_structured_outputs),
    "thinking_token_budget": whole(-1, _MOST),
    **dict.fromkeys(
        ("add_special_tokens", "echo", "ignore_eos", "include_stop_str_in_output", "return_token_ids",
         "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "stream"),
        flag,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the engine that callers may use. `forwarded` keys, with `required` among them, have bounds.
    `usage_option`: the endpoint knows `stream_options`. `generates`: it computes tokens, under a salt."""

    path: bytes
    forwarded: Mapping[str, Bound]
    required: str
    usage_option: bool
    generates: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """`sequences` are `n` for each prompt. `strip_usage`: the gate asked for a usage event that the caller did not."""

    sequences: int
    strip_usage: bool


def rewrite(endpoint: Endpoint, body: Json) -> tuple[Json, Shape]:
    """Return the part of `body` for the engine, without `model` and `cache_salt`. Nested keys that are not forwarded
    are removed in place. Raises Refusal (400) that names the offending key."""
    fields: Json = {}
    bounds = endpoint.forwarded
    for key, value in body.items():
        if key in bounds:
            if value is not None:
                fields[key] = value
        elif key not in IGNORED:
            _require_default(key, value)
    budget = SchemaBudget()
    for key, value in fields.items():
        bound = bounds[key]
        (bound.within(budget) if isinstance(bound, WithSchemas) else bound)(value, key)
    if endpoint.required not in fields:
        bounds[endpoint.required](None, endpoint.required)
    prompt, stream = fields.get("prompt"), fields.get("stream", False)
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    sequences = int(fields.get("n", 1)) * prompts
    if sequences > MAX_SEQUENCES:
        raise bad_request(
            Reason.BAD_VALUE, f"one request may ask for at most {MAX_SEQUENCES} sequences (n times prompts)",
            "prompt" if prompts > MAX_SEQUENCES else "n",
        )  # fmt: skip
    options = fields.get("stream_options", {})
    if options and not stream:
        raise bad_request(Reason.BAD_VALUE, "'stream_options' needs 'stream': true", "stream_options")
    if options.get("continuous_usage_stats") and not options.get("include_usage"):
        raise bad_request(Reason.BAD_VALUE, "'continuous_usage_stats' needs 'include_usage': true", "stream_options")
    strip_usage = stream and endpoint.usage_option and not options.get("include_usage")
    if strip_usage:
        fields["stream_options"] = {**options, "include_usage": True}
    return fields, Shape(sequences, strip_usage)


def _require_default(key: str, value: object) -> None:
    """Raise Refusal unless this key, which is not forwarded, changes nothing with this value."""
    if key in FORBIDDEN:
        raise bad_request(Reason.FORBIDDEN_KEY, f"'{key}' is not accepted: {FORBIDDEN[key]}", key)
    if key not in UNSERVED:
        name = shown(key)
        raise bad_request(Reason.UNKNOWN_KEY, f"'{name}' is not a key that this gate forwards", name)
    reason, accepted = UNSERVED[key]
    if value is not None and value != accepted:
        raise unserved(key, reason)


CHAT = Endpoint(
    path=b"/v1/chat/completions",
    forwarded={
        **_SAMPLING,
        "messages": content.chat_messages,
        "max_completion_tokens": whole(0, _MOST),
        "logprobs": flag,
        "top_logprobs": _LOGPROBS,
        "tools": WithSchemas(content.chat_tools),
        "tool_choice": content.chat_tool_choice,
        "parallel_tool_calls": flag,
        "reasoning_effort": _NAME,
        "include_reasoning": flag,
        "add_generation_prompt": flag,
        "continue_final_message": flag,
        "chat_template_kwargs": _template_keywords,
    },
    required="messages",
    usage_option=True,
)
COMPLETIONS = Endpoint(
    path=b"/v1/completions",
    forwarded={**_SAMPLING, "prompt": content.prompt, "logprobs": _LOGPROBS},
    required="prompt",
    usage_option=True,
)
MESSAGES = Endpoint(
    path=b"/v1/messages",
    forwarded={
        "messages": content.anthropic_messages,
        "max_tokens": whole(0, _MOST),
        "system": content.anthropic_system,
        "stop_sequences": texts(_STOP_TEXTS, _STOP_CHARACTERS),
        "stream": flag,
        "temperature": number(0, 2),
        "top_k": whole(-1, _MOST),
        "top_p": number(0, 1),
        "tools": WithSchemas(content.anthropic_tools),
        "tool_choice": content.anthropic_tool_choice,
        "thinking": _THINKING,
        "output_config": WithSchemas(_output_config),
        "chat_template_kwargs": _template_keywords,
    },
    required="messages",
    usage_option=False,
)
_COUNTED = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")
COUNT_TOKENS = Endpoint(
    path=MESSAGES.path + b"/count_tokens",
    forwarded={key: MESSAGES.forwarded[key] for key in _COUNTED},
    required="messages",
    usage_option=False,
    generates=False,
)
MODELS_PATH = b"/v1/models"
ENDPOINTS: Mapping[bytes, Endpoint] = {
    endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, MESSAGES, COUNT_TOKENS)
}
