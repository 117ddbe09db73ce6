"""A page of metrics as Prometheus' own library for Python reads it."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(page: str) -> dict[str, Metric]:
    """The families by their names on the page. Fails for a malformed line, a family in two places, and a sample without
    a family."""
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.type in ("counter", "gauge", "histogram"), f"{name} is {family.type}"
        assert name not in found, name
        found[name] = family
    return found


def series(page: str) -> dict[str, float]:
    """The samples by name and labels, as they are on the page, none of them twice."""
    found: dict[str, float] = {}
    for family in families(page).values():
        for sample in family.samples:
            labels = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, name
            found[name] = sample.value
    return found
