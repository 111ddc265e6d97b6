"""One exchange with the nodes: push, pull until all have answered or the deadline has come, go on without the rest.

Flower's own `send_and_receive` waits for everybody, by default for an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from feddd.errors import RunError
from feddd.flower.names import Grid, Message
from feddd.strategies.checks import PATIENCE

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Answer:
    """A node's reply, or why there is none; seconds since its message was pushed."""

    node: int
    message: Message | None
    seconds: float
    failure: str = ""


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
    waiting = _push(grid, messages)
    answers: dict[int, Answer] = {}
    while waiting:
        for reply in list(grid.pull_messages(list(waiting))):
            # The reply to a lost node's message comes from the SuperLink: only what it answers tells whose it is.
            sent = waiting.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            node, pushed = sent
            failure = _reason(reply) if reply.has_error() else ""
            answer = Answer(node, None if failure else reply, time.monotonic() - pushed, failure)
            more = again(answer)
            if more is not None:
                waiting |= _push(grid, {node: more})
            else:
                answers[node] = answer
        passed = time.monotonic() - begun
        if waiting and passed >= deadline_seconds:
            good = sum(answer.message is not None for answer in answers.values())
            if good >= min(quorum, len(messages)):
                break
            if passed >= PATIENCE * deadline_seconds:
                raise RunError(
                    f"only {good} of {len(messages)} clients answered within {passed:.0f} s; {quorum} are needed"
                )
        if waiting:
            time.sleep(poll_seconds)
    late = {node: Answer(node, None, time.monotonic() - begun, "late") for node, _ in waiting.values()}
    return answers | late


def _push(grid: Grid, messages: Mapping[int, Message]) -> dict[str, tuple[int, float]]:
    """By the id of the message: its node and when it was pushed."""
    nodes, now = list(messages), time.monotonic()
    identities: Iterable[str] = grid.push_messages([messages[node] for node in nodes])
    return {identity: (node, now) for identity, node in zip(identities, nodes, strict=True) if identity}


def _reason(reply: Message) -> str:
    """Why a node did not answer, on one line."""
    error = reply.error
    words = " ".join((error.reason or "no reason given").split())[:200]
    return f"lost: {words} (code {error.code})"
