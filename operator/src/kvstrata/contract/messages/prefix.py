"""One prefix of a pool, in the form in which it is rendered and compared.

Template arguments are limited as for callers: a pool whose prefix needs more than a caller may send has no reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from kvstrata.contract import MALFORMED, ContractError
from kvstrata.contract.wire import Form, Items, Range, digest_bytes, no_constant, to_wire, wired

_CHAT_KEYS = ("messages", "tools", "chat_template_kwargs")

RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages",
    "processor_kwargs", "return_dict", "return_tensors", "template_id", "tokenize", "tokenizer_kwargs", "tools",
})  # fmt: skip
"""Names that the engine gives a meaning of its own."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


@wired("a prefix", closed=True, omit=("text", "chat", "token_ids"), names={"token_ids": "tokenIDs"})
class PrefixSource:
    """Exactly one of `text`, `chat` and `token_ids` is not None.

    `chat` is a body of /v1/chat/completions: `messages`, optionally `tools` and `chat_template_kwargs`. The order of
    keys within these is kept, because templates render it.
    """

    text: Annotated[str, Form("(?s).+", "text")] | None = None
    chat: Mapping[str, Any] | None = None
    token_ids: Annotated[tuple[Annotated[int, Range(0, (1 << 31) - 1)], ...], Items(1)] | None = None

    def __post_init__(self) -> None:
        """Drop empty members of a chat. Raises ContractError unless this is exactly one prefix."""
        if [self.text, self.chat, self.token_ids].count(None) != 2:
            raise ContractError("a prefix is a text, a chat or token ids")
        if self.chat is not None:
            object.__setattr__(self, "chat", _chat(self.chat))

    def encode(self) -> bytes:
        """Return the wire form: equal prefixes give equal bytes, prefixes with other tokens give others."""
        return json.dumps(to_wire(self), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

    @property
    def digest(self) -> str:
        return digest_bytes(self.encode())

    @classmethod
    def from_document(cls, text: str) -> PrefixSource:
        """Read a chat from JSON text, keeping the order of keys. Raises ContractError for anything but a chat."""
        try:
            read = cls(chat=json.loads(text, object_pairs_hook=_without_repeats, parse_constant=no_constant))
            read.encode()  # escapes may encode lone surrogates
        except ContractError:
            raise
        except MALFORMED as error:
            raise ContractError(f"the chat is malformed: {error!r}") from error
        return read


def refused_argument(arguments: Mapping[str, object]) -> str | None:
    """Return the name of a refused argument: reserved, malformed, or not a simple value; None if all are accepted."""
    for name, value in arguments.items():
        if not _NAME.fullmatch(name) or name in RESERVED or isinstance(value, (dict, list, tuple)):
            return name
    return None


def _chat(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ContractError("a chat is a JSON object")
    unknown = sorted(set(raw) - set(_CHAT_KEYS))
    if unknown:
        raise ContractError(f"a chat has {', '.join(_CHAT_KEYS)} and nothing else: remove {unknown[0][:64]!r}")
    given = {key: value for key, value in raw.items() if value is not None}
    messages, tools = given.get("messages"), given.get("tools", [])
    arguments = given.get("chat_template_kwargs", {})
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise ContractError("a chat has a list of messages")
    # The names of chunks with images do not follow from tokens alone.
    if not all(map(_is_text, (message.get("content") for message in messages))):
        raise ContractError("the messages of a prefix hold text only")
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ContractError("the tools of a chat are a list of objects")
    if not isinstance(arguments, dict):
        raise ContractError("chat_template_kwargs is an object")
    refused = refused_argument(arguments)
    if refused is not None:
        raise ContractError(f"chat_template_kwargs takes simple values for names of the template: remove {refused!r}")
    return {key: given[key] for key in _CHAT_KEYS if given.get(key)}


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ContractError("an object names a key twice")
    return found
