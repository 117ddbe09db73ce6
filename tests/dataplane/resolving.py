"""Prints the identity that an engine resolves for each line of input, which sets its model's configuration.

With "began_s" in a line the engine began then; otherwise now, so that one process can stand for several starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # vLLM logs to standard output
    from vllm.engine.arg_utils import EngineArgs

    from kvstrata_sidecar.upstream.resolved_identity import resolve

    config = EngineArgs(model=sys.argv[1], max_model_len=2048, enforce_eager=True).create_engine_config()
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = asked.pop("began_s", None) or time.time()
        config.model_config.hf_config.auto_map = asked.pop("auto_map", None)
        config.load_config.load_format = asked.pop("load_format", "auto")
        for name, value in asked.items():
            setattr(config.model_config, name, value)
        answers.write(resolve(config, None, partial(float, began_s)).encode() + b"\n")


if __name__ == "__main__":
    main()
