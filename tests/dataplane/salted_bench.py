"""LMCache's own benchmarks with a keyspace in every key and a policy in force: they know neither.

    python salted_bench.py KEYSPACE POLICY_DIR LINK_DIR bench l2|server …

Runs with the interpreter that has LMCache. `bench l2` opens the adapter itself, so it is given a moment to connect, and
its policy is put in force, before anything is measured. `bench server` would read from the server's own memory what it
just stored there: that is emptied in between, once the tier has what was stored, so that the tier is what is verified.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from lmcache.cli.commands.bench.l2_adapter_bench import data
from lmcache.cli.commands.bench.server_bench import client, helpers
from lmcache.cli.commands.bench.server_bench.cases import baseline
from lmcache.cli.main import main

from kvstrata_sidecar.adapter.plugin import PolicyAdapter
from tests.tiers.gate_stand_in import GateStandIn

CONNECT_TIMEOUT_S = 60.0
STORED_WITHIN_S = 60.0
MODEL = f"test-model#{'f1' * 8}"
"""With a fingerprint, as the guarded connector names it."""


def salted(make: Any, salt: str) -> Any:
    """Return a key maker whose keys carry the salt and the model's fingerprint."""

    def named(key: Any) -> Any:
        return dataclasses.replace(key, cache_salt=salt, model_name=MODEL)

    def made(*arguments: Any, **options: Any) -> Any:
        keys = make(*arguments, **options)
        if isinstance(keys, list):
            return [named(key) for key in keys]
        return named(keys)

    return made


def governed(gate: GateStandIn, salt: str) -> None:
    """Have each adapter that is opened from now on connect and enforce a policy that allows the salt."""
    opened = PolicyAdapter.__init__

    def open_and_allow(self: PolicyAdapter, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        give_up_at_s = time.monotonic() + CONNECT_TIMEOUT_S
        while self.report_status()["breaker"] != "closed" and time.monotonic() < give_up_at_s:
            time.sleep(0.01)
        gate.allow(salt)

    PolicyAdapter.__init__ = open_and_allow  # type: ignore[method-assign]


def through_the_tier(gate: GateStandIn, url: str, chunks: int) -> None:
    """Have `bench server` empty the server's memory before it reads back a prompt of so many chunks that it stored."""
    execute = baseline.BaselineBenchCase._execute_request
    expected = gate.state().tiers[0].stored

    def emptied(client: Any, sequence: int, kind: str) -> Any:
        nonlocal expected
        if kind == "warm":
            expected += chunks
            give_up_at_s = time.monotonic() + STORED_WITHIN_S
            while gate.state().tiers[0].stored < expected:
                if time.monotonic() > give_up_at_s:
                    raise TimeoutError(f"the tier has not stored the prompt: {gate.state()}")
                time.sleep(0.02)
            body = json.dumps({"tier": "l1", "force": True}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/cache/clear", body, headers)  # noqa: S310
            urllib.request.urlopen(request, timeout=30).close()  # noqa: S310
        return execute(client, sequence, kind)

    baseline.BaselineBenchCase._execute_request = staticmethod(emptied)


if __name__ == "__main__":
    salt, policy_dir, link_dir = sys.argv[1:4]
    del sys.argv[1:4]
    for module in (client, helpers):
        module._MODEL_NAME = MODEL
    data.make_object_keys = salted(data.make_object_keys, salt)
    helpers._make_key = salted(helpers._make_key, salt)
    gate = GateStandIn.__new__(GateStandIn)
    gate.policy_dir, gate.link_dir, gate.revision = Path(policy_dir), Path(link_dir), 0
    if "l2" in sys.argv[1:3]:
        governed(gate, salt)
    else:
        url, tokens, chunk_tokens = (
            sys.argv[sys.argv.index(flag) + 1] for flag in ("--url", "--num-tokens", "--block-size")
        )
        through_the_tier(gate, url, int(tokens) // int(chunk_tokens))
    main()
