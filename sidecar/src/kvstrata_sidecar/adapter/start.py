"""Entry point of the cache container: LMCache's server, or nothing but the policy if its version cannot be governed.

    python3 -m kvstrata_sidecar.adapter.start <arguments of `lmcache server`>

Without LMCache the pod still acknowledges policies and erases its own tiers, but stores and finds no block. Its state
names the version, so that the gate gives every request a random salt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.runtime import Leave, Runtime, acquire
from kvstrata_sidecar.adapter.tiers import start_tier
from kvstrata_sidecar.output import shorten_keyspaces
from kvstrata_sidecar.upstream import versions

logger = logging.getLogger(__name__)


def main() -> None:
    shorten_keyspaces()
    arguments = sys.argv[1:]
    try:
        versions.load(versions.SERVER)
    except versions.UngovernedVersionError as error:
        logger.error("The pod serves without reuse: %s", error)
        serve_without_reuse(arguments, str(error))
        return
    scripts = importlib.metadata.distribution("lmcache").entry_points
    sys.argv = ["lmcache", "server", *arguments]
    next(script for script in scripts if script.name == "lmcache").load()()


def serve_without_reuse(arguments: Sequence[str], reason: str) -> None:
    """Enforce the policy in the place of LMCache's server, until the process ends. Raises ValueError for malformed
    parameters."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--http-host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--l2-adapter", action="append", required=True, type=json.loads)
    parser.add_argument("--server-module", type=json.loads)
    options, _ = parser.parse_known_args(arguments)
    module = options.server_module or {"config": {}}
    for adapter in options.l2_adapter:
        params = AdapterParams.from_json(adapter["adapter_params"])
        runtime = acquire(params)
        runtime.ungoverned, runtime.empty_memory = reason, module["config"].get("tier") or ""
        runtime.policy_tiers.join = partial(_join, runtime)
        if params.tier is not None:
            _join(runtime, adapter["adapter_params"])
    ThreadingHTTPServer((options.http_host, options.http_port), _Health).serve_forever()


def _join(runtime: Runtime, raw: Mapping[str, Any]) -> Leave:
    """Start the tier of these parameters; return the function that ends it."""
    params = AdapterParams.from_json(raw)
    if params.tier is None:
        raise ValueError("the parameters have no tier")
    tier = start_tier(runtime, params, params.tier, lambda _: None)
    runtime.add(tier)

    def leave(_: float) -> None:
        runtime.remove(tier)
        tier.close()

    return leave


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthcheck" else 404)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Log no request: probes come every few seconds."""


if __name__ == "__main__":
    main()
