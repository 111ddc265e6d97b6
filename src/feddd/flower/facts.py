"""A round of a deployment: under way, and finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from feddd.flower.registry import Member
from feddd.strategies.protocol import Plan, ServerState, Task, Upload
from feddd.strategies.reference import Sending


@dataclass(frozen=True)
class RoundFacts:
    """A finished round, for tables: what the clients did, and what the server measured.

    seconds: wall seconds of this round    turnaround: client → wall seconds from its message to its answer
    compute: client → seconds that it said it trained    dropout: client → D_n
    evaluation_bytes: what federated evaluation sent, 0 unless it was asked for
    """

    round: int
    seconds: float
    clock_seconds: float
    uploads: tuple[Upload, ...]
    dropout: Mapping[int, float]
    turnaround: Mapping[int, float]
    compute: Mapping[int, float]
    members: tuple[Member, ...]
    state: ServerState
    metrics: Mapping[str, float]
    evaluation_bytes: int = 0


@dataclass
class Pending:
    """A round that is under way."""

    plan: Plan
    nodes: dict[int, int]
    tasks: dict[int, Task]
    download_bytes: dict[int, int]
    begun: float
    sent: Sending
