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

from feddd.flower.api import Grid, Message
from feddd.strategies.checks import PATIENCE

POLL_SECONDS = 0.5
FAILURES_IN_A_ROW = 10
"""So often an answer may fail to be pulled before the run is given up."""
NODES_A_POLL = 4
"""With more nodes than this each is asked less often, so that the SuperLink is not asked more."""


@dataclass(frozen=True)
class Answer:
    """A node's reply, or why there is none; seconds since its message was pushed; code: Flower's, of an error."""

    node: int
    message: Message | None
    seconds: float
    failure: str = ""
    code: int = 0


@dataclass(frozen=True)
class Sent:
    """A message that was pushed."""

    identity: str
    node: int
    pushed: float


Arrived = SimpleQueue[tuple[Sent, Message | Exception, float]]
"""Replies, or why one cannot be had, and when they came."""


def answer_of(node: int, reply: Message, seconds: float) -> Answer:
    """Return what a reply is to the server: an answer, or a failure with its reason."""
    if reply.has_error():
        return Answer(node, None, seconds, _reason(reply), reply.error.code)
    return Answer(node, reply, seconds)


def exchange(
    grid: Grid,
    messages: Mapping[int, Message],
    *,
    deadline_seconds: float,
    quorum: int,
    again: Callable[[Answer], Message | None] = lambda _: None,
    meanwhile: Callable[[], None] = lambda: None,
    poll_seconds: float = POLL_SECONDS,
) -> dict[int, Answer]:
    """Send one message to each node and collect the answers.

    quorum: how many good answers a round needs; below that it goes on waiting after the deadline, as long as they can
    still come, for PATIENCE deadlines at the most
    again: another message for a node whose answer asks for one, within the same deadline
    meanwhile: called now and then while there is nothing to do but wait
    """
    begun = time.monotonic()
    pause = poll_seconds * max(1.0, len(messages) / NODES_A_POLL)
    arrived: Arrived = SimpleQueue()
    over = threading.Event()
    answers: dict[int, Answer] = {}
    overs = dict.fromkeys(messages, over)
    waiting = push(grid, messages, pause, arrived, overs)
    try:
        while waiting:
            meanwhile()
            try:
                sent, reply, moment = arrived.get(timeout=poll_seconds)
            except Empty:
                good = sum(answer.message is not None for answer in answers.values())
                missing = min(quorum, len(messages)) - good
                if _over(missing, len(waiting), (time.monotonic() - begun) / deadline_seconds):
                    break
                continue
            if isinstance(reply, Exception):
                raise reply
            answer = answer_of(sent.node, reply, moment - sent.pushed)
            more = again(answer)
            if more is None:
                answers[sent.node] = answer
                del waiting[sent.node]
            else:
                waiting |= push(grid, {sent.node: more}, pause, arrived, overs)
    finally:
        over.set()
    for node in messages.keys() - answers.keys():
        failure = "late" if node in waiting else "lost: Flower did not take the message"
        answers[node] = Answer(node, None, time.monotonic() - begun, failure)
    return answers


def push(
    grid: Grid, messages: Mapping[int, Message], pause: float, arrived: Arrived, overs: Mapping[int, threading.Event]
) -> dict[int, Sent]:
    """Send messages and ask for their answers until `overs`; by node, without those that Flower did not take."""
    if not messages:
        return {}
    nodes, now = list(messages), time.monotonic()
    identities: Iterable[str | None] = grid.push_messages([messages[node] for node in nodes])
    sent = {node: Sent(one, node, now) for one, node in zip(identities, nodes, strict=True) if one}
    for one in sent.values():
        threading.Thread(target=_pull, args=(grid, one, pause, arrived, overs[one.node]), daemon=True).start()
    return sent


def _pull(grid: Grid, sent: Sent, pause: float, arrived: Arrived, over: threading.Event) -> None:
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
                arrived.put((sent, error, time.monotonic()))
                return
        over.wait(pause)


def _over(missing: int, waiting: int, deadlines: float) -> bool:
    """Whether to go on without those that have not answered. missing: to the quorum; deadlines: that have passed"""
    return deadlines >= 1.0 and (missing <= 0 or missing > waiting or deadlines >= PATIENCE)


def _reason(reply: Message) -> str:
    """Return why a node did not answer, on one line."""
    error = reply.error
    words = " ".join((error.reason or "no reason given").split())[:300]
    return f"lost: {words} (code {error.code})"
