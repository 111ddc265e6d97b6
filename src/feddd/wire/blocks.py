"""Sub-models of any units: a network with only some units of every hidden layer, as blocks of the full tensors.

In a chain of layers the units of one are the inputs of the next, so that a unit that is left out takes its row with it
and its columns in the layer above. What remains of a tensor is a block: the rows and the columns of the units kept.
A payload of blocks has the header and the mask of every other payload, value encoding 4, then the blocks as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.units import Layer, Units


def check_chain(table: Units) -> None:
    """Refuse a model whose layers are not, one after the other, each the input of the next."""
    if any(slot.span > 1 for slot in table.slots):
        raise ValueError("sub-models are cut by single channels and neurons: not with units of one's own")
    below: Layer | None = None
    for layer in table.layers:
        weights = [slot for slot in layer.slots if len(slot.shape) > 1]
        plain = len(weights) == 1 and all(slot.plain for slot in layer.slots)
        if plain and below is not None:
            inputs, flattened = weights[0].shape[1], len(weights[0].shape) < _axes(below)
            plain = inputs % below.units == 0 if flattened else inputs == below.units
        if not plain:
            raise ValueError(f"sub-models need a chain of layers (mlp, cnn1, cnn2): layer {layer.name} breaks it")
        below = layer
    if table.fixed or table.aliases:
        raise ValueError("sub-models need a chain of layers (mlp, cnn1, cnn2): no scalars, no tied weights")


def element_masks(masks: Mapping[str, Tensor], table: Units) -> dict[str, Tensor]:
    """Return the elements of each sub-model, bool [clients, *shape]; masks: its units, [clients, units] per layer."""
    found = {}
    for layer, below in _with_below(table):
        rows = masks[layer.name]
        for slot in layer.slots:
            if len(slot.shape) == 1:
                found[slot.name] = rows
                continue
            chosen = rows[:, :, None].expand(-1, -1, slot.shape[1])
            if below is not None:
                columns = masks[below.name].repeat_interleave(slot.shape[1] // below.units, dim=1)
                chosen = chosen & columns[:, None]
            ones = (1,) * (len(slot.shape) - 2)
            found[slot.name] = chosen.reshape(*chosen.shape, *ones).expand(-1, *slot.shape)
    return found


def block_elements(masks: Mapping[str, Tensor], table: Units) -> NDArray[np.int64]:
    """Return how many numbers each sub-model has, [clients]."""
    total = np.zeros(len(next(iter(masks.values()))), np.int64)
    for layer, below in _with_below(table):
        rows = masks[layer.name].sum(1).numpy()
        for slot in layer.slots:
            each = slot.elements // layer.units
            if below is None or len(slot.shape) == 1:
                total += rows * each
            else:
                total += rows * masks[below.name].sum(1).numpy() * (each // below.units)
    return total


def _with_below(table: Units) -> Iterator[tuple[Layer, Layer | None]]:
    yield from zip(table.layers, (None, *table.layers[:-1]), strict=True)


def _axes(layer: Layer) -> int:
    return max(len(slot.shape) for slot in layer.slots)
