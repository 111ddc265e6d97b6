"""What some clients send when it is not units: the blocks of a sub-model, or some elements of their update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core import sparse
from feddd.core.aggregation import Aggregator
from feddd.core.blocks import block_bytes, decode_blocks, element_masks, encode_blocks
from feddd.core.payload import unpack_mask
from feddd.core.units import Mask, Params, Units
from feddd.simulation.kept import KeptStore
from feddd.simulation.training import only
from feddd.strategies.client import Kept
from feddd.strategies.protocol import Task, Upload


@dataclass(frozen=True)
class Part:
    """What arrives of a stack of clients.

    values: a stack    chosen: which elements count, None for all    sizes, shares: of the payloads, [clients]
    """

    values: Params
    chosen: Mapping[str, Tensor] | None
    sizes: NDArray[np.int64]
    shares: NDArray[np.float64]

    def told(self, uploads: Sequence[Upload]) -> list[Upload]:
        """The uploads with what they really cost."""
        return [
            replace(upload, upload_bytes=int(size), kept_share=float(share))
            for upload, size, share in zip(uploads, self.sizes, self.shares, strict=True)
        ]

    def only(self, fine: NDArray[np.bool_]) -> Part:
        """Of some of the clients."""
        chosen = None if self.chosen is None else only(self.chosen, fine)
        return Part(only(self.values, fine), chosen, self.sizes[fine], self.shares[fine])

    def count(self, sums: Aggregator, weights: Tensor, table: Units) -> None:
        """Add it to the sums."""
        if self.chosen is None:
            sums.add_stack(self.values, None, weights, table)
        else:
            sums.add_blocks(self.values, self.chosen, weights)


def confine(stack: Mapping[str, Tensor], tasks: Sequence[Task], table: Units, *, wire: bool = False) -> None:
    """Leave of every client's model what its task gives it, and zero elsewhere.

    With all weights into and out of a unit at zero, a rectified network computes what it would without the unit, and
    its gradients keep them there.
    """
    masks, chosen = _submodels(tasks, table)
    for name, values in stack.items():
        values.mul_(chosen[name].to(values.device))
    if wire:
        _over_the_wire(stack, masks, table)


def blocks_sent(after: Params, tasks: Sequence[Task], table: Units, *, wire: bool = False) -> Part:
    """The sub-models, whole."""
    masks, chosen = _submodels(tasks, table)
    values = {name: stack * chosen[name].to(stack.device) for name, stack in after.items()}
    if wire:
        _over_the_wire(values, masks, table)
    sizes = [block_bytes(_one(masks, place), table) for place in range(len(tasks))]
    shares = np.array([1.0 - task.dropout for task in tasks])
    return Part(values, chosen, np.array(sizes), shares)


def sparse_sent(
    before: Params,
    after: Params,
    base: Params,
    tasks: Sequence[Task],
    kept: KeptStore,
    table: Units,
    *,
    wire: bool = False,
) -> Part:
    """The greatest elements of update and residual, added to the server's values; the rest stays with the client."""
    updates = to_vectors(after, table) - to_vectors(before, table)
    sizes, shares = np.empty(len(tasks), np.int64), np.empty(len(tasks))
    for place, task in enumerate(tasks):
        assert task.sparse is not None
        vector, ternary = updates[place], task.sparse.ternary
        if task.client in kept:
            vector += kept[task.client].values.numpy()
        count = sparse.greatest_count(len(vector), task.sparse.share)
        chosen = sparse.choose(vector, count, ternary=ternary)
        sizes[place], shares[place] = sparse.sparse_bytes(chosen, len(vector)), count / len(vector)
        if wire:
            data = sparse.encode_sparse(chosen, len(vector), table)
            chosen = sparse.decode_sparse(data, len(vector), table, ternary=ternary)
        arrived = sparse.dense(chosen, len(vector))
        kept.put(task.client, Kept(table.full_mask(), torch.from_numpy(vector - arrived)))
        updates[place] = arrived
    parts = torch.split(torch.from_numpy(updates), [slot.elements for slot in table.slots], dim=1)
    values = {
        slot.name: base[slot.name] + part.reshape(len(tasks), *slot.shape).to(base[slot.name].device)
        for slot, part in zip(table.slots, parts, strict=True)
    }
    return Part(values, None, sizes, shares)


def to_vectors(stack: Params, table: Units) -> NDArray[np.float32]:
    """All elements of each model in the order of the layer table, [clients, elements]; a copy."""
    clients = len(stack[table.slots[0].name])
    flat = torch.cat([stack[slot.name].detach().reshape(clients, -1).float() for slot in table.slots], 1)
    vectors: NDArray[np.float32] = flat.cpu().numpy()
    return vectors


def _submodels(tasks: Sequence[Task], table: Units) -> tuple[Mask, dict[str, Tensor]]:
    """The units and the elements of the clients' sub-models."""
    units = [unpack_mask(task.submodel or b"", table) for task in tasks]
    masks = {layer.name: torch.stack([own[layer.name] for own in units]) for layer in table.layers}
    return masks, element_masks(masks, table)


def _over_the_wire(stack: Mapping[str, Tensor], masks: Mask, table: Units) -> None:
    for place in range(len(next(iter(masks.values())))):
        data = encode_blocks({name: own.cpu() for name, own in _one(stack, place).items()}, _one(masks, place), table)
        values, _ = decode_blocks(data, table)
        for name, own in stack.items():
            own[place].copy_(values[name])


def _one(stack: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    return {name: tensors[place] for name, tensors in stack.items()}
