"""Print a request for every key that the request types of `openai` and `anthropic` have, as JSON lines.

Runs in the engine's environment, which has both packages. A line has the endpoint, the path to the key, whether the key
is required, and a small body with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal, Required, get_args, get_origin

from anthropic.types import message_count_tokens_params as counted
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_count_tokens_params as beta_counted
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from typing_extensions import get_type_hints, is_typeddict

ROOTS = (
    ("/v1/chat/completions", chat.CompletionCreateParamsStreaming),
    ("/v1/completions", completions.CompletionCreateParamsStreaming),
    ("/v1/messages", messages.MessageCreateParamsStreaming),
    ("/v1/messages", beta_messages.MessageCreateParamsStreaming),
    ("/v1/messages/count_tokens", counted.MessageCountTokensParams),
    ("/v1/messages/count_tokens", beta_counted.MessageCountTokensParams),
)
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
BY_KEY: dict[str, Any] = {
    "data": PICTURE,
    "url": f"data:image/png;base64,{PICTURE}",
    "logit_bias": {"1": 1},
    "allowed_callers": ["direct"],
    "function": {"name": "f"},
    "stream": True,
}
"""Values of keys whose type allows others than the API."""

MAX_STEPS = 8
"""Steps of the longest path: a part of a part of a message's tool result."""

BY_TYPE: tuple[tuple[type, Any], ...] = ((str, "x"), (bool, True), (int, 1), (float, 1))


@cache
def keys_of(annotation: Any) -> dict[str, tuple[Any, bool]]:
    """Return type and necessity of each key of a TypedDict."""
    found = {}
    for name, hint in get_type_hints(annotation, include_extras=True).items():
        origin: Any = get_origin(hint)
        found[name] = (get_args(hint)[0], True) if origin is Required else (hint, False)
    return found


def smallest(annotation: Any, key: str = "") -> Any:
    """Return a small value of a type, None if there is none."""
    if is_typeddict(annotation):
        return {name: smallest(hint, name) for name, (hint, required) in keys_of(annotation).items() if required}
    if key in BY_KEY:
        return BY_KEY[key]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return arguments[0]
    if annotation is object or is_kind_of(origin, dict):
        return {}
    if is_kind_of(origin, Iterable):
        return [smallest(arguments[0], key)]
    for kind, value in BY_TYPE:
        if annotation is kind:
            return value
    found = (smallest(argument, key) for argument in arguments)
    return next((value for value in found if value is not None), None)


def is_kind_of(origin: Any, kind: Any) -> bool:
    """Whether a generic type is one of lists or dictionaries."""
    return isinstance(origin, type) and issubclass(origin, kind)


class Walk:
    """The requests of one endpoint. A type is entered once at each place, whichever way leads there; a beta type
    only if it has other keys."""

    def __init__(self) -> None:
        self._entered: set[tuple[object, ...]] = set()

    def below(self, annotation: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], bool, Any]]:
        """Yield path, necessity and a value of `annotation` for each key in and below it."""
        if is_typeddict(annotation):
            shape = (path, annotation.__name__.removeprefix("Beta"), *keys_of(annotation))
            if shape in self._entered or len(path) > MAX_STEPS:
                return
            self._entered.add(shape)
            base = smallest(annotation)
            for key, (hint, required) in keys_of(annotation).items():
                yield (*path, key), required, {**base, key: smallest(hint, key)}
                for place, needed, value in self.below(hint, (*path, key)):
                    yield place, needed, {**base, key: value}
            return
        origin = get_origin(annotation)
        if origin is Literal or is_kind_of(origin, dict):
            return
        listed = is_kind_of(origin, Iterable)
        for argument in get_args(annotation):
            for place, needed, value in self.below(argument, (*path, 0) if listed else path):
                yield place, needed, [value] if listed else value


def main() -> None:
    """Print all of them."""
    walks = {endpoint: Walk() for endpoint, _ in ROOTS}
    for endpoint, root in ROOTS:
        for path, required, body in walks[endpoint].below(root, ()):
            json.dump({"endpoint": endpoint, "path": path, "required": required, "body": body}, sys.stdout)
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()
