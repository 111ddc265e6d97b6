"""The client half of a round: merge what came (step 7), choose and remember what stays (steps 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from feddd.core.selection import select
from feddd.core.units import Mask, Params, Units
from feddd.strategies.protocol import Task


@dataclass(frozen=True)
class Kept:
    """What a client holds of its own between rounds: the trained values of the units it did not send.

    mask: what it sent    values: the other units' values, float32, in wire order
    """

    mask: Mask
    values: Tensor


def receive(received: Params, kept: Kept | None, units: Units) -> dict[str, Tensor]:
    """The local model W of the coming round: the received values, and its own where it was sent none (Eqs. 5 and 6).

    received: dense values of the download    kept: None if the download was the full model
    """
    local = {name: tensor.clone() for name, tensor in received.items()}
    local |= {alias: local[name] for alias, name in units.aliases}
    if kept is not None:
        units.put(local, complement(kept.mask), kept.values, fixed=False)
    return local


def report(
    before: Params,
    after: Params,
    task: Task,
    units: Units,
    *,
    rng: np.random.Generator,
    coverage: Mapping[str, Tensor] | None = None,
) -> tuple[Mask, Kept]:
    """Which units to upload, and what to keep of the rest."""
    mask = select(
        before,
        after,
        task.dropout,
        selector=task.selector,
        coverage=coverage,
        rng=rng,
        units=units,
        always_send=task.always_send,
    )
    return mask, Kept(mask, units.take(after, complement(mask), fixed=False))


def complement(mask: Mapping[str, Tensor]) -> Mask:
    """The units that a mask leaves out."""
    return {name: ~kept for name, kept in mask.items()}
