"""Which ratios the comparison of the gate with other proxies takes."""

from __future__ import annotations

from bench.gate import compare
from bench.gate.load import Sample

NAMES = ("direct", "gate", "envoy", "litellm")


def _figures() -> set[str]:
    sample = Sample(requests=10, events=100, cpu_s=1.0, first_s=[0.1], event_s=[0.1])
    samples = {workload.name: {name: [sample] for name in NAMES} for workload in compare.WORKLOADS}
    return set(compare._result(samples, {}, {}, others_percent=0.0, shared_core=False).figures)


def test_no_ratio_is_taken_where_a_variant_gets_a_different_number_of_streams() -> None:
    figures = _figures()
    for workload in compare.WORKLOADS:
        if workload.events > 1:
            fewer = {name for name in NAMES if workload.connections[name] != workload.connections["gate"]}
            assert fewer == {"litellm"}
            assert not {figure for figure in figures if "litellm" in figure and workload.name in figure}
    assert {"litellm_8kb_of_cpu", "litellm_200kb_of_cpu", "cpu_stream_of_envoy"} <= figures
