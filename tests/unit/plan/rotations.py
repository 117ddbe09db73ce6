"""A tier whose passwords go by the plan: servers start late, kubelets are slow, operators die."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from kvstrata.model.redis.credentials import PasswordFacts, ServerCredentials, Stage
from kvstrata.objects import names
from kvstrata.objects.redis import passwords
from kvstrata.objects.redis.passwords import admission, password_facts, to_try
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, REPLICATION_USER, user_words
from kvstrata.plan.actions import Order, Turn
from kvstrata.plan.redis.passwords import PasswordCase, Step, next_step

START = datetime(2026, 1, 1, tzinfo=UTC)
DOMAIN = "d" * 16
SERVERS = ("one", "two", "three")
KUBELET_S = 90.0
"""The longest that a file of a Secret takes to reach a pod."""


class Killed(BaseException):
    """The operator's process is gone."""


@dataclass
class Server:
    """A server with users in memory; it reads a file that its kubelet brings late, and only when it starts."""

    file: Mapping[str, bytes]
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    master: str = ""
    up: bool = True

    def start(self) -> None:
        self.words, self.master = dict(user_words(self.file[names.ACL_FILE_KEY])), ""
        self.master = self.file[names.REPLICATION_PASSWORD_KEY].decode()

    def admits(self, user: str, password: str) -> bool:
        return digest(password) in admission(self.words.get(user, ()))


class Tier:
    """A tier whose operator goes by the plan, with kubelets that are late and servers that come and go."""

    def __init__(self, seed: int = 0, servers: tuple[str, ...] = SERVERS) -> None:
        self.random, self.now = random.Random(seed), START
        self.secret: dict[str, bytes] = passwords.made(DOMAIN, {}, self.draw)
        self.changed_at = self.rotated_at = START
        self.honoured = self.asked = ""
        self.writes: list[tuple[datetime, dict[str, bytes]]] = [(START, self.secret)]
        self.servers = {name: Server(self.secret) for name in servers}
        self.data_file = self.secret
        self.alive_for: int | None = None
        for server in self.servers.values():
            server.start()

    def draw(self) -> str:
        return self.random.randbytes(16).hex()

    @property
    def facts(self) -> PasswordFacts:
        return password_facts(
            self.secret,
            lineage="",
            changed_at=self.changed_at,
            rotated_at=self.rotated_at,
            honoured=self.honoured,
        )

    def look(self) -> dict[str, ServerCredentials]:
        return {name: self._look(name, server) for name, server in self.servers.items()}

    def _look(self, name: str, server: Server) -> ServerCredentials:
        if not server.up:
            return ServerCredentials(name, "ConnectionRefused", "nothing listens")
        if not any(server.admits(ADMIN_USER, password) for password in to_try(self.secret, ADMIN_USER)):
            return ServerCredentials(name, "WrongPassword", "refuses the password")
        admitted = {user: admission(words) for user, words in server.words.items()}
        marked = self.facts.marker in server.words
        return ServerCredentials(name, admitted=admitted, marked=marked, master=digest(server.master))

    def case(self) -> PasswordCase:
        return PasswordCase(tuple(self.servers), self.look(), self.now, self.facts, self.asked)

    def step(self) -> Step | None:
        """Let the operator do one step; it dies before an effect when it has had as many as it lives for."""
        step = next_step(self.case())
        if step is None:
            return None
        for name, orders in step.orders.items():
            for order in orders:
                self._live()
                self._told(self.servers[name], order)
        if step.turn is not None:
            self._live()
            self._turn(step.turn)
        return step

    def run(self) -> None:
        """Let the operator work until it waits."""
        for _ in range(50):
            step = self.step()
            if step is None or not (step.orders or step.turn):
                return
        raise AssertionError(f"the operator never rests: {step}")

    def pass_s(self, seconds: float) -> None:
        """Let time pass; files arrive at the latest when they must."""
        self.now += timedelta(seconds=seconds)
        late = [data for at, data in self.writes if (self.now - at).total_seconds() >= KUBELET_S]
        for server in self.servers.values():
            server.file = late[-1] if late else server.file
        self.data_file = late[-1] if late else self.data_file

    def refused(self) -> list[str]:
        """The servers that would refuse a pod which connects now, with a file as late as may be, or a replica."""
        data, follower = self.data_file[names.PASSWORD_KEY].decode(), [s.master for s in self.servers.values() if s.up]
        newest = self.secret[names.PASSWORD_KEY].decode()
        return [
            name
            for name, server in self.servers.items()
            if server.up
            and not (
                server.admits(DATA_USER, data)
                and server.admits(DATA_USER, newest)
                and all(server.admits(REPLICATION_USER, password) for password in follower)
            )
        ]

    def _live(self) -> None:
        if self.alive_for is not None:
            if self.alive_for == 0:
                self.alive_for = None
                raise Killed
            self.alive_for -= 1

    def _told(self, server: Server, order: Order) -> None:
        if order is Order.FOLLOW:
            server.master = self.secret[names.REPLICATION_PASSWORD_KEY].decode()
            return
        for user, words in user_words(self.secret[names.ACL_FILE_KEY]).items():
            server.words[user] = words

    def _turn(self, turn: Turn) -> None:
        match turn:
            case Turn.STAGE:
                self.secret, self.honoured = passwords.staged(DOMAIN, self.secret, self.draw), self.asked
            case Turn.PROMOTE:
                self.secret, self.rotated_at = passwords.promoted(DOMAIN, self.secret), self.now
            case Turn.RETIRE:
                self.secret = passwords.retired(DOMAIN, self.secret)
        self.changed_at = self.now
        self.writes.append((self.now, self.secret))


def digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest() if password else ""


def rotate(tier: Tier) -> Iterator[Tier]:
    """Ask for a rotation and let it come to its end, in steps of a few seconds; give the tier after each effect."""
    tier.asked = f"wish of {tier.now}"
    for _ in range(400):
        for _ in range(50):
            step = tier.step()
            yield tier
            if step is None or not (step.orders or step.turn):
                break
        if tier.facts.stage is Stage.CURRENT and tier.honoured == tier.asked and next_step(tier.case()) is None:
            return
        tier.pass_s(10)
    raise AssertionError(f"the rotation has no end: {next_step(tier.case())}")
