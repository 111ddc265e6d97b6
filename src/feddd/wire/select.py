"""Stages that choose which numbers travel: the best units, units that both ends know, sub-models, single numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from feddd.core.selection import kept_units, ranking_of, select_stack
from feddd.core.stacks import take_stack
from feddd.core.units import Mask, Units
from feddd.wire.blocks import element_masks
from feddd.wire.chosen import Chosen, ChosenBlocks, ChosenPlaces, ChosenUnits, Ints, flat, one
from feddd.wire.format import PayloadError, mask_bytes, pack_mask, unpack_masks
from feddd.wire.sparse import decode_places, encode_places, greatest_count, greatest_places, place_bytes
from feddd.wire.stage import At, ClientState, Each, Reading, Stage, Update

MASK, OWN = "mask", "own"
"""What clients keep: the units that they sent last, and the values of the others."""


class _Masked(Stage):
    """What stages share that write which units they are about."""

    chooses: ClassVar[bool] = True

    def sizes(self, update: Update, table: Units) -> int:
        """Return the bytes of a mask."""
        return mask_bytes(table)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the mask."""
        assert isinstance(update.chosen, ChosenUnits | ChosenBlocks)
        return pack_mask(one(update.chosen.masks, place), table)


@dataclass(frozen=True)
class Select(_Masked):
    """Send the best units of every layer, and keep one's own values of the others.

    dropout: D_n, the share of a layer's units that stays    score: what makes a unit good, see `core.selection`
    always_send: layers that are never dropped
    """

    dropout: float = 0.0
    score: Any = "importance"
    always_send: tuple[str, ...] = ()

    each: ClassVar[tuple[str, ...]] = ("dropout",)

    @property
    def needs_coverage(self) -> bool:
        """Return whether scores are divided by CR(k)."""
        return ranking_of(self.score).covered and self.dropout > 0

    def check(self) -> None:
        """Refuse a score that there is not."""
        ranking_of(self.score)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Return score the units by what training did to them, whatever the numbers on their way are by now."""
        rngs = at.rngs("selection") if ranking_of(self.score).draws else None
        masks = select_stack(
            at.before,
            at.after,
            each["dropout"],
            units=at.table,
            selector=self.score,
            coverage=at.coverage,
            rngs=rngs,
            always_send=self.always_send,
        )
        if any(each["dropout"]):
            own = [values.cpu() for values in take_stack(at.table, at.after, complement(masks))]
        else:
            own = [torch.empty(0)] * len(states)
        sent = torch.cat([masks[layer.name] for layer in at.table.layers], 1)
        kept = [state | {MASK: mask, OWN: values} for state, mask, values in zip(states, sent, own, strict=True)]
        return dataclasses.replace(update, chosen=ChosenUnits(masks)), kept

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return what is asked for: nearly the same share of every layer."""
        kept = [self.asked(layer.name, layer.units) for layer in table.layers]
        elements = sum(count * layer.unit_elements for count, layer in zip(kept, table.layers, strict=True))
        return elements, sum(kept), mask_bytes(table)

    def asked(self, layer: str, count: int) -> int:
        """Return how many of a layer's units are sent."""
        return count if layer in self.always_send else kept_units(count, self.dropout)

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the mask."""
        reading.chosen = ChosenUnits(unpack_masks([bytes(reading.take(mask_bytes(table)))], table))

    def check_asked(self, chosen: Chosen, table: Units) -> None:
        """Refuse a mask that has not as many units of every layer as were asked for."""
        assert isinstance(chosen, ChosenUnits)
        for layer in table.layers:
            wanted, sent = self.asked(layer.name, layer.units), int(chosen.masks[layer.name].sum())
            if sent != wanted:
                raise PayloadError(f"{sent} units of layer {layer.name} came, and {wanted} were asked for")


@dataclass(frozen=True)
class Given(_Masked):
    """Send these units, which both ends know; mask: packed."""

    mask: bytes = b""

    each: ClassVar[tuple[str, ...]] = ("mask",)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Leave everything as it is."""
        return dataclasses.replace(update, chosen=ChosenUnits(unpack_masks(each["mask"], at.table))), states

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the size of the units."""
        chosen = ChosenUnits(unpack_masks([self.mask], table))
        return int(chosen.numbers(table)[0]), int(chosen.units(table)[0]), mask_bytes(table)

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the mask, which must be the one that is known."""
        if bytes(reading.take(mask_bytes(table))) != self.mask:
            raise PayloadError("the payload is not of the units that were agreed on")
        reading.chosen = ChosenUnits(unpack_masks([self.mask], table))


@dataclass(frozen=True)
class Blocks(_Masked):
    """Send a sub-model: the rows and columns of some units.

    mask: its units, packed    dropout: the share of the model that is outside of it
    """

    mask: bytes = b""
    dropout: float = 0.0

    each: ClassVar[tuple[str, ...]] = ("mask", "dropout")
    splits_units: ClassVar[bool] = True

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Leave zeros outside of the sub-models."""
        chosen = blocks_of(each["mask"], at.table)
        values = {name: stack * chosen.elements[name].to(stack.device) for name, stack in update.values.items()}
        return dataclasses.replace(update, values=values, chosen=chosen), states

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the size of the sub-model."""
        return int(blocks_of([self.mask], table).numbers(table)[0]), 1, mask_bytes(table)

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the mask, which must be that of the sub-model."""
        if bytes(reading.take(mask_bytes(table))) != self.mask:
            raise PayloadError("the payload is not of the sub-model that was asked for")
        reading.chosen = blocks_of([self.mask], table)

    def encoding(self, inner: int) -> int:
        """Return that of blocks."""
        return 4


@dataclass(frozen=True)
class TopK(Stage):
    """Send the numbers of greatest magnitude, of equal ones the first; the others count as zero.

    share: of all numbers of the model
    """

    share: float = 0.1

    chooses: ClassVar[bool] = True
    splits_units: ClassVar[bool] = True

    @property
    def dropout(self) -> float:
        """Return the share that is not sent."""
        return 1.0 - self.share

    def check(self) -> None:
        """Refuse a share that is none."""
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"the share of TopK must lie above 0 and at most at 1, not {self.share}")

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Leave zeros where nothing is sent."""
        whole = flat(update.values, at.table).numpy()
        count = greatest_count(at.table.elements, self.share)
        chosen = ChosenPlaces([greatest_places(own, count) for own in whole])
        vectors = [torch.from_numpy(own[places]) for own, places in zip(whole, chosen.places, strict=True)]
        return Update(chosen.put(vectors, at.table), chosen), states

    def sizes(self, update: Update, table: Units) -> Ints:
        """Return the bytes of the places in their Golomb code."""
        assert isinstance(update.chosen, ChosenPlaces)
        return np.array([4 + place_bytes(places, table.elements) for places in update.chosen.places], np.int64)

    def planned(self, table: Units, numbers: int, units: int) -> None:
        """Return that nobody knows: it depends on where the greatest numbers are."""
        return

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write how many they are."""
        return int(update.chosen.numbers(table)[place]).to_bytes(4, "little")

    def back(self, update: Update, place: int, table: Units) -> bytes:
        """Write where they are."""
        assert isinstance(update.chosen, ChosenPlaces)
        return encode_places(update.chosen.places[place], table.elements)

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read how many they are: as many as were asked for."""
        count, wanted = int.from_bytes(reading.take(4), "little"), greatest_count(table.elements, self.share)
        if count != wanted:
            raise PayloadError(f"{count} numbers came, and {wanted} were asked for")
        reading.chosen = ChosenPlaces([np.arange(count)])

    def read_back(self, reading: Reading, table: Units) -> None:
        """Read where they are."""
        count = int(reading.chosen.numbers(table)[0])
        places, used = decode_places(reading.data, count, table.elements)
        reading.take(used)
        reading.chosen = ChosenPlaces([places])

    def encoding(self, inner: int) -> int:
        """Return that of sparse payloads."""
        return 5


def blocks_of(masks: Sequence[bytes], table: Units) -> ChosenBlocks:
    """Return the sub-models of these packed units."""
    stacked = unpack_masks(masks, table)
    return ChosenBlocks(stacked, element_masks(stacked, table))


def split_mask(flags: Tensor, table: Units) -> Mask:
    """Return the booleans of all units, one after the other, by layer."""
    parts = torch.split(flags, [layer.units for layer in table.layers])
    return dict(zip((layer.name for layer in table.layers), parts, strict=True))


def complement(mask: Mapping[str, Tensor]) -> Mask:
    """Return the units that a mask leaves out."""
    return {name: ~kept for name, kept in mask.items()}
