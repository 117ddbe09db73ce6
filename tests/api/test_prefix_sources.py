"""What becomes of a prefix on its way through the API server: the order of a JSON object's keys decides its tokens."""

from __future__ import annotations

import json

from tests.api.apiserver import ApiServer
from tests.api.objects import valid

SCHEMA = {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}}


def test_the_keys_of_an_inline_tool_come_back_in_alphabetical_order(api: ApiServer) -> None:
    pool = valid("PrefixPool")
    tool = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
    messages = [{"role": "system", "content": "Be brief."}]
    pool["spec"]["prefixes"] = [{"name": "a", "messages": messages, "tools": [tool]}]
    stored = api.create(pool, dry_run=True)["spec"]["prefixes"][0]["tools"][0]
    assert stored == tool
    assert list(stored["function"]["parameters"]["properties"]) == ["alpha", "zeta"]
    assert list(stored) == ["function", "type"]


def test_the_text_of_a_config_map_comes_back_as_it_is(api: ApiServer) -> None:
    text = json.dumps({"messages": [], "tools": [{"type": "function", "parameters": SCHEMA}]}, indent=1)
    source = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "prefix", "namespace": valid("PrefixPool")["metadata"]["namespace"]},
        "data": {"chat.json": text},
    }
    assert api.create(source, dry_run=True)["data"]["chat.json"] == text
