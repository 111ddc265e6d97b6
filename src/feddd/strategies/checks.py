"""What a server believes of an answer: nothing that it has not checked. Refusals say why, in one line.

A deployment and the simulator's faulty fleets make the same checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from feddd.core.payload import decode_values
from feddd.core.quantise import FLOAT_BITS
from feddd.core.selection import kept_units
from feddd.core.units import Layer, Mask, Units
from feddd.strategies.protocol import Task

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


def check_payload(data: bytes, task: Task, table: Units, limits: Limits, bits: int = FLOAT_BITS) -> tuple[Mask, Tensor]:
    """The mask and the vector of kept values, if they are what the task asked for."""
    mask, values = decode_values(data, table, bits)
    if not bool(values.isfinite().all()):
        raise Refused("the payload holds a value that is not finite")
    if len(values) and float(values.abs().max()) > limits.value:
        raise Refused(f"the payload holds a value beyond {limits.value:g}")
    for layer in table.layers:
        wanted, sent = asked_units(layer, task), int(mask[layer.name].sum())
        if sent != wanted:
            raise Refused(f"{sent} units of layer {layer.name} came, and {wanted} were asked for")
    return mask, values


def asked_units(layer: Layer, task: Task) -> int:
    """How many units of a layer a task asks for."""
    return layer.units if layer.name in task.always_send else kept_units(layer.units, task.dropout)
