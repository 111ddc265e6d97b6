"""Several clients at once: a stack of their models, and units gathered from it and scattered into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddd.core.units import Params, Units


def stack_of_one(params: Params, units: Units) -> dict[str, Tensor]:
    """Return one client's model as a stack; views."""
    return {slot.name: params[slot.name].detach().unsqueeze(0) for slot in units.slots}


def take_stack(units: Units, stack: Params, masks: Mapping[str, Tensor]) -> list[Tensor]:
    """`take` for every client of a stack at once, without the fixed ones."""
    if not all(slot.plain for slot in units.slots):
        return [units.take(_one(stack, client), _one(masks, client), fixed=False) for client in range(_clients(masks))]
    parts: list[tuple[Tensor, ...]] = []
    for layer in units.layers:
        counts, chosen = _chosen(masks[layer.name])
        for slot in layer.slots:
            rows = slot.stacked_rows(stack[slot.name].detach()).flatten(0, 1)
            parts.append(torch.split(rows.index_select(0, chosen.to(rows.device)), counts))
    return [torch.cat([part[client].flatten() for part in parts]).float() for client in range(_clients(masks))]


def put_stack(units: Units, stack: Params, masks: Mapping[str, Tensor], values: Sequence[Tensor]) -> None:
    """Write what `take_stack` returned back into its places in the stack; the rest is left as it is."""
    if not all(slot.plain for slot in units.slots):
        for client, own in enumerate(values):
            units.put(_one(stack, client), _one(masks, client), own, fixed=False)
        return
    starts = [0] * len(values)
    for layer in units.layers:
        counts, chosen = _chosen(masks[layer.name])
        for slot in layer.slots:
            size = slot.elements // layer.units
            ends = [start + count * size for start, count in zip(starts, counts, strict=True)]
            parts = [own[start:end] for own, start, end in zip(values, starts, ends, strict=True)]
            rows = slot.stacked_rows(stack[slot.name]).flatten(0, 1)
            new = torch.cat(parts).view(-1, size).to(rows)
            rows.index_copy_(0, chosen.to(rows.device), new)
            starts = ends


def _one(stack: Mapping[str, Tensor], client: int) -> dict[str, Tensor]:
    return {name: tensors[client] for name, tensors in stack.items()}


def _clients(masks: Mapping[str, Tensor]) -> int:
    return len(next(iter(masks.values())))


def _chosen(mask: Tensor) -> tuple[list[int], Tensor]:
    """Return how many units of each client, and which of all clients' units in one row."""
    flags = mask.numpy()
    return flags.sum(1).tolist(), torch.from_numpy(flags.ravel().nonzero()[0])
