"""Nested sub-models: a narrower client has the first units of every layer (HeteroFL's rule).

A linear layer behind a flattened convolution takes the matching input columns: flattening is channel by channel, so
the first channels are the first columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddd.core.units import Params, Units


def prefix(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first entries along every axis; a view."""
    if len(shape) != rows.dim() or any(have < want for have, want in zip(rows.shape, shape, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(shape)} is no prefix of one of shape {tuple(rows.shape)}")
    return rows[tuple(slice(0, size) for size in shape)]


def slice_model(params: Params, wide: Units, narrow: Units) -> dict[str, Tensor]:
    """Return the sub-model with layer table `narrow` of the global values `params`; copies, contiguous."""
    result = {}
    for slot, own in zip(wide.slots, narrow.slots, strict=True):
        target = torch.empty(own.shape, dtype=params[slot.name].dtype)
        rows = own.rows(target) if own.shape else target
        rows.copy_(prefix(slot.rows(params[slot.name]), rows.shape) if own.shape else params[slot.name])
        result[slot.name] = target
    return result | {alias: result[name] for alias, name in narrow.aliases}


def coverage(wide: Units, clients: Sequence[Units]) -> dict[str, Tensor]:
    """CR(k): per layer of the global model, the share of clients whose sub-model contains each unit, float64 [units].

    clients: each client's layer table (clients of one width may share the object)
    """
    if not clients:
        raise ValueError("coverage needs at least one client")
    counts = {layer.name: torch.zeros(layer.units, dtype=torch.float64) for layer in wide.layers}
    for table in clients:
        for layer in table.layers:
            counts[layer.name][: layer.units] += 1
    return {name: count / len(clients) for name, count in counts.items()}


def narrow_coverage(share: Mapping[str, Tensor], narrow: Units) -> dict[str, Tensor]:
    """Return the coverage of the units that a sub-model has."""
    return {layer.name: share[layer.name][: layer.units] for layer in narrow.layers}
