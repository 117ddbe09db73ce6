"""What a chat template may be given beside messages and tools, by callers and by prefix pools alike.

A pool whose prefix needs more than a caller may send would have no reader, so both sides ask the same question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "processor_kwargs",
        "return_dict",
        "return_tensors",
        "template_id",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Names that the engine gives a meaning of its own."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def refused_argument(arguments: Mapping[str, object]) -> str | None:
    """Return the name of an argument that no template is given, or None: reserved, malformed, or not a simple value."""
    for name, value in arguments.items():
        if not _NAME.fullmatch(name) or name in RESERVED or isinstance(value, (dict, list, tuple)):
            return name
    return None
