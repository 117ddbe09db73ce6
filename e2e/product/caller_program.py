"""The program of a caller inside the cluster: it asks a model's Service without end and writes a line for each request.

It runs in a pod with nothing but Python; arguments: host, port, model, API key, file of the certificate authority, and
how many streams and how many plain requests run side by side. Every request has a connection of its own.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
import time
from typing import Any

STREAM_TOKENS = 40
"""An engine's work of two seconds, or of several on a busy machine."""
PAUSE_S = {True: 0.0, False: 3.0}
"""After a stream, and after a plain request: a stream runs whenever a pod is asked to go, and beyond that little is
asked, because engines start beside these requests, on as few cores."""
TIMEOUT_S = 120.0

_write = threading.Lock()


def main() -> None:
    """Start every caller and never end."""
    host, port, model, key, authority, streams, plain = sys.argv[1:]
    tls = ssl.create_default_context(cafile=authority)
    for count, stream in ((int(streams), True), (int(plain), False)):
        for _ in range(count):
            threading.Thread(target=_ask_without_end, args=(host, int(port), model, key, tls, stream)).start()


def _ask_without_end(host: str, port: int, model: str, key: str, tls: ssl.SSLContext, stream: bool) -> None:
    # Prompts shorter than a block: they are answered, and leave nothing in any tier.
    body: dict[str, Any] = {"model": model, "prompt": "hello", "max_tokens": 4}
    if stream:
        body |= {"stream": True, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    sent = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "Connection": "close"}
    while True:
        outcome: dict[str, Any] = {"stream": stream, "began": time.time(), "status": 0, "events": 0, "done": False}
        connection = http.client.HTTPSConnection(host, port, context=tls, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", sent, headers)
            answer = connection.getresponse()
            outcome["status"] = answer.status
            while line := answer.readline():
                outcome["events"] += line.startswith(b"data: {")
                outcome["done"] = outcome["done"] or line.startswith((b"data: [DONE]", b'{"id"'))
                if b'"error":' in line:  # the key; a model may answer "error"
                    outcome["problem"] = line.decode("utf-8", "replace")[:300]
        except (OSError, http.client.HTTPException) as error:
            outcome["problem"] = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        outcome["ended"] = time.time()
        with _write:
            print(json.dumps(outcome), flush=True)
        time.sleep(PAUSE_S[stream])


if __name__ == "__main__":
    main()
