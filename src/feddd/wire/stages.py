"""The stages that methods are made of: which numbers travel, against what they are taken, and how they are written.

- `Select`, `TopK`, `Blocks`: which numbers travel;
- `Difference`, `Feedback`: what they are taken to, and what is owed from earlier rounds;
- `Bits`, `Ternary`: how a number is written. Without one of them it is a float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.selection import check_selector, kept_units, select_stack
from feddd.core.stacks import take_stack
from feddd.core.submodel import slice_model
from feddd.core.units import Mask, Params, Slot, Units
from feddd.wire.blocks import element_masks
from feddd.wire.chosen import Chosen, ChosenBlocks, ChosenPlaces, ChosenUnits, Ints, everything, flat, one, unflat
from feddd.wire.exchange import (
    COMPOSED,
    At,
    ClientState,
    Each,
    Reading,
    Stage,
    Update,
    fixed_values,
    mask_bytes,
)
from feddd.wire.format import VALUE_BYTES, PayloadError, pack_mask, unpack_mask
from feddd.wire.quantise import (
    Coded,
    dequantise,
    draw_noise,
    greatest_code,
    pack_codes,
    quantise_stack,
    round_units,
    units_at_once,
    unpack_codes,
)
from feddd.wire.sparse import decode_places, encode_places, greatest_count, greatest_places, place_bytes

MASK, OWN, RESIDUAL = "mask", "own", "residual"
"""What clients keep: the units that they sent last, the values of the others, and what they owe."""


@dataclass(frozen=True)
class Select(Stage):
    """Send the best units of every layer, and keep one's own values of the others.

    dropout: D_n, the share of a layer's units that stays    score: what makes a unit good, see `core.selection`
    always_send: layers that are never dropped
    """

    dropout: float = 0.0
    score: Any = "importance"
    always_send: tuple[str, ...] = ()

    each: ClassVar[tuple[str, ...]] = ("dropout",)
    chooses: ClassVar[bool] = True

    @property
    def needs_coverage(self) -> bool:
        """Return whether importance is divided by CR(k)."""
        return self.score == "importance" and self.dropout > 0

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse to choose twice, and a score that there is not."""
        check_selector(self.score)
        _choose_once(self, below)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Score the units by what training did to them, whatever the numbers on their way are by now."""
        rngs = at.rngs("selection") if self.score == "random" else None
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
            own = [values.cpu() for values in take_stack(at.table, at.after, _complement(masks))]
        else:
            own = [torch.empty(0)] * len(states)
        sent = torch.cat([masks[layer.name] for layer in at.table.layers], 1)
        kept = [state | {MASK: mask, OWN: values} for state, mask, values in zip(states, sent, own, strict=True)]
        return dataclasses.replace(update, chosen=ChosenUnits(masks)), kept

    def sizes(self, update: Update, table: Units) -> int:
        """Return the bytes of a mask."""
        return mask_bytes(table)

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return what is asked for: nearly the same share of every layer."""
        kept = [self.asked(layer.name, layer.units) for layer in table.layers]
        elements = sum(count * layer.unit_elements for count, layer in zip(kept, table.layers, strict=True))
        return elements, sum(kept), mask_bytes(table)

    def asked(self, layer: str, count: int) -> int:
        """Return how many of a layer's units are sent."""
        return count if layer in self.always_send else kept_units(count, self.dropout)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the mask."""
        return update.chosen.packed(table)[place]

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the mask."""
        mask = unpack_mask(bytes(reading.take(mask_bytes(table))), table)
        reading.chosen = ChosenUnits({name: units[None] for name, units in mask.items()})

    def check_asked(self, chosen: Chosen, table: Units) -> None:
        """Refuse a mask that has not as many units of every layer as were asked for."""
        assert isinstance(chosen, ChosenUnits)
        for layer in table.layers:
            wanted, sent = self.asked(layer.name, layer.units), int(chosen.masks[layer.name].sum())
            if sent != wanted:
                raise PayloadError(f"{sent} units of layer {layer.name} came, and {wanted} were asked for")


@dataclass(frozen=True)
class Given(Stage):
    """Send these units, which both ends know; mask: packed."""

    mask: bytes = b""

    each: ClassVar[tuple[str, ...]] = ("mask",)
    chooses: ClassVar[bool] = True

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse to choose twice."""
        _choose_once(self, below)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Leave everything as it is."""
        units = [unpack_mask(mask, at.table) for mask in each["mask"]]
        masks = {layer.name: torch.stack([own[layer.name] for own in units]) for layer in at.table.layers}
        return dataclasses.replace(update, chosen=ChosenUnits(masks)), states

    def sizes(self, update: Update, table: Units) -> int:
        """Return the bytes of a mask."""
        return mask_bytes(table)

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the size of the units."""
        mask = unpack_mask(self.mask, table)
        kept = sum(int(own.sum()) for own in mask.values())
        return table.kept_elements(mask) - len(table.fixed), kept, mask_bytes(table)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the mask."""
        return update.chosen.packed(table)[place]

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the mask, which must be the one that is known."""
        if bytes(reading.take(mask_bytes(table))) != self.mask:
            raise PayloadError("the payload is not of the units that were agreed on")
        mask = unpack_mask(self.mask, table)
        reading.chosen = ChosenUnits({name: units[None] for name, units in mask.items()})


@dataclass(frozen=True)
class Blocks(Stage):
    """Send a sub-model: the rows and columns of some units.

    mask: its units, packed    dropout: the share of the model that is outside of it
    """

    mask: bytes = b""
    dropout: float = 0.0

    each: ClassVar[tuple[str, ...]] = ("mask", "dropout")
    chooses: ClassVar[bool] = True
    splits_units: ClassVar[bool] = True

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse to choose twice."""
        _choose_once(self, below)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Leave zeros outside of the sub-models."""
        chosen = blocks_of(each["mask"], at.table)
        values = {name: stack * chosen.elements[name].to(stack.device) for name, stack in update.values.items()}
        return dataclasses.replace(update, values=values, chosen=chosen), states

    def sizes(self, update: Update, table: Units) -> int:
        """Return the bytes of a mask."""
        return mask_bytes(table)

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the size of the sub-model."""
        return int(blocks_of([self.mask], table).numbers(table)[0]), 1, mask_bytes(table)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the mask."""
        assert isinstance(update.chosen, ChosenBlocks)
        return pack_mask(one(update.chosen.masks, place), table)

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

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse to choose twice, and a share that is none."""
        _choose_once(self, below)
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


class Differences(Mapping[str, Tensor]):
    """Stacks less what they are taken to, worked out when they are asked for."""

    def __init__(self, after: Params, base: Base) -> None:
        self.after, self.base = after, base

    def __getitem__(self, name: str) -> Tensor:
        return self.after[name] - self.base.stack[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.base.stack)

    def __len__(self) -> int:
        return len(self.base.stack)


@dataclass(frozen=True)
class Base:
    """What differences are taken to: a model where a client was sent it in this round, the reference elsewhere."""

    model: Params
    reference: Params | None
    received: Mask | None
    table: Units

    @cached_property
    def stack(self) -> dict[str, Tensor]:
        """Return it for every client; a stack of one if all are alike."""
        stack = {slot.name: self.model[slot.name][None] for slot in self.table.slots}
        if self.received is None:
            return stack
        assert self.reference is not None
        for layer in self.table.layers:
            sent = self.received[layer.name].unsqueeze(2)
            for slot in layer.slots:
                new, old = (slot.stacked_rows(values[slot.name][None]) for values in (self.model, self.reference))
                stack[slot.name] = slot.tensors(torch.where(sent.to(new.device), new, old))
        return stack


@dataclass(frozen=True)
class Difference(Stage):
    """Send what training has changed, not what came out: against what both ends know."""

    needs_base: ClassVar[bool] = True

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Take what the client was sent away, and the reference where it was sent nothing."""
        base = Base(at.known.sent, at.known.reference, at.received, at.table)
        return dataclasses.replace(update, values=Differences(update.values, base)), states

    def decode(self, update: Update, at: At) -> Update:
        """Add the server's own values in place of what it sent."""
        base = Base(at.known.server, at.known.reference, at.received, at.table).stack
        values = {name: update.values[name] + base[name] for name in base}
        return dataclasses.replace(update, values=values)


@dataclass(frozen=True)
class Feedback(Stage):
    """Send along later what the server did not get: what a later stage rounds away or leaves out.

    replaced: count also what a full download replaced before it was sent. Numbers had better be rounded to the nearest
    behind this stage: errors of rounding at random are larger than the numbers, and feeding them back lets them grow.
    """

    replaced: bool = False

    lasting: ClassVar[bool] = True

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Add what is owed."""
        owed = torch.stack([self._owed(state, place, at) for place, state in enumerate(states)])
        kept = [state | {RESIDUAL: own} for state, own in zip(states, owed, strict=True)]
        return dataclasses.replace(update, values=unflat(flat(update.values, at.table).add_(owed), at.table)), kept

    def _owed(self, state: ClientState, place: int, at: At) -> Tensor:
        table = at.table
        residual = state[RESIDUAL].clone() if RESIDUAL in state else torch.zeros(table.elements)
        full = at.received is None or all(bool(units[place].all()) for units in at.received.values())
        if not (self.replaced and full and at.known.replaced is not None and OWN in state) or not len(state[OWN]):
            return residual
        unsent = _complement(split_mask(state[MASK], table))
        dense = one(unflat(residual[None], table), 0)
        lost = state[OWN] - table.take(at.known.replaced, unsent, fixed=False)
        table.put(dense, unsent, table.take(dense, unsent, fixed=False) + lost, fixed=False)
        return flat({name: tensor[None] for name, tensor in dense.items()}, table)[0]

    def remember(self, states: list[ClientState], owed: Update, arrived: Update, at: At) -> list[ClientState]:
        """Owe what has not arrived of the numbers that count; of the others what was owed before."""
        counted = arrived.chosen.counted(at.table)
        rest = flat(owed.values, at.table) - flat(arrived.values, at.table)
        if counted is not None:
            sent = flat(_elements(counted, at.table), at.table).bool()
            before = torch.stack([state[RESIDUAL] for state in states])
            rest = torch.where(sent, rest, before)
        return [state | {RESIDUAL: own} for state, own in zip(states, rest, strict=True)]


@dataclass(frozen=True)
class Bits(Stage):
    """Write numbers in a few bits: whole numbers times a scale, one for each unit, or one for all single numbers.

    bits: 8, 4 or 2    rounding: "random" goes up or down so that the mean is right, "nearest" is for error feedback
    """

    bits: int = 8
    rounding: Literal["random", "nearest"] = "random"

    codes_values: ClassVar[bool] = True

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse a number of bits that there is not, and a second way of writing."""
        greatest_code(self.bits)
        if self.rounding not in ("random", "nearest"):
            raise ValueError(f'rounding must be "random" or "nearest", not {self.rounding!r}')
        _write_once(self, below)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Round the numbers that are sent."""
        rngs = at.rngs("rounding") if self.rounding == "random" else None
        if isinstance(update.chosen, ChosenUnits):
            if isinstance(update.values, Differences) and not at.wire:
                values = _rounded_differences(update.values, update.chosen.masks, at.table, self.bits, rngs)
                return dataclasses.replace(update, values=values), states
            return self._encode_units(update, at.table, rngs), states
        written, vectors = [], []
        for place in range(len(states)):
            vector = update.chosen.take(update.values, place, at.table)
            noise = _noise(None if rngs is None else rngs[place], len(vector))
            scale, (whole,) = round_units([vector[None]], [noise], self.bits)
            written.append((scale.numpy(), pack_codes(whole[0].numpy(), self.bits)))
            vectors.append(whole[0] * scale)
        return Update(update.chosen.put(vectors, at.table), update.chosen, written), states

    def _encode_units(self, update: Update, table: Units, rngs: Sequence[np.random.Generator] | None) -> Update:
        """Round whole units, each with a scale of its own."""
        assert isinstance(update.chosen, ChosenUnits)
        coded = quantise_stack({slot.name: update.values[slot.name] for slot in table.slots}, table, self.bits, rngs)
        return Update(dequantise(coded, table), update.chosen, coded)

    def sizes(self, update: Update, table: Units) -> Ints:
        """Return the bytes of scales, codes, and the numbers that are always sent, which stay as they are."""
        chosen = update.chosen
        sizes: Ints = self._bytes(chosen.numbers(table), chosen.units(table), chosen.fixed(table))
        return sizes

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the same, of what is asked for."""
        return numbers, units, self._bytes(numbers, units, len(table.fixed))

    def _bytes(self, numbers: Any, units: Any, fixed: int) -> Any:
        return VALUE_BYTES * (units + fixed) + -(-(self.bits * numbers) // 8)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the scales, and the numbers that are always sent."""
        if isinstance(update.chosen, ChosenUnits):
            masks, scales = update.chosen.masks, update.coded.scales
            kept = [scales[layer.name][place][masks[layer.name][place]] for layer in table.layers]
            floats = torch.cat(kept).numpy()
        else:
            floats = update.coded[place][0]
        return np.concatenate([floats, fixed_values(update, place, table)]).astype("<f4").tobytes()

    def back(self, update: Update, place: int, table: Units) -> bytes:
        """Write the codes."""
        if isinstance(update.chosen, ChosenUnits):
            return pack_codes(update.chosen.take(update.coded.codes, place, table).numpy(), self.bits)
        packed: bytes = update.coded[place][1]
        return packed

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the scales."""
        groups, fixed = int(reading.chosen.units(table)[0]), reading.chosen.fixed(table)
        floats = np.frombuffer(reading.take(VALUE_BYTES * (groups + fixed)), "<f4").astype(np.float32)
        reading.notes["scales"], reading.notes["fixed"] = floats[:groups], floats[groups:]
        if not (np.isfinite(floats[:groups]).all() and (floats[:groups] >= 0).all()):
            raise PayloadError("a unit's scale must be finite and at least 0")

    def read_back(self, reading: Reading, table: Units) -> None:
        """Read the codes, and multiply."""
        count, scales = int(reading.chosen.numbers(table)[0]), reading.notes["scales"]
        try:
            values = unpack_codes(reading.take(-(-self.bits * count // 8)), count, self.bits)
        except ValueError as error:
            raise PayloadError(str(error)) from error
        with np.errstate(over="ignore"):  # what is not finite then is refused by whoever asks for finite values
            values *= scales[_scale_of(reading.chosen, table)] if len(scales) > 1 else scales[0]
        reading.values = torch.from_numpy(np.concatenate([values, reading.notes["fixed"]]))

    def encoding(self, inner: int) -> int:
        """Return that of units in so many bits."""
        return {8: 1, 4: 2, 2: 3}[self.bits] if inner == 0 else COMPOSED

    def narrowed(self, update: Update, wide: Units, narrow: Units) -> Update:
        """Return the same codes and the same scales."""
        scales = {layer.name: update.coded.scales[layer.name][:, : layer.units] for layer in narrow.layers}
        codes = {name: own[None] for name, own in slice_model(one(update.coded.codes, 0), wide, narrow).items()}
        coded = Coded(codes, scales)
        return Update(dequantise(coded, narrow), everything(narrow, 1), coded)


@dataclass(frozen=True)
class Ternary(Stage):
    """Write numbers as signs and their mean magnitude."""

    codes_values: ClassVar[bool] = True

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse a second way of writing."""
        _write_once(self, below)

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Give all numbers that are sent the same magnitude."""
        written, vectors = [], []
        for place in range(len(states)):
            vector = update.chosen.take(update.values, place, at.table).numpy()
            mean = np.float32(np.abs(vector).mean(dtype=np.float64))
            written.append((mean, np.packbits(vector < 0, bitorder="little").tobytes()))
            signed = np.where(vector < 0, -mean, mean).astype(np.float32)
            vectors.append(torch.from_numpy(np.concatenate([signed, fixed_values(update, place, at.table)])))
        return Update(update.chosen.put(vectors, at.table), update.chosen, written), states

    def sizes(self, update: Update, table: Units) -> Ints:
        """Return the bytes of the magnitude and of a bit for every sign."""
        return VALUE_BYTES * (1 + update.chosen.fixed(table)) + -(-update.chosen.numbers(table) // 8)

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the same, of what is asked for."""
        return numbers, units, VALUE_BYTES * (1 + len(table.fixed)) + -(-numbers // 8)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the magnitude, and the numbers that are always sent."""
        return np.array([update.coded[place][0], *fixed_values(update, place, table)], "<f4").tobytes()

    def back(self, update: Update, place: int, table: Units) -> bytes:
        """Write the signs."""
        signs: bytes = update.coded[place][1]
        return signs

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the magnitude."""
        floats = np.frombuffer(reading.take(VALUE_BYTES * (1 + reading.chosen.fixed(table))), "<f4").astype(np.float32)
        if not 0 <= floats[0] < np.inf:
            raise PayloadError("a mean magnitude must be finite and at least 0")
        reading.notes["mean"], reading.notes["fixed"] = floats[0], floats[1:]

    def read_back(self, reading: Reading, table: Units) -> None:
        """Read the signs."""
        count, mean = int(reading.chosen.numbers(table)[0]), reading.notes["mean"]
        bits = np.unpackbits(np.frombuffer(reading.take(-(-count // 8)), np.uint8), bitorder="little")
        if bits[count:].any():
            raise PayloadError("a padding bit of the signs is set")
        signed = np.where(bits[:count] > 0, -mean, mean).astype(np.float32)
        reading.values = torch.from_numpy(np.concatenate([signed, reading.notes["fixed"]]))

    def encoding(self, inner: int) -> int:
        """Return that of sparse and ternary payloads."""
        return 6 if inner == 5 else COMPOSED


def blocks_of(masks: Sequence[bytes], table: Units) -> ChosenBlocks:
    """Return the sub-models of these packed units."""
    units = [unpack_mask(mask, table) for mask in masks]
    stacked = {layer.name: torch.stack([own[layer.name] for own in units]) for layer in table.layers}
    return ChosenBlocks(stacked, element_masks(stacked, table))


def split_mask(flags: Tensor, table: Units) -> Mask:
    """Return the booleans of all units, one after the other, by layer."""
    parts = torch.split(flags, [layer.units for layer in table.layers])
    return dict(zip((layer.name for layer in table.layers), parts, strict=True))


def _complement(mask: Mapping[str, Tensor]) -> Mask:
    return {name: ~kept for name, kept in mask.items()}


def _choose_once(stage: Stage, below: Sequence[Stage]) -> None:
    other = [type(one).__name__ for one in below if getattr(one, "chooses", False) or one.codes_values]
    if other:
        raise ValueError(f"{type(stage).__name__} cannot come after {other[0]}, which chooses or writes the numbers")


def _write_once(stage: Stage, below: Sequence[Stage]) -> None:
    other = [type(one).__name__ for one in below if one.codes_values]
    if other:
        raise ValueError(f"{type(stage).__name__} cannot come after {other[0]}: numbers are written once")


def _elements(counted: Any, table: Units) -> dict[str, Tensor]:
    """Return which elements count, as stacks of their own shapes; counted: masks of units, or of elements."""
    if set(counted) == {slot.name for slot in table.slots}:
        return dict(counted)
    clients = len(next(iter(counted.values())))
    found = {slot.name: torch.zeros(clients, *slot.shape) for slot in table.fixed}
    for layer in table.layers:
        for slot in layer.slots:
            each = slot.elements // layer.units
            found[slot.name] = slot.tensors(counted[layer.name].unsqueeze(2).expand(-1, -1, each).contiguous().float())
    return found


def _scale_of(chosen: Any, table: Units) -> NDArray[np.int64]:
    """Return for every number of a payload of units which of the units' scales is its own."""
    places, first = [], 0
    for layer in table.layers:
        units = int(chosen.masks[layer.name].sum())
        for slot in layer.slots:
            places.append(first + np.repeat(np.arange(units), slot.elements // layer.units))
        first += units
    return np.concatenate(places)


def _noise(rng: np.random.Generator | None, count: int) -> NDArray[np.uint16]:
    if rng is None:
        return np.full((1, count), 2**15, np.uint16)
    raw = rng.bit_generator.random_raw(-(-count // 4))
    return np.asarray(raw, "<u8").view("<u2")[:count].reshape(1, count)


def _rounded_differences(
    numbers: Differences,
    masks: Mask,
    units: Units,
    bits: int,
    rngs: Sequence[np.random.Generator] | None,
) -> dict[str, Tensor]:
    """Round the differences of the units that are sent, some at a time so that they stay in the cache; zero elsewhere.

    The same numbers as of `Bits._encode_units`, without working out what nobody sends.
    """
    after, base = numbers.after, numbers.base
    clients = len(after[units.slots[0].name])
    noise = draw_noise(rngs, clients, units)
    found = {slot.name: after[slot.name] - base.model[slot.name] for slot in units.fixed}
    for layer in units.layers:
        rows_of = [slot.stacked_rows(after[slot.name]).flatten(0, 1) for slot in layer.slots]
        known = [_rows_behind(slot, base) for slot in layer.slots]
        whole = [torch.zeros(rows.shape) for rows in rows_of]
        chosen = masks[layer.name].flatten().nonzero().squeeze(1)
        # Of each client's units, the row of the model, or of the reference behind it where the client was sent nothing.
        base_of = chosen % layer.units
        if base.received is not None:
            base_of = base_of + layer.units * ~base.received[layer.name].flatten()[chosen]
        step = units_at_once(rows_of)
        for begin in range(0, len(chosen), step):
            part, own_base = chosen[begin : begin + step], base_of[begin : begin + step]
            difference = [
                rows.index_select(0, part).sub_(behind.index_select(0, own_base))
                for rows, behind in zip(rows_of, known, strict=True)
            ]
            drawn = [noise[slot.name].take(part.numpy(), axis=0) for slot in layer.slots]
            scale, codes = round_units(difference, drawn, bits)
            for rows, own in zip(whole, codes, strict=True):
                rows.index_copy_(0, part, own.mul_(scale.unsqueeze(1)))
        for slot, rows in zip(layer.slots, whole, strict=True):
            found[slot.name] = slot.tensors(rows.view(clients, layer.units, -1))
    return found


def _rows_behind(slot: Slot, base: Base) -> Tensor:
    """Return a tensor's units in the model, and behind them those in the reference."""
    models = [base.model] if base.reference is None else [base.model, base.reference]
    return torch.cat([slot.stacked_rows(values[slot.name][None])[0] for values in models])
