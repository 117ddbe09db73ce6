"""Answers to the questions for prefix pools in a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.model.pools import PodAnswer, SourceReport, WarmReport
from kvstrata.model.refs import Key
from kvstrata.plan.actions import InspectPool, ReadSource, RenderPool, WarmPool
from tests.support.objects import NAMESPACE

if TYPE_CHECKING:
    from tests.support.worlds import Simulation


PoolQuestion = ReadSource | RenderPool | WarmPool | InspectPool


def answer_for_pools(simulation: Simulation, question: PoolQuestion) -> None:
    """Turn a question into the fact that its answer is, at once, and have the pool planned again."""
    match question:
        case ReadSource():
            _read(simulation, question)
            return
        case RenderPool():
            _render(simulation, question)
            simulation.queue.add(Key(question.asker, NAMESPACE, question.pool))
            return
        case WarmPool():
            _warm(simulation, question)
            _inspect(simulation, InspectPool(question.pool, question.pool_uid, question.pod))
        case InspectPool():
            _inspect(simulation, question)
    simulation.queue.add(Key("PrefixPool", NAMESPACE, question.pool))


def _read(simulation: Simulation, where: ReadSource) -> None:
    domain = simulation.store.domain(NAMESPACE)
    found = simulation.kube.objects.get(("ConfigMap", NAMESPACE, where.name))
    text = ((found or {}).get("data") or {}).get(where.key)
    problem = "" if text is not None else f"ConfigMap {where.name} has no key {where.key}"
    domain.sources[where.name, where.key] = SourceReport(text, problem, simulation.now)
    for name in domain.pools:
        simulation.queue.add(Key("PrefixPool", NAMESPACE, name))


def _render(simulation: Simulation, question: RenderPool) -> None:
    domain, uid = simulation.store.domain(NAMESPACE), question.pod.uid
    for prefix in question.prefixes:
        rendered = simulation.renderer.render(question.pod, simulation.acks[uid], prefix)
        domain.renders[uid][prefix.digest] = PodAnswer(rendered, simulation.now)


def _warm(simulation: Simulation, question: WarmPool) -> None:
    domain, uid = simulation.store.domain(NAMESPACE), question.pod.uid
    for prefix in question.prefixes:
        outcome = simulation.renderer.warm(question.pod, simulation.acks[uid], question.scope, prefix)
        known, slot = domain.warmed[uid], (question.scope, prefix.digest)
        known[slot] = WarmReport.after(known.get(slot), outcome, simulation.now)


def _inspect(simulation: Simulation, question: InspectPool) -> None:
    domain, uid = simulation.store.domain(NAMESPACE), question.pod.uid
    committed = domain.bundles.get(question.pod.model)
    shards = tuple(committed.bundle.pools.values()) if committed is not None else ()
    report = simulation.renderer.inspect(question.pod, simulation.acks[uid], question.pool_uid, shards)
    domain.holdings[uid][question.pool_uid] = PodAnswer(report, simulation.now)
