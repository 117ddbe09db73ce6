"""Logs on standard error, and the audit log on standard output: one JSON object a line.

Lines of the audit log leave the process by a thread of their own, so that no caller waits for them. An event goes into
a queue; if the queue is full, the event is dropped and counted, and the next line says how many were dropped.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from queue import Full, Queue

from pythonjsonlogger.json import JsonFormatter

from kvstrata.contract.messages.audit import LOGGER, Action, Happened, Source, Teller
from kvstrata.reconcile import metrics

MAX_WAITING = 10_000
"""Events that wait for the thread, a few megabytes."""

FLUSH_WITHIN_S = 1.0
"""How long the end of the process waits for lines that are not taken yet."""


class AuditHandler(logging.Handler):
    """Writes the `audit` of records as lines. `write` takes a whole line and may block, or raise OSError."""

    def __init__(self, teller: Teller, write: Callable[[bytes], None], most: int = MAX_WAITING) -> None:
        super().__init__()
        self._teller, self._write = teller, write
        self._waiting: Queue[tuple[float, Happened] | threading.Event] = Queue(most)
        self._counting = threading.Lock()
        self._dropped = 0
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Put a record into the queue; never blocks."""
        happened = getattr(record, "audit", None)
        if not isinstance(happened, Happened):
            return
        try:
            self._waiting.put_nowait((record.created, happened))
        except Full:
            self._drop()

    def flush(self) -> None:
        """Wait until what is in the queue is written, but not for ever."""
        written = threading.Event()
        try:
            self._waiting.put(written, timeout=FLUSH_WITHIN_S)
        except Full:
            return
        written.wait(FLUSH_WITHIN_S)

    def _drop(self, count: int = 1) -> None:
        metrics.AUDIT_DROPPED.inc(count)
        with self._counting:
            self._dropped += count

    def _run(self) -> None:
        while True:
            taken = self._waiting.get()
            if isinstance(taken, threading.Event):
                taken.set()
                continue
            at_s, happened = taken
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            try:
                if dropped:
                    self._line(at_s, Happened(action=Action.EVENTS_DROPPED, count=dropped))
                    dropped = 0
                self._line(at_s, happened)
            except Exception:
                self._drop()
                with self._counting:
                    self._dropped += dropped

    def _line(self, at_s: float, happened: Happened) -> None:
        self._sequence += 1
        self._write(self._teller.line(self._sequence, at_s, happened))


def write_whole(data: bytes) -> None:
    """Write to standard output, past its buffer: a thread that blocks must not hold up the end of the process."""
    while data:
        data = data[os.write(1, data) :]


def configure_audit(pod: str) -> None:
    """Send the audit log of the operator in this pod to standard output, whatever the level of other logs."""
    log = logging.getLogger(LOGGER)
    log.handlers = [AuditHandler(Teller(Source.OPERATOR, pod, secrets.token_hex(8)), write_whole)]
    log.setLevel(logging.INFO)
    log.propagate = False


def configure(level: str) -> None:
    """Send all logs but the audit log to standard error; libraries speak from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    renamed = {"levelname": "level", "name": "logger", "exc_info": "exception"}
    handler.setFormatter(JsonFormatter(["levelname", "name", "message"], rename_fields=renamed, timestamp="time"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvstrata").setLevel(level)
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
