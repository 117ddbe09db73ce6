"""docs/reference/metrics.md lists exactly the metrics that operator, gates and cache servers have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from kvstrata.contract.messages.adapter import AdapterState
from kvstrata.reconcile import metrics as operator_metrics
from kvstrata_sidecar.adapter import metrics as cache_metrics
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.gate.http.errors import Reason
from kvstrata_sidecar.gate.metrics import Metrics
from tests.support.metrics_page import families

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs/reference/metrics.md"
GATE = REPOSITORY / "sidecar/src/kvstrata_sidecar/gate"
ROW = re.compile(r"^\| `(kvstrata_\w+)` \| \w+ \|([^|]*)\|", re.MULTILINE)


def operator_families() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and labels of what the operator's metrics module declares."""
    for declared in vars(operator_metrics).values():
        if isinstance(declared, MetricWrapperBase):
            (family,) = declared.describe()
            suffix = "_total" if family.type == "counter" else ""
            yield family.name + suffix, tuple(declared._labelnames)


def gate_families() -> set[str]:
    """Names of what a gate's page can show: the families of a page, and the gauges that its owner sets."""
    metrics = Metrics(max_tenants=1)
    on_page = families(metrics.page().decode()).keys()
    modules = sorted(GATE.rglob("*.py"))
    assert len(modules) >= 35
    named = set(re.findall(r"\bkvstrata_gate_[a-z_]+[a-z]\b", "".join(path.read_text() for path in modules)))
    return on_page | named


def cache_families() -> set[str]:
    """Names of what a cache server's page can show: all families are on an empty one."""
    return set(families(cache_metrics.page(AdapterState("boot", 1, 1, True, 0), [], None)))


def documented() -> dict[str, tuple[str, ...]]:
    """Labels by metric, as the page says."""
    return {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(PAGE.read_text())}


def test_every_metric_of_the_operator_is_documented_with_its_labels() -> None:
    declared = dict(operator_families())
    assert declared
    assert {name: documented().get(name) for name in declared} == declared


def test_every_metric_of_the_gate_is_documented() -> None:
    assert "kvstrata_gate_acked_revision" in gate_families()
    assert gate_families() - documented().keys() == set()


def test_no_metric_is_documented_that_does_not_exist() -> None:
    assert documented().keys() - gate_families() - cache_families() - dict(operator_families()).keys() == set()


def test_every_metric_of_the_cache_server_is_documented() -> None:
    assert len(cache_families()) > 10
    assert cache_families() - documented().keys() == set()


def test_every_reason_that_is_a_label_is_documented() -> None:
    text = PAGE.read_text()
    assert [str(reason) for reason in (*Reason, *Refusal) if f"`{reason}`" not in text] == []
