"""The operator, which finds the gate of every pod at one port: there is no network of pods here.

`KVSTRATA_TEST_GATE_PORT` is the port.
"""

from __future__ import annotations

import os

from kvstrata.cli.operator import main
from kvstrata.clients.gate import GateClient

GATE_PORT = "KVSTRATA_TEST_GATE_PORT"

if __name__ == "__main__":
    defaults = GateClient.__init__.__kwdefaults__
    assert defaults is not None
    defaults["port"] = int(os.environ[GATE_PORT])
    main()
