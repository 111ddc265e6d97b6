"""Asking nodes who they are, in the background: only the first meeting of a run waits for the answers.

A node that does not answer, or not with an introduction, is left out in words and asked again now and then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from logging import WARNING
from queue import Empty, SimpleQueue

from feddd.errors import RunError
from feddd.flower.api import APP_NOT_LOADED, APP_RAISED, Grid, Message, MessageType, RecordDict, logger
from feddd.flower.attempts import with_reasons
from feddd.flower.records import ORDER, Order, Report, write_record
from feddd.flower.rounds import NODES_A_POLL, Answer, Arrived, answer_of, push
from feddd.strategies.checks import PATIENCE, Refused

LEAST_GRACE_SECONDS, MOST_GRACE_SECONDS = 10.0, 90.0
"""When enough clients are there for the first round, it waits for the others as long again, within these bounds."""
MOST_PAUSE_SECONDS = 600.0
"""A node that does not introduce itself is asked again after pauses that double up to this, once rounds go on."""
POLLS_A_LOOK = 10
"""While a round waits for answers, new nodes are looked for once in so many polls."""
MUTE = "it does not say who it is"

Read = Callable[[RecordDict, float], Report]
"""Checks an introduction, which took so many seconds; a ValueError says why it is refused."""


@dataclass
class _Stranger:
    """A node that has not introduced itself: how often it was asked, what is under way, what is wrong with it."""

    tries: int = 0
    due: float = 0.0
    asked: float = 0.0
    waits_for: str = ""
    over: threading.Event = field(default_factory=threading.Event)
    words: str = ""
    refused: bool = False


class Introductions:
    """The nodes of a run that the server does not know yet."""

    def __init__(self, read: Read, *, min_clients: int, deadline_seconds: float, poll_seconds: float) -> None:
        self._read, self._min_clients = read, min_clients
        self._deadline_seconds, self._poll_seconds = deadline_seconds, poll_seconds
        self._strangers: dict[int, _Stranger] = {}
        self._arrived: Arrived = SimpleQueue()
        self._ready: dict[int, Report] = {}
        self._looked, self._met = 0.0, False

    def meet(self, grid: Grid, known: Collection[int]) -> dict[int, Report]:
        """Ask those that are new, and take the introductions that have come, by node.

        The first time it waits for those of `min_clients`, and somewhat longer for the others'. Later it only waits
        until as many nodes are online, and one of them is known.
        """
        begun = time.monotonic()
        enough = math.inf
        while True:
            online, now = set(grid.get_node_ids()), time.monotonic()
            self._ask(grid, online, known)
            here = online & (set(known) | self._ready.keys())
            clients = len({self._ready[node].client for node in here - set(known)})
            if self._met:
                done = bool(here) and len(online - self._refused()) >= self._min_clients
            else:
                enough = min(enough, now) if clients >= self._min_clients else math.inf
                done = now - enough >= (self._grace(enough - begun) if self._waiting(online) else 0.0)
            if done:
                self._met = True
                reports, self._ready = self._ready, {}
                # By name, so that the order in which nodes happen to answer decides nothing.
                return dict(sorted(reports.items(), key=lambda item: _natural(item[1].client)))
            if now - begun > PATIENCE * self._deadline_seconds or self._hopeless(online, here):
                words = f"{len(here)} clients with feddd_mod are there, {self._min_clients} are needed"
                raise RunError(with_reasons(words, self.problems()))
            time.sleep(self._poll_seconds)

    def look(self, grid: Grid, known: Collection[int]) -> None:
        """Ask those that are new, now and then, while a round waits; they are admitted before the next one."""
        now = time.monotonic()
        if now - self._looked < POLLS_A_LOOK * self._poll_seconds:
            return
        self._looked = now
        try:
            self._ask(grid, set(grid.get_node_ids()), known)
        except Exception as error:  # the round's own messages tell if the SuperLink is gone, and not only busy
            logger.log(WARNING, "new nodes could not be looked for: %s", error)

    def problems(self) -> dict[str, str]:
        """Return why nodes are left out, by node."""
        return {f"node {node}": one.words for node, one in sorted(self._strangers.items()) if one.words}

    def close(self) -> None:
        """Stop waiting for anybody."""
        for stranger in self._strangers.values():
            stranger.over.set()
        self._strangers = {}

    def _ask(self, grid: Grid, online: Collection[int], known: Collection[int]) -> None:
        """Take the introductions that have come; ask who has not been asked, or not for long; forget who is gone."""
        self._take()
        nodes, now = set(online) - set(known) - self._ready.keys(), time.monotonic()
        for node in self._strangers.keys() - nodes:
            self._strangers.pop(node).over.set()
        for node, stranger in self._strangers.items():
            if stranger.waits_for and now - stranger.asked > self._patient_seconds():
                self._fail(node, MUTE)
            elif stranger.waits_for and now - stranger.asked > self._grace(0.0):
                self._say(node, MUTE)
        strangers = {node: self._strangers.setdefault(node, _Stranger()) for node in sorted(nodes)}
        due = {node: one for node, one in strangers.items() if not one.waits_for and now >= one.due}
        pause = self._poll_seconds * max(1.0, len(strangers) / NODES_A_POLL)
        overs = {node: threading.Event() for node in due}
        # Valid longer than it is waited for, so that it is not Flower that says that it has expired.
        messages = {node: _hello(node, 2 * self._patient_seconds()) for node in due}
        sent = push(grid, messages, pause, self._arrived, overs)
        for node, stranger in due.items():
            stranger.asked, stranger.over = now, overs[node]
            if node in sent:
                stranger.waits_for = sent[node].identity
            else:
                self._fail(node, "Flower did not take the message that asks who it is")

    def _take(self) -> None:
        """Read what has come since the last time."""
        while True:
            try:
                sent, reply, moment = self._arrived.get_nowait()
            except Empty:
                return
            stranger = self._strangers.get(sent.node)
            if stranger is None or stranger.waits_for != sent.identity:
                continue
            try:
                if isinstance(reply, Exception):
                    raise Refused(f"its introduction cannot be had: {reply}")
                answer = answer_of(sent.node, reply, moment - sent.pushed)
                self._ready[sent.node] = self._read(_content(answer), answer.seconds)
                del self._strangers[sent.node]
            except ValueError as error:
                stranger.refused = True
                self._fail(sent.node, str(error))

    def _fail(self, node: int, words: str) -> None:
        """The node is asked again after a pause."""
        stranger = self._strangers[node]
        stranger.over.set()
        stranger.tries += 1
        most = MOST_PAUSE_SECONDS if self._met else LEAST_GRACE_SECONDS
        pause = min(self._poll_seconds * 2.0 ** min(stranger.tries, 60), most)
        stranger.waits_for, stranger.due = "", time.monotonic() + pause
        self._say(node, words)

    def _say(self, node: int, words: str) -> None:
        if self._strangers[node].words != words:
            logger.log(WARNING, "node %d is left out: %s", node, words)
        self._strangers[node].words = words

    def _grace(self, seconds: float) -> float:
        return min(max(seconds, LEAST_GRACE_SECONDS), MOST_GRACE_SECONDS, self._deadline_seconds)

    def _patient_seconds(self) -> float:
        """Return how long an introduction is waited for: an app may take longer to start than a round may take."""
        return max(self._deadline_seconds, MOST_GRACE_SECONDS)

    def _waiting(self, nodes: Collection[int]) -> bool:
        return any(one.waits_for for node, one in self._strangers.items() if node in nodes)

    def _refused(self) -> set[int]:
        return {node for node, one in self._strangers.items() if one.refused}

    def _hopeless(self, online: set[int], here: set[int]) -> bool:
        """Whether enough nodes are online for a first round, and those that are missing have all failed often."""
        if self._met or len(online) < self._min_clients or len(here) >= self._min_clients or self._waiting(online):
            return False
        return all(self._strangers[node].tries >= PATIENCE for node in online - here)


def _hello(node: int, ttl: float) -> Message:
    content = RecordDict()
    write_record(content, ORDER, Order("hello"))
    return Message(content, node, MessageType.TRAIN, ttl=ttl)


def _content(answer: Answer) -> RecordDict:
    """Return what an answer says; an error is refused with its reason."""
    if answer.message is not None:
        return answer.message.content
    reason = answer.failure.removeprefix("lost: ")
    if answer.code not in (APP_NOT_LOADED, APP_RAISED):
        raise Refused(f"{MUTE}: {reason}")
    hint = "" if "feddd_mod" in reason else "; is feddd_mod first of the app's mods?"
    raise Refused(f"it was asked who it is and answered with an error, {reason}{hint}")


def _natural(name: str) -> tuple[int, int, str]:
    """Return numbers by value, before words."""
    return (0, int(name), "") if name.isascii() and name.isdigit() else (1, 0, name)
