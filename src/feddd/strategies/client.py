"""The client half of a round: merge what came (step 7), choose and remember what stays (steps 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from feddd.core.selection import select_stack
from feddd.core.stacks import put_stack, stack_of_one, take_stack
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


def merge_stack(stack: Params, kept: Sequence[Kept | None], units: Units) -> None:
    """Write what every client kept into the model that it was sent; None for a client that was sent all of it."""
    nothing, empty = complement(units.full_mask()), torch.empty(0)
    own = [complement(one.mask) if one else nothing for one in kept]
    masks = {layer.name: torch.stack([mask[layer.name] for mask in own]) for layer in units.layers}
    put_stack(units, stack, masks, [one.values if one else empty for one in kept])


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
    old, new = stack_of_one(before, units), stack_of_one(after, units)
    masks, (kept,) = report_stack(old, new, [task], units, rngs=[rng], coverage=coverage)
    return {name: mask[0] for name, mask in masks.items()}, kept


def report_stack(
    before: Params,
    after: Params,
    tasks: Sequence[Task],
    units: Units,
    *,
    rngs: Sequence[np.random.Generator] | None,
    coverage: Mapping[str, Tensor] | None = None,
) -> tuple[Mask, list[Kept]]:
    """`report` for several clients of one model whose tasks differ in nothing but the rate; rngs: for "random"."""
    masks = select_stack(
        before,
        after,
        [task.dropout for task in tasks],
        units=units,
        selector=tasks[0].selector,
        coverage=coverage,
        rngs=rngs,
        always_send=tasks[0].always_send,
    )
    if all(task.dropout == 0.0 for task in tasks):
        values = [torch.empty(0)] * len(tasks)
    else:
        values = take_stack(units, after, complement(masks))
    kept = [Kept({name: rows[client] for name, rows in masks.items()}, own.cpu()) for client, own in enumerate(values)]
    return masks, kept


def complement(mask: Mapping[str, Tensor]) -> Mask:
    """The units that a mask leaves out."""
    return {name: ~kept for name, kept in mask.items()}
