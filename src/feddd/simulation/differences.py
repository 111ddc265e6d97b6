"""Uploads in a few bits, for a stack of clients: rounded differences, and the values that the server makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.quantise import FLOAT_BITS, dequantise, draw_noise, quantise_stack, round_units, units_at_once
from feddd.core.units import Mask, Params, Slot, Units
from feddd.simulation.wire import upload_coded
from feddd.strategies.feedback import left_over, with_residual
from feddd.strategies.protocol import Task
from feddd.strategies.reference import bases, received

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Download:
    """What the server sends in a round, as arrays that travel between processes.

    model: the values that clients are sent    bits: of a value on the wire; in a few of them also:
    server: the server's own, unrounded values    reference: what differences are taken to where nothing was sent
    before: the reference before this round, with error feedback    download_bytes: by client
    """

    model: Arrays
    bits: int = FLOAT_BITS
    server: Arrays | None = None
    reference: Arrays | None = None
    before: Arrays | None = None
    download_bytes: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Sent:
    """A download as one sub-model has it; see `Download`."""

    model: Mapping[str, Tensor]
    bits: int = FLOAT_BITS
    server: Mapping[str, Tensor] | None = None
    reference: Mapping[str, Tensor] | None = None
    before: Mapping[str, Tensor] | None = None


def arriving(
    after: Params,
    tasks: Sequence[Task],
    masks: Mask,
    sent: Sent,
    units: Units,
    rngs: Sequence[np.random.Generator] | None,
    *,
    residuals: Sequence[Tensor] = (),
    wire: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The values that the server makes of the clients' rounded differences, and their residuals after it.

    residuals: before it, with error feedback    wire: really encode and decode them
    """
    if sent.server is None or sent.reference is None:
        raise ValueError("differences need the server's values and the reference")
    new = received(tasks, units)
    if not residuals and not wire:
        return _arriving_units(after, masks, sent, new, units, rngs), []
    base = bases(sent.model, sent.reference, new, units)
    difference = {slot.name: after[slot.name] - base[slot.name] for slot in units.slots}
    for place, residual in enumerate(residuals):
        for name, owed in with_residual(_own(difference, place), residual, units).items():
            difference[name][place] = owed
    coded = quantise_stack(difference, units, sent.bits, rngs)
    rounded = upload_coded(coded, masks, units, sent.bits) if wire else dequantise(coded, units)
    rest = [
        left_over(_own(difference, place), _own(rounded, place), _own(masks, place), residual, units)
        for place, residual in enumerate(residuals)
    ]
    added_to = bases(sent.server, sent.reference, new, units)
    return {slot.name: rounded[slot.name].add_(added_to[slot.name]) for slot in units.slots}, rest


def _arriving_units(
    after: Params,
    masks: Mask,
    sent: Sent,
    new: Mask | None,
    units: Units,
    rngs: Sequence[np.random.Generator] | None,
) -> dict[str, Tensor]:
    """The same sums for the units that are sent, some at a time so that they stay in the cache; zero elsewhere."""
    assert sent.server is not None
    assert sent.reference is not None
    clients = len(after[units.slots[0].name])
    noise = draw_noise(rngs, clients, units)
    arrived = {slot.name: after[slot.name] - sent.model[slot.name] + sent.server[slot.name] for slot in units.fixed}
    for layer in units.layers:
        numbers = [slot.stacked_rows(after[slot.name]).flatten(0, 1) for slot in layer.slots]
        at_client, at_server = (
            [_rows_of(slot, model, sent.reference) for slot in layer.slots] for model in (sent.model, sent.server)
        )
        whole = [torch.zeros(rows.shape) for rows in numbers]
        chosen = masks[layer.name].flatten().nonzero().squeeze(1)
        # Of each client's units, the row of the model, or of the reference behind it where the client was sent nothing.
        base_of = chosen % layer.units
        if new is not None:
            base_of = base_of + layer.units * ~new[layer.name].flatten()[chosen]
        step = units_at_once(numbers)
        for begin in range(0, len(chosen), step):
            some, known = chosen[begin : begin + step], base_of[begin : begin + step]
            difference = [
                rows.index_select(0, some).sub_(base.index_select(0, known))
                for rows, base in zip(numbers, at_client, strict=True)
            ]
            drawn = [noise[slot.name].take(some.numpy(), axis=0) for slot in layer.slots]
            scale, codes = round_units(difference, drawn, sent.bits)
            for rows, own, server in zip(whole, codes, at_server, strict=True):
                rows.index_copy_(0, some, own.mul_(scale.unsqueeze(1)).add_(server.index_select(0, known)))
        for slot, rows in zip(layer.slots, whole, strict=True):
            arrived[slot.name] = slot.tensors(rows.view(clients, layer.units, -1))
    return arrived


def _rows_of(slot: Slot, model: Params, reference: Params) -> Tensor:
    """A tensor's units in the model, and behind them those in the reference."""
    return torch.cat([slot.stacked_rows(values[slot.name][None])[0] for values in (model, reference)])


def _own(stack: Params, place: int) -> dict[str, Tensor]:
    return {name: tensors[place] for name, tensors in stack.items()}
