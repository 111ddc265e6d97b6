"""One exchange with the nodes: push, pull until all have answered or the deadline has come, go on without the rest.

Flower's own `send_and_receive` waits for everybody, by default for an hour. And its `pull_messages` does not return
before an answer that was announced has arrived whole: each answer is pulled in a thread of its own, so that a slow
upload holds up neither the others nor the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from feddd.errors import RunError
from feddd.flower.names import Grid, Message
from feddd.strategies.checks import PATIENCE

POLL_SECONDS = 0.5
FAILURES_IN_A_ROW = 10
"""So often an answer may fail to be pulled before the run is given up."""
NODES_A_POLL = 4
"""With more nodes than this each is asked less often, so that the SuperLink is not asked more."""


@dataclass(frozen=True)
class Answer:
    """A node's reply, or why there is none; seconds since its message was pushed."""

    node: int
    message: Message | None
    seconds: float
    failure: str = ""


@dataclass(frozen=True)
class _Sent:
    """A message that was pushed."""

    identity: str
    node: int
    pushed: float


def exchange(
    grid: Grid,
    messages: Mapping[int, Message],
    *,
    deadline_seconds: float,
    quorum: int,
    again: Callable[[Answer], Message | None] = lambda _: None,
    poll_seconds: float = POLL_SECONDS,
) -> dict[int, Answer]:
    """Send one message to each node and collect the answers.

    quorum: how many good answers a round needs; below that it goes on waiting after the deadline
    again: another message for a node whose answer asks for one, within the same deadline
    """
    begun = time.monotonic()
    pause = poll_seconds * max(1.0, len(messages) / NODES_A_POLL)
    arrived: SimpleQueue[tuple[_Sent, Message, float] | Exception] = SimpleQueue()
    over = threading.Event()

    def push(some: Mapping[int, Message]) -> dict[int, _Sent]:
        sent = _push(grid, some)
        for one in sent.values():
            threading.Thread(target=_pull, args=(grid, one, pause, arrived, over), daemon=True).start()
        return sent

    answers: dict[int, Answer] = {}
    waiting = push(messages)
    try:
        while waiting:
            try:
                found = arrived.get(timeout=poll_seconds)
            except Empty:
                if _enough(answers, messages, quorum, time.monotonic() - begun, deadline_seconds):
                    break
                continue
            if isinstance(found, Exception):
                raise found
            sent, reply, moment = found
            failure = _reason(reply) if reply.has_error() else ""
            answer = Answer(sent.node, None if failure else reply, moment - sent.pushed, failure)
            more = again(answer)
            if more is None:
                answers[sent.node] = answer
                del waiting[sent.node]
            else:
                waiting |= push({sent.node: more})
    finally:
        over.set()
    for node in messages.keys() - answers.keys():
        failure = "late" if node in waiting else "lost: Flower did not take the message"
        answers[node] = Answer(node, None, time.monotonic() - begun, failure)
    return answers


def _push(grid: Grid, messages: Mapping[int, Message]) -> dict[int, _Sent]:
    """What was pushed, by node; Flower says None for a message that it did not take."""
    nodes, now = list(messages), time.monotonic()
    identities: Iterable[str | None] = grid.push_messages([messages[node] for node in nodes])
    return {node: _Sent(one, node, now) for one, node in zip(identities, nodes, strict=True) if one}


def _pull(
    grid: Grid,
    sent: _Sent,
    pause: float,
    arrived: SimpleQueue[tuple[_Sent, Message, float] | Exception],
    over: threading.Event,
) -> None:
    """Ask for one answer until it is there or nobody wants it any more; a busy SuperLink may fail now and then."""
    failures = 0
    while not over.is_set():
        try:
            # The reply to a lost node's message comes from the SuperLink: only what it answers tells whose it is.
            for reply in grid.pull_messages([sent.identity]):
                if reply.metadata.reply_to_message_id == sent.identity:
                    arrived.put((sent, reply, time.monotonic()))
                    return
            failures = 0
        except Exception as error:  # raised again where the round is waited for
            failures += 1
            if failures == FAILURES_IN_A_ROW:
                arrived.put(error)
                return
        over.wait(pause)


def _enough(
    answers: Mapping[int, Answer], messages: Mapping[int, Message], quorum: int, passed: float, deadline_seconds: float
) -> bool:
    """Whether the round may go on without those that have not answered."""
    if passed < deadline_seconds:
        return False
    good = sum(answer.message is not None for answer in answers.values())
    if good >= min(quorum, len(messages)):
        return True
    if passed >= PATIENCE * deadline_seconds:
        raise RunError(f"only {good} of {len(messages)} clients answered within {passed:.0f} s; {quorum} are needed")
    return False


def _reason(reply: Message) -> str:
    """Why a node did not answer, on one line."""
    error = reply.error
    words = " ".join((error.reason or "no reason given").split())[:200]
    return f"lost: {words} (code {error.code})"
