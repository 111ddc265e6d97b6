"""Uploads in a few bits, for a stack of clients: rounded differences, and the values that the server makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.payload import decode_values, encode_coded, unpack_mask
from feddd.core.quantise import FLOAT_BITS, Coded, dequantise, quantise_stack
from feddd.core.stacks import put_stack, take_stack
from feddd.core.units import Mask, Params, Units
from feddd.strategies.client import complement
from feddd.strategies.protocol import Task

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Download:
    """What the server sends in a round, as arrays that travel between processes.

    model: the values that clients are sent    bits: of a value on the wire; in a few of them also:
    server: the server's own, unrounded values    reference: what differences are taken to where nothing was sent
    download_bytes: by client
    """

    model: Arrays
    bits: int = FLOAT_BITS
    server: Arrays | None = None
    reference: Arrays | None = None
    download_bytes: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Sent:
    """A download as one sub-model has it; see `Download`."""

    model: Mapping[str, Tensor]
    bits: int = FLOAT_BITS
    server: Mapping[str, Tensor] | None = None
    reference: Mapping[str, Tensor] | None = None


def arriving(
    after: Params,
    tasks: Sequence[Task],
    masks: Mask,
    sent: Sent,
    units: Units,
    rngs: Sequence[np.random.Generator],
    *,
    wire: bool = False,
) -> dict[str, Tensor]:
    """The values that the server makes of the clients' rounded differences; wire: really encode and decode them."""
    if sent.server is None or sent.reference is None:
        raise ValueError("differences need the server's values and the reference")
    base = bases(sent.model, sent.reference, tasks, units)
    difference = {slot.name: after[slot.name] - base[slot.name] for slot in units.slots}
    coded = quantise_stack(difference, units, sent.bits, rngs)
    rounded = _over_the_wire(coded, masks, sent.bits, units) if wire else dequantise(coded, units)
    added_to = bases(sent.server, sent.reference, tasks, units)
    return {slot.name: added_to[slot.name].add_(rounded[slot.name]) for slot in units.slots}


def bases(model: Params, reference: Params, tasks: Sequence[Task], units: Units) -> dict[str, Tensor]:
    """The model where a client was sent it in this round, the reference elsewhere; a stack."""
    count = len(tasks)
    stack = {slot.name: model[slot.name].expand(count, *slot.shape).clone() for slot in units.slots}
    if any(task.download is not None for task in tasks):
        everything = units.full_mask()
        received = [everything if task.download is None else unpack_mask(task.download, units) for task in tasks]
        rest = complement({layer.name: torch.stack([one[layer.name] for one in received]) for layer in units.layers})
        known = {slot.name: reference[slot.name].expand(count, *slot.shape) for slot in units.slots}
        put_stack(units, stack, rest, take_stack(units, known, rest))
    return stack


def _over_the_wire(coded: Coded, masks: Mask, bits: int, units: Units) -> dict[str, Tensor]:
    arrived = []
    for place in range(len(next(iter(masks.values())))):
        own = Coded(
            {name: codes[place] for name, codes in coded.codes.items()},
            {name: scales[place] for name, scales in coded.scales.items()},
        )
        data = encode_coded(own, {name: mask[place] for name, mask in masks.items()}, units, bits)
        mask, values = decode_values(data, units, bits)
        dense = units.zeros_like(own.codes)
        units.put(dense, mask, values)
        arrived.append(dense)
    return {slot.name: torch.stack([dense[slot.name] for dense in arrived]) for slot in units.slots}
