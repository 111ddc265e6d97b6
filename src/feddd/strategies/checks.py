"""What a server believes of an answer: nothing that it has not checked. Refusals say why, in one line.

A deployment and the simulator's faulty fleets make the same checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from feddd.core.units import Units
from feddd.strategies.protocol import Task
from feddd.wire.exchange import read
from feddd.wire.stage import Update

PATIENCE = 10.0
"""A round below its quorum goes on after the deadline, for so many deadlines at most."""


class Refused(ValueError):
    """An answer that does not count."""


@dataclass(frozen=True)
class Limits:
    """What an answer may say at most; of losses also what at least, because the allocation weighs clients by them.

    value: the largest magnitude in a payload    bits_per_s: the slowest and the fastest link
    """

    samples: int = 100_000_000
    loss: float = 1e6
    least_loss: float = 0.0
    compute_seconds: float = 7 * 86400.0
    value: float = 1e6
    bits_per_s: tuple[float, float] = (1.0, 1e15)


def check_told(samples: int, train_loss: float, oort_statistic: float, label_coverage: float, limits: Limits) -> None:
    """Refuse a report that cannot be true. A lie within the limits cannot be told from the truth."""
    if not 1 <= samples <= limits.samples:
        raise Refused(f"{samples} samples are not between 1 and {limits.samples}")
    for name, value in (("loss", train_loss), ("statistic", oort_statistic)):
        if not limits.least_loss <= value <= limits.loss:
            raise Refused(f"a {name} of {value} is not between {limits.least_loss:g} and {limits.loss:g}")
    if not (math.isnan(label_coverage) or 0.0 <= label_coverage <= 1e6):
        raise Refused(f"a label coverage of {label_coverage} makes no sense")


def check_version(sent: str, wanted: str) -> None:
    """Refuse an answer to another round than this one."""
    if sent != wanted:
        raise Refused("the answer belongs to another round")


def read_upload(data: bytes, task: Task, table: Units, limits: Limits) -> Update:
    """Return what a payload holds, a stack of one, if it is what the task asked for."""
    update = read(task.up, data, table)
    if not all(bool(values.isfinite().all()) for values in update.values.values()):
        raise Refused("the payload holds a value that is not finite")
    for values in update.values.values():
        if values.numel() and float(values.abs().max()) > limits.value:
            raise Refused(f"the payload holds a value beyond {limits.value:g}")
    for stage in task.up.stages:
        stage.check_asked(update.chosen, table)
    return update
