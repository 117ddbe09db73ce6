"""What one prefix of a pool says, in the form in which it is rendered and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.contract import ContractError, contract_errors
from kvstrata.contract.messages.template import refused_argument
from kvstrata.contract.wire import digest_bytes

_CHAT_KEYS = ("messages", "tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """What one prefix says: exactly one of `text`, `chat` and `token_ids` is not None.

    `chat` holds what a caller would send to /v1/chat/completions: `messages`, and perhaps `tools` and
    `chat_template_kwargs`. The order of keys within these is kept, because templates render it.
    """

    text: str | None = None
    chat: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None

    def encode(self) -> bytes:
        """Return the wire form: the same prefix gives the same bytes, one with other tokens gives others."""
        if self.text is not None:
            value: dict[str, Any] = {"text": self.text}
        elif self.chat is not None:
            value = {"chat": {key: self.chat[key] for key in _CHAT_KEYS if self.chat.get(key)}}
        else:
            value = {"tokenIDs": list(self.token_ids or ())}
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

    @property
    def digest(self) -> str:
        """The digest of the wire form, 64 hexadecimal digits."""
        return digest_bytes(self.encode())

    @classmethod
    def from_json(cls, raw: Any) -> PrefixSource:
        """Read the wire form. Raises ContractError unless it is exactly one prefix."""
        with contract_errors("a prefix"):
            ((form, value),) = raw.items()
            match form:
                case "text" if isinstance(value, str) and value:
                    return cls(text=value)
                case "chat":
                    return cls(chat=_chat(value))
                case "tokenIDs" if value and all(type(one) is int and 0 <= one < 1 << 31 for one in value):
                    return cls(token_ids=tuple(value))
            raise ContractError("a prefix is a text, a chat or token ids")

    @classmethod
    def from_document(cls, text: str) -> PrefixSource:
        """Read a chat from JSON text whose order of keys counts. Raises ContractError for anything but a chat."""
        with contract_errors("the chat"):
            read = cls(chat=_chat(json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)))
            read.encode()  # escapes may stand for what is no text
            return read


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
    return {"messages": messages, "tools": tools, "chat_template_kwargs": arguments}


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ContractError("an object names a key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ContractError(f"JSON has no {name}")
