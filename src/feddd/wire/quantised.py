"""Stages that write numbers in a few bits; without one of them a number is a float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.submodel import slice_model
from feddd.core.units import Layer, Mask, Slot, Units
from feddd.wire.chosen import ChosenUnits, Ints, everything, one
from feddd.wire.difference import Base, Deferred, Differences
from feddd.wire.format import VALUE_BYTES, PayloadError
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
from feddd.wire.stage import COMPOSED, At, ClientState, Each, Reading, Stage, Update, fixed_values


@dataclass(frozen=True)
class Bits(Stage):
    """Write numbers in a few bits: whole numbers times a scale, one for each unit, or one for all single numbers.

    bits: 8, 4 or 2    rounding: "random" goes up or down so that the mean is right, "nearest" is for error feedback
    """

    bits: int = 8
    rounding: Literal["random", "nearest"] = "random"

    codes_values: ClassVar[bool] = True

    def check(self) -> None:
        """Refuse a number of bits that there is not."""
        greatest_code(self.bits)
        if self.rounding not in ("random", "nearest"):
            raise ValueError(f'rounding must be "random" or "nearest", not {self.rounding!r}')

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Round the numbers that are sent."""
        rngs = at.rngs("rounding") if self.rounding == "random" else None
        if isinstance(update.chosen, ChosenUnits):
            if isinstance(update.values, Differences) and not at.wire:
                values = _RoundedDifferences(update.values, update.chosen.masks, at.table, self.bits, rngs)
                return dataclasses.replace(update, values=values), states
            return self.rounded(update, at.table, rngs), states
        written, vectors = [], []
        for place in range(len(states)):
            vector = update.chosen.take(update.values, place, at.table)
            noise = _noise(None if rngs is None else rngs[place], len(vector))
            scale, (whole,) = round_units([vector[None]], [noise], self.bits)
            written.append((scale.numpy(), pack_codes(whole[0].numpy(), self.bits)))
            vectors.append(whole[0] * scale)
        return Update(update.chosen.put(vectors, at.table), update.chosen, written), states

    def rounded(self, update: Update, table: Units, rngs: Sequence[np.random.Generator] | None) -> Update:
        """Round whole units, each with a scale of its own."""
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
            if isinstance(reading.chosen, ChosenUnits):
                _times_scales(values, scales, reading.chosen, table)
            else:
                values *= scales[0]
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


def _times_scales(values: NDArray[np.float32], scales: NDArray[np.float32], chosen: ChosenUnits, table: Units) -> None:
    """Multiply the numbers of a payload of units by the scales of their units, in place."""
    start = first = 0
    for layer in table.layers:
        units = int(chosen.masks[layer.name].sum())
        own = scales[first : first + units, None]
        first += units
        for slot in layer.slots:
            each = slot.elements // layer.units
            values[start : start + each * units].reshape(units, each)[...] *= own
            start += each * units


def _noise(rng: np.random.Generator | None, count: int) -> NDArray[np.uint16]:
    if rng is None:
        return np.full((1, count), 2**15, np.uint16)
    raw = rng.bit_generator.random_raw(-(-count // 4))
    return np.asarray(raw, "<u8").view("<u2")[:count].reshape(1, count)


class _RoundedDifferences(Deferred):
    """The rounded differences of the units that are sent, zero elsewhere, worked out when they are asked for.

    The same numbers as of `Bits.rounded`, without working out what nobody sends, and some units at a time so that
    they stay in the cache, together with what the server adds to them.
    """

    def __init__(
        self,
        numbers: Differences,
        masks: Mask,
        units: Units,
        bits: int,
        rngs: Sequence[np.random.Generator] | None,
    ) -> None:
        self._numbers, self._masks, self._units, self._bits = numbers, masks, units, bits
        self._noise = draw_noise(rngs, len(numbers.after[units.slots[0].name]), units)

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        """Return the differences themselves."""
        return self._worked_out(None)

    def plus(self, base: Base) -> dict[str, Tensor]:
        """Return the differences with the server's own values added to them."""
        return self._worked_out(base)

    def _worked_out(self, server: Base | None) -> dict[str, Tensor]:
        units, (after, base) = self._units, (self._numbers.after, self._numbers.base)
        found = {slot.name: after[slot.name] - base.model[slot.name] for slot in units.fixed}
        if server is not None:
            found = {name: own + server.model[name] for name, own in found.items()}
        for layer in units.layers:
            rows = self._layer_rows(layer, server)
            for slot, own in zip(layer.slots, rows, strict=True):
                found[slot.name] = slot.tensors(own.view(-1, layer.units, own.shape[1]))
        return found

    def _layer_rows(self, layer: Layer, server: Base | None) -> list[Tensor]:
        """Return the units of all clients in one row after the other, by tensor."""
        after, base = self._numbers.after, self._numbers.base
        rows_of = [slot.stacked_rows(after[slot.name]).flatten(0, 1) for slot in layer.slots]
        at_client = [_rows_behind(slot, base) for slot in layer.slots]
        at_server = [None if server is None else _rows_behind(slot, server) for slot in layer.slots]
        whole = [torch.zeros(rows.shape) for rows in rows_of]
        chosen = self._masks[layer.name].flatten().nonzero().squeeze(1)
        # Of each client's units, the row of the model, or of the reference behind it where the client was sent nothing.
        base_of = chosen % layer.units
        if base.received is not None:
            base_of = base_of + layer.units * ~base.received[layer.name].flatten()[chosen]
        step = units_at_once(rows_of)
        for begin in range(0, len(chosen), step):
            part, known = chosen[begin : begin + step], base_of[begin : begin + step]
            difference = [
                rows.index_select(0, part).sub_(behind.index_select(0, known))
                for rows, behind in zip(rows_of, at_client, strict=True)
            ]
            drawn = [self._noise[slot.name].take(part.numpy(), axis=0) for slot in layer.slots]
            scale, codes = round_units(difference, drawn, self._bits)
            for rows, own, behind in zip(whole, codes, at_server, strict=True):
                own.mul_(scale.unsqueeze(1))
                rows.index_copy_(0, part, own if behind is None else own.add_(behind.index_select(0, known)))
        return whole


def _rows_behind(slot: Slot, base: Base) -> Tensor:
    """Return a tensor's units in the model, and behind them those in the reference."""
    models = [base.model] if base.reference is None else [base.model, base.reference]
    return torch.cat([slot.stacked_rows(values[slot.name][None])[0] for values in models])
