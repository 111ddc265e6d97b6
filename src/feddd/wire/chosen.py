"""Which numbers of an update travel, for a stack of clients: whole units, blocks of a sub-model, or single places.

Each kind knows how to take its numbers out of a model and put them back, what they weigh, and how the server counts
them in its average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.aggregation import Aggregator
from feddd.core.units import Mask, Params, Units
from feddd.wire.blocks import block_elements
from feddd.wire.format import pack_mask, pack_masks

Ints = NDArray[np.int64]


class Chosen:
    """Some numbers of every client of a stack; by default a part of the whole model, in which units do not matter."""

    @property
    def clients(self) -> int:
        """Return how many clients the stack has."""
        raise NotImplementedError

    def numbers(self, table: Units) -> Ints:
        """Return how many numbers each client sends, without those that are always sent."""
        raise NotImplementedError

    def take(self, values: Params, place: int, table: Units) -> Tensor:
        """Return one client's numbers as a float32 vector in wire order."""
        raise NotImplementedError

    def put(self, vectors: Sequence[Tensor], table: Units) -> dict[str, Tensor]:
        """Make stacks of what `take` returned, zero elsewhere; the numbers always sent stand behind the others."""
        raise NotImplementedError

    def only(self, fine: NDArray[np.bool_]) -> Chosen:
        """Return what some of the clients send."""
        raise NotImplementedError

    def with_one(self, place: int, other: Chosen) -> Chosen:
        """Return the same with what another stack of one sends in one client's place."""
        raise NotImplementedError

    def add(self, sums: Aggregator, values: Params, weights: Tensor, table: Units) -> None:
        """Count the clients in the server's sums; values: as the server has them, weights: float64 [clients]."""
        raise NotImplementedError

    def add_one(self, sums: Aggregator, values: Params, weight: float, table: Units) -> None:
        """Count a stack of one in the server's sums, number by number in double precision."""
        self.add(sums, values, torch.tensor([weight], dtype=torch.float64), table)

    def packed(self, table: Units) -> list[bytes]:
        """Return the mask of units that the server remembers of each client: all, if units do not matter."""
        return [pack_mask(table.full_mask(), table)] * self.clients

    def units(self, table: Units) -> Ints:
        """Return how many groups of numbers with a scale of their own each client sends."""
        return np.ones(self.clients, np.int64)

    def shares(self, table: Units) -> NDArray[np.float64]:
        """Return the share of the model that each client sends."""
        return self.numbers(table) / table.elements

    def fixed(self, table: Units) -> int:
        """Return how many numbers are sent in any case, behind the others."""
        return 0

    def counted(self, table: Units) -> Mapping[str, Tensor] | None:
        """Return which elements the server counts; None for all of them."""
        return None


@dataclass(frozen=True)
class ChosenUnits(Chosen):
    """Whole units; masks: [clients, units] per layer."""

    masks: Mask

    @property
    def clients(self) -> int:
        """Return how many masks there are; of a model without units, one."""
        return next((len(mask) for mask in self.masks.values()), 1)

    def packed(self, table: Units) -> list[bytes]:
        """Return the masks as they travel."""
        return pack_masks(self.masks, table)

    def numbers(self, table: Units) -> Ints:
        """Return the elements of the units."""
        counts = (layer.unit_elements * self.masks[layer.name].sum(1).numpy() for layer in table.layers)
        return sum(counts, np.zeros(1, np.int64))

    def units(self, table: Units) -> Ints:
        """Return the number of units."""
        return sum((self.masks[layer.name].sum(1).numpy() for layer in table.layers), np.zeros(1, np.int64))

    def shares(self, table: Units) -> NDArray[np.float64]:
        """Return the share of the numbers that a mask can leave out."""
        return self.numbers(table) / table.droppable_elements

    def take(self, values: Params, place: int, table: Units) -> Tensor:
        """Return the units' numbers."""
        return table.take(one(values, place), one(self.masks, place), fixed=False)

    def fixed(self, table: Units) -> int:
        """Return the number of tensors without units."""
        return len(table.fixed)

    def put(self, vectors: Sequence[Tensor], table: Units) -> dict[str, Tensor]:
        """Write every client's units into zeros."""
        stack = zeros(table, len(vectors))
        for place, vector in enumerate(vectors):
            table.put(one(stack, place), one(self.masks, place), vector)
        return stack

    def only(self, fine: NDArray[np.bool_]) -> ChosenUnits:
        """Return the masks of some of the clients."""
        return ChosenUnits(some(self.masks, fine))

    def with_one(self, place: int, other: Chosen) -> ChosenUnits:
        """Return the masks with another one in this place."""
        assert isinstance(other, ChosenUnits)
        return ChosenUnits(with_one(self.masks, place, other.masks))

    def counted(self, table: Units) -> Mapping[str, Tensor] | None:
        """Return the masks."""
        return self.masks

    def add(self, sums: Aggregator, values: Params, weights: Tensor, table: Units) -> None:
        """Count the units that were sent."""
        sums.add_stack(values, self.masks, weights, table)

    def add_one(self, sums: Aggregator, values: Params, weight: float, table: Units) -> None:
        """Count the units that were sent."""
        sums.add(one(values, 0), one(self.masks, 0), weight)


@dataclass(frozen=True)
class ChosenBlocks(Chosen):
    """Sub-models; masks: their units, [clients, units] per layer; elements: which numbers these are, by tensor."""

    masks: Mask
    elements: Mapping[str, Tensor]

    @property
    def clients(self) -> int:
        """Return how many sub-models there are."""
        return len(next(iter(self.masks.values())))

    def numbers(self, table: Units) -> Ints:
        """Return the elements of the sub-models."""
        return block_elements(self.masks, table)

    def shares(self, table: Units) -> NDArray[np.float64]:
        """Return the share of all numbers."""
        return 1.0 - (1.0 - self.numbers(table) / table.elements)  # as the plan has it, to the last digit

    def take(self, values: Params, place: int, table: Units) -> Tensor:
        """Return the blocks, tensor by tensor."""
        return torch.cat([values[slot.name][place][self.elements[slot.name][place]].float() for slot in table.slots])

    def put(self, vectors: Sequence[Tensor], table: Units) -> dict[str, Tensor]:
        """Write every client's blocks into zeros."""
        stack = zeros(table, len(vectors))
        for place, vector in enumerate(vectors):
            start = 0
            for slot in table.slots:
                inside = self.elements[slot.name][place]
                end = start + int(inside.sum())
                stack[slot.name][place][inside] = vector[start:end]
                start = end
        return stack

    def only(self, fine: NDArray[np.bool_]) -> ChosenBlocks:
        """Return the sub-models of some of the clients."""
        return ChosenBlocks(some(self.masks, fine), some(self.elements, fine))

    def with_one(self, place: int, other: Chosen) -> ChosenBlocks:
        """Return the sub-models as they are: nobody decides on its own."""
        return self

    def counted(self, table: Units) -> Mapping[str, Tensor]:
        """Return the elements."""
        return self.elements

    def add(self, sums: Aggregator, values: Params, weights: Tensor, table: Units) -> None:
        """Count the elements of the sub-models."""
        sums.add_blocks(values, self.elements, weights)


@dataclass(frozen=True)
class ChosenPlaces(Chosen):
    """Single numbers of the whole model in wire order; places: ascending, by client. The others count as zero."""

    places: Sequence[Ints]

    @property
    def clients(self) -> int:
        """Return how many clients have places."""
        return len(self.places)

    def numbers(self, table: Units) -> Ints:
        """Return how many they are."""
        return np.array([len(own) for own in self.places], np.int64)

    def take(self, values: Params, place: int, table: Units) -> Tensor:
        """Return the numbers at these places."""
        return flat(values, table)[place][torch.from_numpy(self.places[place])]

    def put(self, vectors: Sequence[Tensor], table: Units) -> dict[str, Tensor]:
        """Write every client's numbers into zeros."""
        whole = torch.zeros(len(vectors), table.elements)
        for own, places, vector in zip(whole, self.places, vectors, strict=True):
            own[torch.from_numpy(places)] = vector
        return unflat(whole, table)

    def only(self, fine: NDArray[np.bool_]) -> ChosenPlaces:
        """Return the places of some of the clients."""
        return ChosenPlaces([self.places[place] for place in np.flatnonzero(fine).tolist()])

    def with_one(self, place: int, other: Chosen) -> ChosenPlaces:
        """Return the places with other ones for this client."""
        assert isinstance(other, ChosenPlaces)
        return ChosenPlaces([*self.places[:place], *other.places, *self.places[place + 1 :]])

    def add(self, sums: Aggregator, values: Params, weights: Tensor, table: Units) -> None:
        """Count everything."""
        sums.add_stack(values, None, weights, table)

    def add_one(self, sums: Aggregator, values: Params, weight: float, table: Units) -> None:
        """Count everything."""
        sums.add(one(values, 0), table.full_mask(), weight)


def everything(table: Units, clients: int) -> ChosenUnits:
    """Choose all units of every client."""
    return ChosenUnits({name: mask.expand(clients, -1) for name, mask in table.full_mask().items()})


def one(stack: Params, place: int) -> dict[str, Tensor]:
    """Return one client of a stack; views."""
    return {name: tensors[place] for name, tensors in stack.items()}


def some(stack: Params, fine: NDArray[np.bool_]) -> dict[str, Tensor]:
    """Return some of the clients of a stack."""
    places = torch.from_numpy(np.flatnonzero(fine))
    return {name: values.index_select(0, places.to(values.device)) for name, values in stack.items()}


def with_one(stack: Params, place: int, other: Params) -> dict[str, Tensor]:
    """Return a stack with a stack of one in one client's place."""
    return {name: torch.cat([own[:place], other[name], own[place + 1 :]]) for name, own in stack.items()}


def zeros(table: Units, clients: int) -> dict[str, Tensor]:
    """Return a stack of zeros."""
    return {slot.name: torch.zeros(clients, *slot.shape) for slot in table.slots}


class _Parts(dict[str, Tensor]):
    """Stacks that are parts of one tensor, which is remembered."""

    def __init__(self, parts: Mapping[str, Tensor], whole: Tensor) -> None:
        super().__init__(parts)
        self.whole = whole


def flat(stack: Params, table: Units) -> Tensor:
    """Return all numbers of each model in the order of the layer table, [clients, elements]; not to be written to."""
    if isinstance(stack, _Parts):
        return stack.whole
    clients = len(stack[table.slots[0].name])
    return torch.cat([stack[slot.name].detach().reshape(clients, -1).float() for slot in table.slots], 1).cpu()


def unflat(whole: Tensor, table: Units) -> dict[str, Tensor]:
    """Undo `flat`; the stacks are parts of the same memory."""
    split = torch.split(whole, [slot.elements for slot in table.slots], dim=1)
    parts = {slot.name: part.reshape(len(whole), *slot.shape) for slot, part in zip(table.slots, split, strict=True)}
    return _Parts(parts, whole)
