"""Prints the identity that an engine resolves for each line of input, which sets its model's configuration."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # vLLM logs to standard output
    from vllm.engine.arg_utils import EngineArgs

    from kvstrata_sidecar.upstream.resolved_identity import resolve

    config = EngineArgs(model=sys.argv[1], max_model_len=2048, enforce_eager=True).create_engine_config()
    for line in sys.stdin:
        for name, value in json.loads(line).items():
            setattr(config.model_config, name, value)
        answers.write(resolve(config, None).encode() + b"\n")


if __name__ == "__main__":
    main()
