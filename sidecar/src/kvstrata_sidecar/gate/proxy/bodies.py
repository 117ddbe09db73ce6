"""The allow-list of a caller's request: endpoints and keys of their bodies.

The lists are the keys of vLLM 0.32 that cannot reach another caller's cache, files, addresses or place in the queue.
Any other key is refused by name: a later engine may give it a meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.messages.prefix import refused_argument
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.proxy import content

Json = dict[str, Any]

FORBIDDEN: Mapping[str, str] = {
    "cache_salt": "the gate derives the cache namespace from your API key; a caller cannot choose it",
    "kv_transfer_params": "it reads and writes the KV cache of other requests",
    "ec_transfer_params": "it reads and writes the encoder cache of other requests",
    "vllm_xargs": "it reaches extensions of the engine that do not know tenants",
    "request_id": "the engine's ids are shared by all tenants; the gate lets the engine choose",
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
    "guided_decoding_backend": "the operator of the model chooses the backend",
}
"""Keys that are refused with the reason, even if the engine does not know them."""

# fmt: off  (one key a line would hide the lists)
MAX_SEQUENCES = 64
"""Sequences of one request. The engine admits thousands, which would occupy it for one caller."""

_SAMPLING = frozenset(
    (
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "length_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "n",
        "use_beam_search",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "allowed_token_ids",
        "bad_words",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "add_special_tokens",
        "echo",
        "stream",
        "stream_options",
        "response_format",
        "structured_outputs",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "thinking_token_budget",
    )
)
_IGNORED = frozenset(
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)
"""Keys of OpenAI's clients that no engine needs: accepted, and not forwarded."""

_STRUCTURED = frozenset(
    (
        "json",
        "regex",
        "choice",
        "grammar",
        "json_object",
        "disable_any_whitespace",
        "disable_additional_properties",
        "whitespace_pattern",
        "structural_tag",
    )
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the engine that callers may use.

    `forwarded` keys reach the engine, `ignored` keys are dropped, all others are refused. `check` raises Refusal for
    bad values, and removes nested keys that are not forwarded. `usage_option`: the endpoint supports `stream_options`.
    """

    path: bytes
    forwarded: frozenset[str]
    ignored: frozenset[str]
    check: Callable[[Json], None]
    usage_option: bool


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A checked body: `fields` lack `model` and `cache_salt` until `seal` adds ours. `strip_usage` is set when the gate
    asked for a usage event that the caller did not."""

    fields: Json
    stream: bool
    strip_usage: bool

    def seal(self, model: str, salt: str) -> Json:
        return {**self.fields, "model": model, "cache_salt": salt}


def rewrite(endpoint: Endpoint, body: Json) -> Rewritten:
    """Return the part of `body` for the engine. Raises Refusal (400) that names the offending key. Nested keys that are
    not forwarded are removed in place."""
    fields: Json = {}
    for key, value in body.items():
        if key in endpoint.forwarded:
            if value is not None:
                fields[key] = value
        elif key in FORBIDDEN:
            raise bad_request(Reason.FORBIDDEN_KEY, f"'{key}' is not accepted: {FORBIDDEN[key]}", key)
        elif key != "model" and key not in endpoint.ignored:
            name = key.encode("utf-8", "replace").decode()[:64]
            raise bad_request(Reason.UNKNOWN_KEY, f"'{name}' is not a key that this gate forwards", name)
    stream = fields.get("stream", False)
    if not isinstance(stream, bool):
        raise bad_request(Reason.BAD_VALUE, "'stream' is true or false", "stream")
    endpoint.check(fields)
    _check_sequences(fields)
    return Rewritten(fields, stream, stream and endpoint.usage_option and _ask_for_usage(fields))


def _check_sequences(fields: Json) -> None:
    """Raise Refusal if one request asks for more sequences than a batch of requests would have."""
    count, prompt = fields.get("n", 1), fields.get("prompt")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise bad_request(Reason.BAD_VALUE, "'n' is a whole number above 0", "n")
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    if count * prompts > MAX_SEQUENCES:
        raise bad_request(
            Reason.BAD_VALUE, f"one request may ask for at most {MAX_SEQUENCES} sequences (n times prompts)", "n"
        )


def _ask_for_usage(fields: Json) -> bool:
    """Make the engine report usage at the end of a stream; return whether the caller did not ask for it."""
    options = fields.get("stream_options", {})
    if options.get("include_usage"):
        return False
    fields["stream_options"] = {**options, "include_usage": True}
    return True


def _check_shared(fields: Json) -> None:
    options = fields.get("stream_options")
    if options is not None:
        content.require_keys(options, frozenset({"include_usage", "continuous_usage_stats"}), "stream_options")
        if not all(isinstance(value, bool) or value is None for value in options.values()):
            raise bad_request(Reason.BAD_VALUE, "'stream_options' holds true or false", "stream_options")
        if not fields.get("stream"):
            raise bad_request(Reason.BAD_VALUE, "'stream_options' needs 'stream': true", "stream_options")
        if options.get("continuous_usage_stats") and not options.get("include_usage"):
            raise bad_request(
                Reason.BAD_VALUE, "'continuous_usage_stats' needs 'include_usage': true", "stream_options"
            )
    if "structured_outputs" in fields:
        content.require_keys(fields["structured_outputs"], _STRUCTURED, "structured_outputs")


def _check_template_keywords(fields: Json) -> None:
    keywords = fields.get("chat_template_kwargs")
    if keywords is None:
        return
    if not isinstance(keywords, dict):
        raise bad_request(Reason.BAD_VALUE, "'chat_template_kwargs' is an object", "chat_template_kwargs")
    if refused_argument(keywords) is not None:
        raise bad_request(
            Reason.FORBIDDEN_KEY,
            "'chat_template_kwargs' takes simple values for names that the template itself defines",
            "chat_template_kwargs",
        )


def _check_chat(fields: Json) -> None:
    _check_shared(fields)
    _check_template_keywords(fields)
    content.check_chat_messages(fields)
    content.check_chat_tools(fields)


def _check_completion(fields: Json) -> None:
    _check_shared(fields)
    content.check_prompt(fields)


def _check_anthropic(fields: Json) -> None:
    _check_template_keywords(fields)
    content.check_anthropic_messages(fields)


# fmt: off
CHAT = Endpoint(
    path=b"/v1/chat/completions",
    forwarded=_SAMPLING
    | frozenset(
        (
            "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
            "reasoning_effort", "include_reasoning", "add_generation_prompt", "continue_final_message",
            "chat_template_kwargs",
        )
    ),
    ignored=_IGNORED,
    check=_check_chat,
    usage_option=True,
)
COMPLETIONS = Endpoint(
    path=b"/v1/completions",
    forwarded=_SAMPLING | frozenset({"prompt", "suffix"}),
    ignored=_IGNORED,
    check=_check_completion,
    usage_option=True,
)
MESSAGES = Endpoint(
    path=b"/v1/messages",
    forwarded=frozenset(
        (
            "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_k", "top_p",
            "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs",
        )
    ),
    ignored=frozenset({"metadata", "service_tier"}),
    check=_check_anthropic,
    usage_option=False,
)
# fmt: on
MODELS_PATH = b"/v1/models"
ENDPOINTS: Mapping[bytes, Endpoint] = {endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, MESSAGES)}
