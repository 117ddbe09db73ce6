"""The chart's alerts: they watch metrics that exist, and each has a runbook."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .rendering import OPERATOR_CHART, REPOSITORY, render

RUNBOOKS = REPOSITORY / "docs/operations/runbooks"
OF_PROMETHEUS = {"up"}


def alerts() -> dict[str, dict[str, Any]]:
    """The rendered rules by the alert's name."""
    rule = render(OPERATOR_CHART, {"metrics": {"prometheusRule": {"enabled": True}}})["PrometheusRule", "kvstrata"]
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}


def documented_metrics() -> set[str]:
    """What docs/reference/metrics.md lists; a test of its own holds that page against the code."""
    page = (REPOSITORY / "docs/reference/metrics.md").read_text()
    return set(re.findall(r"^\| `(kvstrata_\w+)`", page, re.MULTILINE))


@pytest.mark.parametrize(
    "needed",
    [
        "kvstrata_leading",
        "up",
        "kvstrata_watchers",
        "kvstrata_reconcile_failures_total",
        "kvstrata_backend_up",
        "kvstrata_backend_suitable",
        "kvstrata_backend_slots_uncovered",
        "kvstrata_tier_slots_lost_total",
        "kvstrata_tier_replicas_missing",
        "kvstrata_tier_failovers_total",
        "kvstrata_tier_slots_to_move",
        "kvstrata_tier_pods_to_replace",
        "kvstrata_acks_refused_total",
        "kvstrata_isolation_broken",
        "kvstrata_gate_policy_fresh",
        "kvstrata_gate_cache_linked",
        "kvstrata_cache_tier_servers",
        "kvstrata_gate_acked_revision",
        "kvstrata_audit_dropped_total",
        "kvstrata_gate_audit_dropped_total",
    ],
)
def test_there_is_an_alert_on(needed: str) -> None:
    assert [name for name, alert in alerts().items() if re.search(rf"\b{needed}\b", alert["expr"])]


def test_alerts_watch_metrics_that_exist() -> None:
    for name, alert in alerts().items():
        watched = set(re.findall(r"\b(up|kvstrata_[a-z_]+)(?=\{|\[|\s|\)|$)", alert["expr"]))
        assert watched, name
        assert watched <= documented_metrics() | OF_PROMETHEUS, name


def test_every_alert_says_what_to_do_in_a_runbook_of_its_own() -> None:
    linked = {name: REPOSITORY / alert["annotations"]["runbook_url"] for name, alert in alerts().items()}
    assert len(set(linked.values())) == len(linked)
    for name, page in linked.items():
        assert page.read_text().startswith(f"# {name}\n"), name


def test_every_runbook_belongs_to_an_alert_and_is_in_the_list() -> None:
    linked = {REPOSITORY / alert["annotations"]["runbook_url"] for alert in alerts().values()}
    assert {page for page in RUNBOOKS.glob("*.md") if page.name != "README.md"} == linked
    overview = (RUNBOOKS / "README.md").read_text()
    assert [page.name for page in linked if f"({page.name})" not in overview] == []


def test_a_tiers_namespace_is_not_overwritten_by_the_operators() -> None:
    monitor = render(OPERATOR_CHART, {"metrics": {"serviceMonitor": {"enabled": True}}})["ServiceMonitor", "kvstrata"]
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True
