"""An agent of five turns with a tool, by each client and streamed or not; it sends every answer back as it came.

    python agent.py http://127.0.0.1:8080 KEY MODEL

Runs in the engine's environment, which has the packages `openai` and `anthropic`. Prints a line of JSON for each agent.
An answer's error is raised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import openai

TURNS = ("Say hello.", "What is the weather in Oslo?", "And in Rome?", "Is it warm?", "Thank you.")
CALLING = (1, 2)
"""Turns in which the model has to call the tool."""

NAME = "weather"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MAX_TOKENS = 48


def ask_openai(client: openai.OpenAI, model: str, streamed: bool, messages: list[Any], calling: bool) -> int:
    """Append an answer, and the results of its calls; return how many there were."""
    tool = {
        "type": "function",
        "function": {"name": NAME, "description": "Weather of a city", "parameters": SCHEMA},
    }
    asked: dict[str, Any] = {
        "model": model, "messages": messages, "tools": [tool], "max_tokens": MAX_TOKENS, "temperature": 0,
        "user": "agent", "prompt_cache_key": "agent", "parallel_tool_calls": False, "n": 1,
    }  # fmt: skip
    if calling:
        asked["tool_choice"] = "required"
    if streamed:
        with client.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            # The final completion is not to be had of an answer that reached its maximum of tokens.
            message = events.current_completion_snapshot.choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    messages.append(message)
    calls = message.tool_calls or []
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in calls]
    return len(calls)


def ask_anthropic(client: anthropic.Anthropic, model: str, streamed: bool, messages: list[Any], calling: bool) -> int:
    """Append an answer, and the results of its calls; return how many there were."""
    cached = {"cache_control": {"type": "ephemeral"}}
    asked: dict[str, Any] = {
        "model": model, "messages": messages, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}, **cached,
        "system": [{"type": "text", "text": "You report the weather.", **cached}],
        "tools": [{"name": NAME, "description": "Weather of a city", "input_schema": SCHEMA, "strict": True, **cached}],
        "metadata": {"user_id": "agent"},
    }  # fmt: skip
    if calling:
        asked["tool_choice"] = {"type": "any"}
    if streamed:
        with client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**asked)
    messages.append({"role": answer.role, "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if calls:
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"} for call in calls]
        messages.append({"role": "user", "content": results})
    return len(calls)


def talk(ask: Callable[[list[Any], bool], int]) -> int:
    """Have all turns; return how often the tool was called."""
    messages: list[Any] = []
    calls = 0
    for turn, text in enumerate(TURNS):
        messages.append({"role": "user", "content": text})
        calls += ask(messages, turn in CALLING)
    return calls


def main() -> None:
    """Run the four agents."""
    url, key, model = sys.argv[1:]
    by_openai = partial(ask_openai, openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), model)
    by_anthropic = partial(ask_anthropic, anthropic.Anthropic(base_url=url, api_key=key, max_retries=0), model)
    for client, ask in (("openai", by_openai), ("anthropic", by_anthropic)):
        for streamed in (False, True):
            calls = talk(partial(ask, streamed))
            print(json.dumps({"client": client, "streamed": streamed, "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
