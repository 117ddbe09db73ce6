"""`kubectl kvstrata report`: what to ask where, and the file."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvstrata.cli import kubectl, pages
from kvstrata.cli.kubectl import Cluster, KubectlError, unserved
from kvstrata.cli.report.page import Report, render
from kvstrata.cli.report.panels import ERASURES, QUESTIONS, from_pages
from kvstrata.cli.report.prometheus import Prometheus
from kvstrata.cli.text import CommandError

FAILED = 1
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}


def add_to(parser: argparse.ArgumentParser) -> None:
    kubectl.add_cluster(parser, None, "namespace of the models (default: that of kubectl's context)")
    add = parser.add_argument
    add("--model", metavar="NAME", help="a CachedModel; without Prometheus only (default: all of the namespace)")
    add("--prometheus", type=_url, metavar="URL", help="a Prometheus server that scrapes the gates")
    add("--since", type=_duration, default=86_400, metavar="TIME", help="how far back to ask Prometheus (default: 24h)")
    add("--selector", default="", metavar="MATCHERS", help="which series, such as 'namespace=\"demo\"'")
    add("--token-file", type=Path, metavar="FILE", help="bearer token for Prometheus")
    add("--to", type=Path, default=Path("report.html"), metavar="FILE", help="file to write (default: report.html)")
    parser.set_defaults(run=_run, failed=FAILED)


def _url(text: str) -> str:
    if not re.match(r"https?://[^/]", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a URL such as http://prometheus:9090")
    return text


def _duration(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,4})([mhd])", text)
    if found is None or int(found[1]) * _UNITS_S[found[2]] < 600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a time from 10m, such as 30m, 24h or 7d")
    return int(found[1]) * _UNITS_S[found[2]]


def _run(options: argparse.Namespace) -> int:
    now_s = time.time()
    try:
        text = render(_report(options, kubectl.cluster(options), now_s))
        options.to.write_text(text, encoding="utf-8")
    except OSError as error:
        place = error.filename or options.to
        raise CommandError(f"{place} cannot be used, name another file: {error.strerror}") from None
    sys.stdout.write(f"{options.to}\n")
    return 0


def _report(options: argparse.Namespace, cluster: Cluster, now_s: float) -> Report:
    at = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    subject = options.model or (f"namespace {options.namespace}" if options.namespace else "kvstrata")
    policies, invalidations = (_objects(cluster, kind) for kind in ("tenantcachepolicies", "cacheinvalidations"))
    if options.prometheus:
        token = options.token_file.read_text().strip() if options.token_file else ""
        matchers = options.selector or (f'namespace="{options.namespace}"' if options.namespace else "")
        server = Prometheus(options.prometheus, options.since, now_s, matchers, token)
        panels = [server.panel(question) for question in (*QUESTIONS, ERASURES)]
        source = f"by Prometheus {options.prometheus}" + (f", {matchers}" if matchers else "")
        began = datetime.fromtimestamp(now_s - options.since, UTC).strftime("%Y-%m-%d %H:%M")
        return Report(subject, at, source, f"{began} to {at}", panels, policies, invalidations)
    pods = pages.pods_of(cluster, options.model)
    if not pods:
        why = unserved(cluster.get("cachedomains.kvstrata.io")["items"])
        raise KubectlError(why or "no pod runs a CachedModel there: name its namespace with -n, or give --prometheus")
    answers = list(pages.scrape(cluster, pods))
    read = [answer for answer in answers if isinstance(answer, pages.Page)]
    notes = [str(answer) for answer in answers if isinstance(answer, KubectlError)]
    source = f"by the metrics of pods since their start, {len(read)} of {len(answers)} answered"
    panels = [from_pages(question, read) for question in QUESTIONS]
    return Report(subject, at, source, "now", panels, policies, invalidations, notes)


def _objects(cluster: Cluster, kind: str) -> list[Any] | str:
    try:
        return list(cluster.get(f"{kind}.kvstrata.io")["items"])
    except KubectlError as error:
        return str(error)
