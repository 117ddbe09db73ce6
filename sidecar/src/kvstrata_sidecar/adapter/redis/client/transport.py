"""One thread's transport of commands to the nodes that have their slots.

MOVED is followed to the named node, with a request for a new map; ASK for this command alone, and only to read. A slot
that moves key by key is in two places; a script that wrote in one would miss the other, so stores are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import Dialing, dial
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology
from kvstrata_sidecar.adapter.redis.client.slots import Redirection, redirection, slot_of

T = TypeVar("T")
Use = Callable[[Connection], T]

MAX_REDIRECTIONS = 5
NOT_THE_NODES_FAULT = frozenset({"OOM", "MOVED", "ASK", "TRYAGAIN"})
WRITES = frozenset({b"EVAL", b"EVALSHA", b"SET"})

Target = tuple[Node, bool]
"""Where commands go: a node, and whether they ask for a slot that it is importing."""


class Connections:
    """One thread's connections to the nodes of a tier, opened when needed. Any thread may call `abort`."""

    def __init__(self, tier: TierParams, topology: Topology) -> None:
        self._tier = tier
        self._topology = topology
        timeout_s = 2 * (tier.connect_timeout_ms + tier.io_timeout_ms) / 1000
        self._dial_timeout_s = timeout_s * max(1, len(tier.endpoints))
        self._open: dict[Node, Connection] = {}
        self._eras: dict[Node, int] = {}
        self._dialing: dict[Node, Dialing] = {}
        self._new: set[Node] = set()
        self._lock = threading.Lock()
        self._in_use: set[Connection | Dialing] = set()
        self._aborted: str | None = None
        self._closed = False

    @property
    def usable(self) -> bool:
        return self._aborted is None and not self._closed

    def renew(self) -> None:
        """Reset an earlier abort, and close connections to nodes without slots."""
        with self._lock:
            self._aborted = None
        self._new.clear()
        if len(self._open) > len(self._topology.primaries):
            for node in self._open.keys() - set(self._topology.primaries):
                self._drop(node)

    def abort(self, why: str = "") -> None:
        """Fail all exchanges at once, running and later ones, until `renew`; `why` blames the node."""
        with self._lock:
            self._aborted = why
            for one in self._in_use:
                if isinstance(one, Dialing):
                    one.give_up(why or "it was given up")
                else:
                    one.abort()

    def close(self) -> None:
        self._closed = True
        for node in tuple(self._open):
            self._drop(node)

    def use(self, node: Node, use: Use[T], *, probing: bool = False, keep: bool = False) -> T:
        """Use the connection to a node and record the outcome; with `keep` it stays in use until `end`. Raises
        NodeAwayError, unless `probing`, if the node's breaker is open."""
        if not probing and not node.breaker.closed:
            raise resp.NodeAwayError(f"{node}: {node.breaker.detail}")
        try:
            connection = self._connected(node)
            self._begin(connection)
        except resp.TransportError as error:
            raise self._blamed(node, error, probing=probing) from error
        return self.end(node, connection, use, probing=probing, keep=keep)

    def end(self, node: Node, connection: Connection, use: Use[T], *, probing: bool = False, keep: bool = False) -> T:
        """Use a connection that is in use, for the last time unless it is to `keep`."""
        over = True
        try:
            result = use(connection)
            over = not keep
        except resp.TransportError as error:
            raise self._blamed(node, error, probing=probing) from error
        finally:
            if over:
                with self._lock:
                    self._in_use.discard(connection)
        return result

    def _blamed(self, node: Node, error: resp.TransportError, *, probing: bool) -> resp.TransportError:
        """Return the error to raise; blame the node unless it was aborted, probed, or an idle connection had ended."""
        if probing:
            return error
        with self._lock:
            aborted = self._aborted
        if aborted is not None:
            if aborted:
                self._topology.blame(node, aborted)
            return error
        if isinstance(error, resp.DemotedError):
            self._topology.demoted(node, self._eras.get(node, node.era))
        if isinstance(error, resp.PeerClosedError) and node not in self._new:
            error.reused = True
            self._topology.want()
            return error
        self._topology.blame(node, error)
        return error

    def _begin(self, one: Connection | Dialing) -> None:
        with self._lock:
            if self._aborted is None and not self._closed:
                self._in_use.add(one)
                return
        raise resp.PeerClosedError("it was given up")

    def _connected(self, node: Node) -> Connection:
        connection = self._open.get(node)
        if connection is not None and connection.usable and self._eras[node] == node.era:
            return connection
        self._drop(node)
        era = node.era
        dialing = self._dialing.get(node)
        if dialing is not None and not dialing.over:
            raise resp.TransportError(f"{node}: an earlier attempt to connect has not ended yet")
        self._new.add(node)
        dialing = self._dialing[node] = Dialing(lambda: self._dial(node))
        try:
            self._begin(dialing)
            connection = dialing.wait(self._dial_timeout_s)
        except resp.PeerClosedError:
            dialing.give_up("it was given up")
            raise
        finally:
            with self._lock:
                self._in_use.discard(dialing)
        del self._dialing[node]
        self._open[node], self._eras[node] = connection, era
        return connection

    def _dial(self, node: Node) -> Connection:
        problems: list[resp.TransportError | resp.ReplyError] = []
        for address in node.addresses:
            try:
                connection = dial(address, self._tier)
                if not self._tier.cluster:  # in a cluster the map has the roles
                    connection.expect_primary(self._tier.io_timeout_ms / 1000)
                return connection
            except (resp.TransportError, resp.ReplyError) as error:
                problems.append(error)
        raise next((problem for problem in problems if isinstance(problem, resp.AccessError)), problems[0])

    def _drop(self, node: Node) -> None:
        self._eras.pop(node, None)
        connection = self._open.pop(node, None)
        if connection is not None:
            connection.close()


class ClusterTransport(Connections, resp.Transport):
    """Sends commands and values to the nodes that have their slots, for one thread; any thread may call `abort`."""

    def ask_each(self, commands: Sequence[resp.Command]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        todo: dict[Target, list[int]] = {}
        asked = list(commands)
        judged: dict[Node, resp.ReplyError | None] = {}
        only = self._topology.only
        if only is not None and commands:
            todo[only, False] = [*range(len(commands))]
        else:
            for index, one in enumerate(commands):
                try:
                    todo.setdefault((self._topology.owner(one.key), False), []).append(index)
                except resp.NodeAwayError as error:
                    answers[index] = error
        for turn in range(MAX_REDIRECTIONS + 1):
            self._round(todo, asked, answers)
            again: dict[Target, list[int]] = {}
            for (node, asking), indices in todo.items():
                failed = [index for index in indices if isinstance(answers[index], Exception)]
                if len(failed) < len(indices):
                    judged.setdefault(node, None)
                for index in failed:
                    answer = answers[index]
                    if not isinstance(answer, resp.ReplyError):
                        continue
                    target = None if turn == MAX_REDIRECTIONS else self._next(node, asking, asked, index, answer)
                    if target is None:
                        answers[index] = self._meaning(node, answer)
                        if answers[index] is answer:
                            judged[node] = answer
                    else:
                        again.setdefault(target, []).append(index)
            if not again:
                break
            todo = again
        for node, fault in judged.items():
            self._judge(node, fault)
        return answers

    def set_each(self, writes: Sequence[resp.Write]) -> None:
        def settle(node: Node, indices: list[int]) -> Iterator[tuple[int, resp.ReplyError]]:
            self.use(node, lambda one: one.set_each([writes[index] for index in indices]))
            for index in indices:
                if isinstance(writes[index].answer, resp.ReplyError):
                    yield index, writes[index].answer

        for node, index, error in self._follow([write.key for write in writes], settle):
            writes[index].answer = self._judged(node, error)

    def get_each(self, reads: Sequence[resp.Read]) -> None:
        """Read values. Raises the first error reply."""

        def settle(node: Node, indices: list[int]) -> Iterator[tuple[int, resp.ReplyError]]:
            left = indices
            while left:
                replies = self.use(node, lambda one: one.get_each([reads[index] for index in left]))  # noqa: B023
                outcomes = [*zip(left, replies, strict=True)]
                yield from ((index, outcome) for index, outcome in outcomes if isinstance(outcome, resp.ReplyError))
                left = [index for index, outcome in outcomes if outcome is None]

        for node, index, error in self._follow([read.key for read in reads], settle):
            if error.code != "ASK" or not self._topology.cluster:
                raise self._judged(node, error) from error
            self._get_apart(node, reads[index])

    def _follow(
        self, keys: Sequence[bytes], settle: Callable[[Node, list[int]], Iterator[tuple[int, resp.ReplyError]]]
    ) -> Iterator[tuple[Node, int, resp.ReplyError]]:
        """Run `settle`, which yields error replies, where the keys' slots are; yield the final errors."""
        todo: dict[Node, list[int]] = {}
        for index, key in enumerate(keys):
            todo.setdefault(self._topology.owner(key), []).append(index)
        for turn in range(MAX_REDIRECTIONS + 1):
            again: dict[Node, list[int]] = {}
            for node, indices in todo.items():
                refused = 0
                for index, error in settle(node, indices):
                    refused += 1
                    target = self._target(node, error, lambda to: to.for_good) if turn < MAX_REDIRECTIONS else None
                    if target is None:
                        yield node, index, error
                    else:
                        again.setdefault(target[0], []).append(index)
                if refused < len(indices):
                    self._judge(node, None)
            todo = again

    def probe(self, node: Node, question: resp.Command | None, give_up_after_s: float) -> None:
        """Check that a node answers, regardless of its breaker's state. Raises the failure."""
        commands = [resp.PING] if question is None else [resp.PING, question]
        exchange = partial(Connection.exchange, commands=commands, give_up_after_s=give_up_after_s)
        for answer in self.use(node, exchange, probing=True):
            if isinstance(answer, resp.ReplyError) and answer.code not in NOT_THE_NODES_FAULT:
                raise answer

    def _get_apart(self, node: Node, read: resp.Read) -> None:
        """Read a value in a slot that moves key by key: the commands before it may be at another server."""
        if not read.accept(self.ask(read.before)):
            return
        for _ in range(2):
            (outcome,) = self.use(node, partial(Connection.get_each, reads=[read], asking=True))
            if not isinstance(outcome, resp.ReplyError):
                return
            target = self._target(node, outcome, lambda _: True)
            if target is None:
                raise self._judged(node, outcome) from outcome
            node = target[0]
        raise resp.SlotMovingError("a block is redirected without end")

    def _round(self, todo: dict[Target, list[int]], asked: list[resp.Command], answers: list[Any]) -> None:
        """Ask each node its part, all at the same time. A node with two parts, because one slot has moved there and
        another is moving, receives the second after it answered the first: there is one connection to it."""
        if len(todo) == 1 or any(len(indices) > resp.PIPELINE_COMMANDS for indices in todo.values()):
            for (node, asking), indices in todo.items():
                exchange = partial(Connection.exchange, commands=[asked[index] for index in indices], asking=asking)
                self._note(answers, indices, partial(self.use, node, exchange))
            return
        begun: list[tuple[Node, list[int], Connection]] = []
        second = {part: indices for part, indices in todo.items() if part[1] and (part[0], False) in todo}
        try:
            for (node, asking), indices in todo.items():
                if (node, asking) in second:
                    continue
                start = partial(self._start, node, [asked[index] for index in indices], asking)
                outcome = self._note(answers, indices, start)
                if isinstance(outcome, Connection):
                    begun.append((node, indices, outcome))
            while begun:
                node, indices, connection = begun[0]
                self._note(answers, indices, partial(self.end, node, connection, Connection.finish))
                begun.pop(0)
        finally:
            for *_, connection in begun:  # with unread answers
                connection.close()
        if second:
            self._round(second, asked, answers)

    def _start(self, node: Node, commands: list[resp.Command], asking: bool) -> Connection:
        def start(connection: Connection) -> Connection:
            connection.start(commands, asking=asking)
            return connection

        return self.use(node, start, keep=True)

    @staticmethod
    def _note(answers: list[Any], indices: list[int], do: Callable[[], Any]) -> Any:
        """Run `do`; set its outcome for each of `indices`."""
        try:
            outcome = do()
        except (resp.TransportError, resp.ReplyError) as error:
            outcome = error
            for index in indices:
                answers[index] = error
        if isinstance(outcome, list):
            for index, answer in zip(indices, outcome, strict=True):
                answers[index] = answer
        return outcome

    def _next(
        self, node: Node, asking: bool, asked: list[resp.Command], index: int, answer: resp.ReplyError
    ) -> Target | None:
        """Return where to ask again after an error reply, None if the error is final."""
        one = asked[index]
        if resp.unknown_script(one, answer):
            asked[index] = resp.spelled_out(one)
            return node, asking

        def may_follow(to: Redirection) -> bool:
            return to.slot == slot_of(one.key) and (to.for_good or not (asking or one.arguments[0] in WRITES))

        return self._target(node, answer, may_follow)

    def _target(self, node: Node, error: resp.ReplyError, may_follow: Callable[[Redirection], bool]) -> Target | None:
        """Return where a redirection leads; None without one that is followed."""
        to = redirection(error, node.address, self._topology.known()) if self._topology.cluster else None
        if to is None or not may_follow(to):
            return None
        # With TLS, servers that the map does not name are followed, too: they prove their name.
        target = self._topology.follow(to, strangers=self._tier.tls is not None)
        return None if target is None else (target, not to.for_good)

    def _judged(self, node: Node, error: resp.ReplyError) -> Exception:
        """Return the error for the caller, and blame the node if it cannot serve."""
        meaning = self._meaning(node, error)
        if meaning is error:
            self._judge(node, error)
        return meaning

    def _judge(self, node: Node, fault: resp.ReplyError | None) -> None:
        if fault is None:
            node.breaker.succeeded()
        elif fault.code not in NOT_THE_NODES_FAULT:
            self._topology.blame(node, fault)

    def _meaning(self, node: Node, error: resp.ReplyError) -> Exception:
        """Return the error for the caller."""
        if self._topology.cluster and (error.code in ("MOVED", "ASK", "TRYAGAIN") or resp.FOREIGN_KEY in str(error)):
            self._topology.want()
            return resp.SlotMovingError(f"{node}: {error}")
        return error
