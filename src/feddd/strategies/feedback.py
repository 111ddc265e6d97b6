"""Error feedback: what a client had to send and the server did not get goes along with what it sends later.

Two things get lost on the way: what is rounded away of the units that are sent, and what was trained of the others when
a full download replaces it. A client adds up, number by number, the first or both in its residual. It is kept behind
the values of the units that were not sent, in the same vector. Numbers are rounded to the nearest then: the errors of
rounding at random are larger than the numbers, and feeding them back would let them grow.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from feddd.core.units import Mask, Params, Units
from feddd.strategies.client import Kept, complement


def residual_of(kept: Kept | None, replaced: Params | None, units: Units) -> Tensor:
    """The residual before a round, one number for each droppable one in wire order.

    replaced: the reference that the client held when a full download replaced what it kept; None if nothing did, or if
    that is not to count
    """
    if kept is None:
        return torch.zeros(units.droppable_elements)
    unsent = complement(kept.mask)
    count = units.droppable_elements + len(units.fixed) - units.kept_elements(kept.mask)
    own, residual = kept.values[:count], kept.values[count:].clone()
    if len(residual) == 0:
        residual = torch.zeros(units.droppable_elements)
    if replaced is None or count == 0:
        return residual
    dense = _dense(residual, units)
    lost = own - units.take(replaced, unsent, fixed=False)
    units.put(dense, unsent, units.take(dense, unsent, fixed=False) + lost, fixed=False)
    return units.take(dense, units.full_mask(), fixed=False)


def with_residual(difference: Params, residual: Tensor, units: Units) -> dict[str, Tensor]:
    """What the client has to send."""
    owed = _dense(residual, units)
    return {slot.name: difference[slot.name] + owed[slot.name] for slot in units.slots}


def left_over(difference: Params, rounded: Params, mask: Mask, residual: Tensor, units: Units) -> Tensor:
    """The residual after a round: of units that were sent what was rounded away, of others what it was.

    difference: with the residual    rounded: what the server decodes
    """
    after = _dense(residual, units)
    rest = units.take(difference, mask, fixed=False) - units.take(rounded, mask, fixed=False)
    units.put(after, mask, rest, fixed=False)
    return units.take(after, units.full_mask(), fixed=False)


def keeping(kept: Kept, residual: Tensor) -> Kept:
    """What the client holds until its next round."""
    return dataclasses.replace(kept, values=torch.cat([kept.values, residual]))


def _dense(residual: Tensor, units: Units) -> dict[str, Tensor]:
    dense = {slot.name: torch.zeros(slot.shape) for slot in units.slots}
    units.put(dense, units.full_mask(), residual, fixed=False)
    return dense
