"""What servers say in a simulation: to probes, and to those who tend their passwords and certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstrata.model.pods import BackendReport
from kvstrata.model.redis.cluster import SLOTS
from kvstrata.model.redis.credentials import CredentialLook, ServerCredentials
from kvstrata.model.redis.external import ExternalReport, ServerFacts
from kvstrata.model.refs import Key
from kvstrata.plan.actions import Order, ProbeBackend, TendServers
from tests.support.objects import NAMESPACE

if TYPE_CHECKING:
    from tests.support.worlds import Simulation


@dataclass(frozen=True)
class SimulatedServer:
    """What a managed server has: its line of passwords, what admits its users, their rights, its certificate."""

    made: str
    admitted: Mapping[str, frozenset[str]]
    marker: str
    certificate: str | None


def answer_probe(simulation: Simulation, order: ProbeBackend) -> None:
    """Say at once what a probe of a server finds, and have its tier planned again."""
    simulation.asked.append(order.endpoint)
    reason, sentence = ("", "") if simulation.backends_up else ("Unreachable", f"there is no route to {order.endpoint}")
    checked = None if order.domain is None else _check(simulation, order, reason, sentence)
    report = BackendReport(
        order.endpoint, order.username, simulation.backends_up, reason, sentence, simulation.now, version="8.0.0",
        password_secret=order.password_secret, authority_secret=order.authority_secret, cluster=order.cluster,
        external=checked,
    )  # fmt: skip
    simulation.store.domain(NAMESPACE).backends[order.tier] = report
    simulation.queue.add(Key("CacheTier", NAMESPACE, order.tier))


def _check(simulation: Simulation, order: ProbeBackend, reason: str, sentence: str) -> ExternalReport:
    """What an external server says: nothing, what a test has it say, or that all is well."""
    if not simulation.backends_up:
        return ExternalReport((ServerFacts(order.endpoint, False, reason, sentence),))
    well = ServerFacts(
        order.endpoint, True, "", "", version="8.0.0", in_cluster_mode=order.cluster, max_bytes=1 << 50,
        eviction="noeviction", slots=SLOTS if order.cluster else 0,
    )  # fmt: skip
    return simulation.external.get(order.tier, ExternalReport((well,), mapped=order.cluster))


def answer_tending(simulation: Simulation, order: TendServers) -> None:
    """Let servers do what they are told, and say what they have. One that is new has what the Secrets say."""
    if not simulation.backends_up:
        said = {one.name: ServerCredentials(one.name, "Unreachable", "no route") for one in order.servers}
    else:
        said = {one.name: _tended(simulation, one.name, order) for one in order.servers}
    look = CredentialLook(said, simulation.now, told=bool(order.orders))
    simulation.store.domain(NAMESPACE).credentials[order.tier] = look
    simulation.queue.add(Key("CacheTier", NAMESPACE, order.tier))


def _tended(simulation: Simulation, server: str, order: TendServers) -> ServerCredentials:
    users, tls = (simulation.world.secrets[name] if name else None for name in (order.users_secret, order.tls_secret))
    assert users is not None
    assert users.passwords is not None
    shown = tls.tls.fingerprint if tls is not None and tls.tls is not None else None
    has = simulation.servers.get(server)
    orders = order.orders.get(server, ())
    if has is None or has.made != users.passwords.made:
        has = SimulatedServer(users.passwords.made, users.passwords.admitted, users.passwords.marker, shown)
    if Order.SET_USERS in orders:
        has = replace(has, admitted=users.passwords.admitted, marker=users.passwords.marker)
    if Order.LOAD_CERTIFICATE in orders:
        has = replace(has, certificate=shown)
    simulation.servers[server] = has
    marked = has.marker == users.passwords.marker
    return ServerCredentials(server, admitted=has.admitted, marked=marked, certificate=has.certificate)
