"""What travels from a client to the server: a chain of stages, run by the simulator and by a deployment alike.

A stage is one idea with both halves. The client runs `encode` of all stages in their order, the server `decode` in
reverse. Numbers stay tensors; bytes are written and read only where there is a wire.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feddd.core.units import Params, Units
from feddd.wire.chosen import Chosen, Ints, everything, some
from feddd.wire.format import (
    HEADER_BYTES,
    VALUE_BYTES,
    PayloadError,
    check_head,
    mask_bytes,
    payload_head,
    unpack_mask,
)
from feddd.wire.stage import COMPOSED, At, ClientState, Reading, Stage, Update, fixed_values


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which a client runs them."""

    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        for place, stage in enumerate(self.stages):
            _check_place(stage, self.stages[:place])
            stage.check()

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to run as one stack: everything but the stages' `each`."""
        return tuple((type(stage), *_settings(stage)) for stage in self.stages)

    @cached_property
    def name(self) -> str:
        """Return the kind in words, for messages and for telling payloads apart."""
        return " → ".join(f"{type(stage).__name__}{_settings(stage)}" for stage in self.stages) or "everything"

    @property
    def splits_units(self) -> bool:
        """Return whether some numbers of a unit may travel without the others."""
        return any(stage.splits_units for stage in self.stages)

    @property
    def lasting(self) -> bool:
        """Return whether clients keep something that matters also after a full download."""
        return any(stage.lasting for stage in self.stages)

    @property
    def needs_coverage(self) -> bool:
        """Return whether a stage looks at how many clients have a unit."""
        return any(stage.needs_coverage for stage in self.stages)

    @property
    def needs_base(self) -> bool:
        """Return whether the server has to know all that the client begins a round with."""
        return any(stage.needs_base for stage in self.stages)

    @property
    def sub_model(self) -> bytes | None:
        """Return the units of the sub-model that is sent; None if it is not one."""
        return next((stage.mask for stage in self.stages if hasattr(stage, "mask") and stage.splits_units), None)

    @property
    def chooses(self) -> bool:
        """Return whether a stage decides which numbers travel."""
        return any(stage.chooses for stage in self.stages)

    @property
    def codes_values(self) -> bool:
        """Return whether a stage writes the numbers in a way of its own."""
        return any(stage.codes_values for stage in self.stages)

    @property
    def dropout(self) -> float:
        """Return the share of the model that is not sent, as far as it is asked for: D_n."""
        return next((float(stage.dropout) for stage in self.stages if hasattr(stage, "dropout")), 0.0)

    def planned_bytes(self, table: Units) -> int | None:
        """Return the size of a payload before anything is trained; None if that depends on the numbers."""
        numbers, units, total = table.droppable_elements, table.total_units, HEADER_BYTES
        if not self.chooses:
            total += mask_bytes(table)
        for stage in self.stages:
            found = stage.planned(table, numbers, units)
            if found is None:
                return None
            numbers, units, size = found
            total += size
        return total if self.codes_values else total + VALUE_BYTES * (numbers + len(table.fixed))

    @cached_property
    def encoding(self) -> int:
        """Return the value encoding of the chain's payloads."""
        number = 0
        for stage in self.stages:
            number = stage.encoding(number)
        return number

    def head(self, table: Units) -> bytes:
        """Return the header of the chain's payloads."""
        tag = zlib.crc32(self.name.encode()) & 0xFFFF if self.encoding == COMPOSED else 0
        return payload_head(table, self.encoding, tag)


EVERYTHING = Chain()
"""All numbers, as they are."""


def chain(*stages: Stage) -> Chain:
    """Return the stages as a chain: ``chain(Difference(), Select(0.4), Bits(4))``."""
    return Chain(stages)


@dataclass(frozen=True)
class Arrived:
    """What the server makes of the uploads of a stack of clients.

    values: stacks    chosen: what of them was sent    sizes: of the payloads in bytes, [clients]
    """

    values: Params
    chosen: Chosen
    sizes: Ints

    def only(self, fine: NDArray[np.bool_]) -> Arrived:
        """Return what arrives of some of the clients."""
        return Arrived(some(self.values, fine), self.chosen.only(fine), self.sizes[fine])


def encode(chains: Sequence[Chain], states: Sequence[ClientState], at: At) -> tuple[Update, list[ClientState]]:
    """Run the clients' half for a stack of clients with chains of one kind; what they send, and what they keep."""
    update = Update(at.after, everything(at.table, len(chains)))
    kept, left = [dict(state) for state in states], []
    for number, stage in enumerate(chains[0].stages):
        each = {name: [getattr(one.stages[number], name) for one in chains] for name in stage.each}
        update, kept = stage.encode(update, kept, at, each)
        left.append(update)
    for stage, owed in zip(chains[0].stages, left, strict=True):
        kept = stage.remember(kept, owed, update, at)
    return update, kept


def decode(line: Chain, update: Update, at: At) -> Arrived:
    """Run the server's half."""
    sizes = payload_sizes(line, update, at.table)
    for stage in reversed(line.stages):
        update = stage.decode(update, at)
    return Arrived(update.values, update.chosen, sizes)


def through_bytes(chains: Sequence[Chain], update: Update, table: Units) -> Update:
    """Return what the server reads, with every client's payload really written."""
    sent = [read(one, write(one, update, place, table), table) for place, one in enumerate(chains)]
    values = {name: torch.cat([own.values[name] for own in sent]) for name in sent[0].values}
    return dataclasses.replace(update, values=values)


def payload_sizes(line: Chain, update: Update, table: Units) -> Ints:
    """Return the bytes of every client's payload, without writing them."""
    chosen = update.chosen
    total = np.full(chosen.clients, HEADER_BYTES, np.int64)
    if not line.chooses:
        total += mask_bytes(table)
    for stage in line.stages:
        total += stage.sizes(update, table)
    if not line.codes_values:
        total += VALUE_BYTES * (chosen.numbers(table) + chosen.fixed(table))
    return total


def write(line: Chain, update: Update, place: int, table: Units) -> bytes:
    """Return one client's payload."""
    parts = [line.head(table)]
    if not line.chooses:
        parts.append(update.chosen.packed(table)[place])
    parts += [stage.front(update, place, table) for stage in line.stages]
    parts += [stage.back(update, place, table) for stage in line.stages]
    if not line.codes_values:
        vector = update.chosen.take(update.values, place, table).numpy()
        fixed = fixed_values(update, place, table)
        parts.append(np.concatenate([vector, fixed]).astype("<f4").tobytes())
    return b"".join(parts)


def read(line: Chain, data: bytes | memoryview, table: Units) -> Update:
    """Return what one client's payload holds, a stack of one; PayloadError for anything that `write` does not write."""
    check_head(data, line.head(table), table)
    reading = Reading(memoryview(data)[HEADER_BYTES:], everything(table, 1))
    if not line.chooses:
        mask = unpack_mask(bytes(reading.take(mask_bytes(table))), table)
        for layer in table.layers:
            if not bool(mask[layer.name].all()):
                sent = int(mask[layer.name].sum())
                raise PayloadError(f"{sent} units of layer {layer.name} came, and {layer.units} were asked for")
    for stage in sorted(line.stages, key=lambda stage: stage.codes_values):
        if stage.codes_values:
            _check_size(line, data, reading, table)
        stage.read_front(reading, table)
    _check_size(line, data, reading, table)
    for stage in line.stages:
        stage.read_back(reading, table)
    if reading.values is None:
        count = int(reading.chosen.numbers(table)[0]) + reading.chosen.fixed(table)
        values = np.frombuffer(reading.take(VALUE_BYTES * count), "<f4").astype(np.float32)
        reading.values = torch.from_numpy(values)
    if len(reading.data):
        raise PayloadError(f"the payload has {len(reading.data)} bytes more than its beginning announces")
    return Update(reading.chosen.put([reading.values], table), reading.chosen)


def _check_size(line: Chain, data: bytes | memoryview, reading: Reading, table: Units) -> None:
    """Refuse a payload of another size than its choice of numbers leads to, where that decides it."""
    if line.planned_bytes(table) is not None:
        expected = int(payload_sizes(line, Update({}, reading.chosen), table)[0])
        if len(data) != expected:
            raise PayloadError(f"the payload has {len(data)} bytes, its mask announces {expected}")


def _check_place(stage: Stage, before: Sequence[Stage]) -> None:
    """Refuse, with a ValueError, to choose numbers twice or after they were written, and to write them twice."""
    other = [type(one).__name__ for one in before if one.codes_values or (stage.chooses and one.chooses)]
    if stage.chooses and other:
        raise ValueError(f"{type(stage).__name__} cannot come after {other[0]}, which chooses or writes the numbers")
    if stage.codes_values and other:
        raise ValueError(f"{type(stage).__name__} cannot come after {other[0]}: numbers are written once")


def _settings(stage: Stage) -> tuple[Any, ...]:
    return tuple(
        _by_name(getattr(stage, own.name))
        for own in dataclasses.fields(stage)  # type: ignore[arg-type]  # stages are dataclasses
        if own.name not in stage.each
    )


def _by_name(setting: Any) -> Any:
    """Return a function as its import path, which is the same in every process; anything else as it is."""
    return f"{setting.__module__}:{setting.__qualname__}" if isinstance(setting, FunctionType) else setting
