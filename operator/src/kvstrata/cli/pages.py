"""Pages of metrics of a model's gates, read through the API server's proxy to pods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata.cli.kubectl import Cluster, KubectlError
from kvstrata.objects import labels, paths

_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_SAMPLE = re.compile(rf"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(.*)\}})? ({_NUMBER})(?: \d+)?$")
_FAMILY = re.compile(r"^# TYPE (\S+) ")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)",?')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of one pod by name; a family without samples is there, too."""

    pod: str
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)


def parse(pod: str, text: str) -> Page:
    """Read a page in Prometheus' text format. Infinite values, and lines that are no sample, are left out."""
    found: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        if family := _FAMILY.match(line):
            found.setdefault(family[1], [])
        elif match := _SAMPLE.match(line):
            name, inside, value = match.groups()
            pairs = {label: _ESCAPED.sub(_unescape, text) for label, text in _LABEL.findall(inside or "")}
            found.setdefault(name, []).append(Sample(name, pairs, float(value)))
    return Page(pod, found)


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def pods_of(cluster: Cluster, model: str | None = None) -> list[dict[str, Any]]:
    """Return the running pods of a model, or of all models of the namespace."""
    selector = f"{labels.MODEL}={model}" if model else labels.MODEL
    selector += f",{labels.COMPONENT}=engine"
    pods = cluster.get("pods", f"--selector={selector}")["items"]
    return [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]


def scrape(cluster: Cluster, pods: Iterable[Mapping[str, Any]]) -> Iterator[Page | KubectlError]:
    """Yield each pod's page, or the reason for its absence."""
    for pod in pods:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/pods/{name}:{paths.HEALTH_PORT}/proxy/metrics"
        try:
            yield parse(name, cluster.run("get", "--raw", path).decode(errors="replace"))
        except KubectlError as error:
            yield KubectlError(f"pod {name}: {error}")
