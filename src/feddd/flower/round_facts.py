"""A round of a deployment: under way, and finished."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from feddd.flower.registry import Member
from feddd.strategies.protocol import Plan, ServerState, Task, Upload
from feddd.wire.down import Sending


@dataclass(frozen=True)
class RoundFacts:
    """A finished round, for tables: what the clients did, and what the server measured.

    seconds: wall seconds of this round, all waiting for clients included
    turnaround: client → wall seconds from its message to its answer
    compute: client → seconds that it said it trained    dropout: client → D_n
    evaluation_bytes: what federated evaluation sent, 0 unless it was asked for
    attempts: how often the round was asked until enough clients counted; repeated_bytes: of those before the last,
    both ways    failures: who did not count or was left out and why, in words, by "client NAME" or "node ID"
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
    attempts: int = 1
    repeated_bytes: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Pending:
    """A round that is under way."""

    plan: Plan
    nodes: dict[int, int]
    tasks: dict[int, Task]
    download_bytes: dict[int, int]
    begun: float
    sent: Sending


def metrics_of(uploads: Sequence[Upload]) -> dict[str, float]:
    """What Flower's result keeps of a round: the mean loss over the samples that counted, and how many clients did."""
    counted = [upload for upload in uploads if upload.status == "ok"]
    samples = sum(upload.samples for upload in counted)
    loss = sum(upload.samples * upload.train_loss for upload in counted) / samples if samples else math.nan
    metrics = {"train_loss": loss, "participants": float(len(counted)), "asked": float(len(uploads))}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
