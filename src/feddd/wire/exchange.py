"""What travels from a client to the server: a chain of stages, run by the simulator and by a deployment alike.

A stage is one idea with both halves. The client runs `encode` of all stages in their order, the server `decode` in
reverse. Numbers stay tensors; bytes are written and read only where there is a wire.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.streams import stream
from feddd.core.units import Mask, Params, Units
from feddd.wire.chosen import Chosen, Ints, everything, one, some
from feddd.wire.format import (
    HEADER_BYTES,
    VALUE_BYTES,
    PayloadError,
    check_head,
    composed_head,
    payload_head,
    unpack_mask,
)

ClientState = dict[str, Tensor]
"""What a client keeps between rounds: tensors by name."""
Each = Mapping[str, Sequence[Any]]
"""The fields of a stage in which the clients of a stack differ: a value for each of them."""
COMPOSED = 7
"""The value encoding of a chain that has none of its own."""


@dataclass(frozen=True)
class Known:
    """A download as both ends know it, for one width of model; tensors without an axis for clients.

    sent: the values as clients decode them    server: the server's own, where they are not rounded
    reference: what both ends hold where nothing was sent, None if there is no such model
    replaced: the reference before this round
    """

    sent: Params
    server: Params
    reference: Params | None = None
    replaced: Params | None = None


@dataclass(frozen=True)
class At:
    """Where a stack of clients stands in a round: all that a stage may look at besides the numbers themselves.

    clients, round, seed, purpose: the addresses of random numbers
    masks: the packed units that each client was sent in this round, None for all
    before, after: W and Ŵ, stacks; only at the clients    coverage: CR(k) by layer, None if models are equal
    wire: bytes are about to be written, so that codes are needed and not only what they stand for
    """

    table: Units
    clients: Sequence[int]
    round: int
    seed: int
    known: Known
    masks: Sequence[bytes | None] = ()
    before: Params = field(default_factory=dict)
    after: Params = field(default_factory=dict)
    coverage: Mapping[str, Tensor] | None = None
    wire: bool = False
    purpose: str = ""

    @cached_property
    def received(self) -> Mask | None:
        """Return the units that each client was sent in this round, stacked; None if all were sent all."""
        if all(mask is None for mask in self.masks):
            return None
        whole = self.table.full_mask()
        own = [whole if mask is None else unpack_mask(mask, self.table) for mask in self.masks]
        return {layer.name: torch.stack([mask[layer.name] for mask in own]) for layer in self.table.layers}

    def rngs(self, purpose: str) -> list[np.random.Generator]:
        """Return every client's own generator for a purpose in this round."""
        if self.purpose:
            return [stream(self.seed, self.purpose, self.round)]
        return [stream(self.seed, purpose, self.round, client) for client in self.clients]

    def only(self, fine: NDArray[np.bool_]) -> At:
        """Return where some of the clients stand."""
        return dataclasses.replace(
            self,
            clients=[client for client, ok in zip(self.clients, fine, strict=True) if ok],
            masks=[mask for mask, ok in zip(self.masks, fine, strict=True) if ok],
            before=some(self.before, fine),
            after=some(self.after, fine),
        )


@dataclass(frozen=True)
class Update:
    """The numbers of a stack of clients on their way through a chain.

    values: as the server will have them, as far as the stages so far decide; finite everywhere
    chosen: which of them travel    coded: how they are written, for the stage that writes them; None as they are
    """

    values: Params
    chosen: Chosen
    coded: Any = None


@dataclass
class Reading:
    """What the stages have read of one client's payload so far."""

    data: memoryview
    chosen: Chosen
    notes: dict[str, Any] = field(default_factory=dict)
    values: Tensor | None = None

    def take(self, size: int) -> memoryview:
        """Return the next bytes; PayloadError if there are not so many."""
        if not 0 <= size <= len(self.data):
            raise PayloadError(f"the payload ends {size - len(self.data)} bytes too early")
        part, self.data = self.data[:size], self.data[size:]
        return part


class Stage:
    """One idea of what travels, with both its halves. Subclasses are frozen dataclasses and override what they need.

    `each` names the fields in which clients of one stack may differ; a stage gets them as lists over the clients. A
    payload is the header, every stage's `front`, then every stage's `back`; whoever reads it knows the chain.
    """

    each: ClassVar[tuple[str, ...]] = ()
    chooses: ClassVar[bool] = False
    """Whether the stage decides which numbers travel; without one all of them do."""
    splits_units: ClassVar[bool] = False
    """Whether some numbers of a unit may travel without the others."""

    @property
    def needs_coverage(self) -> bool:
        """Return whether the stage looks at how many clients have a unit."""
        return False

    codes_values: ClassVar[bool] = False
    """Whether the stage writes the numbers itself; without one they travel as float32."""
    lasting: ClassVar[bool] = False
    """Whether what a client keeps for this stage matters also after a full download."""
    needs_base: ClassVar[bool] = False
    """Whether the server has to know all that the client begins a round with."""

    def check(self, below: Sequence[Stage]) -> None:
        """Refuse, with a ValueError, a place in a chain where the stage makes no sense; below: the stages before it."""

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Do the client's half; the values are then what the server will decode."""
        return update, states

    def remember(self, states: list[ClientState], owed: Update, arrived: Update, at: At) -> list[ClientState]:
        """Return what the clients keep, now that the chain has run; owed: as it left this stage, arrived: its end."""
        return states

    def decode(self, update: Update, at: At) -> Update:
        """Do the server's half."""
        return update

    def sizes(self, update: Update, table: Units) -> Ints | int:
        """Return the bytes that this stage writes for each client."""
        return 0

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int] | None:
        """Return numbers, units and bytes behind this stage before anything is trained; None if nobody can know.

        numbers, units: how many reach the stage
        """
        return numbers, units, 0

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the first half of this stage's part of a client's payload."""
        return b""

    def back(self, update: Update, place: int, table: Units) -> bytes:
        """Write the second half."""
        return b""

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read what `front` wrote, and refuse what it was not asked to write."""

    def read_back(self, reading: Reading, table: Units) -> None:
        """Read what `back` wrote."""

    def check_asked(self, chosen: Chosen, table: Units) -> None:
        """Refuse, with a PayloadError, numbers that nobody asked for."""

    def encoding(self, inner: int) -> int:
        """Return the number of the payload's value encoding, if the stages before it have this one."""
        return inner

    def narrowed(self, update: Update, wide: Units, narrow: Units) -> Update:
        """Return what a narrower model has of what this stage has written for a wide one."""
        raise ValueError(f"{type(self).__name__} writes for one width of model only")


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which a client runs them."""

    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        for place, stage in enumerate(self.stages):
            stage.check(self.stages[:place])

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What clients must have in common to run as one stack: everything but the stages' `each`."""
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
        if self.encoding != COMPOSED:
            return payload_head(table, self.encoding)
        return composed_head(table, COMPOSED, zlib.crc32(self.name.encode()) & 0xFFFF)


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
    total = np.full(len(chosen.packed(table)), HEADER_BYTES, np.int64)
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


def fixed_values(update: Update, place: int, table: Units) -> NDArray[np.float32]:
    """Return the numbers of a client that are always sent."""
    if not update.chosen.fixed(table):
        return np.empty(0, np.float32)
    own = one(update.values, place)
    return np.array([float(own[slot.name]) for slot in table.fixed], np.float32)


def mask_bytes(table: Units) -> int:
    """Return the size of a mask on the wire: a bit for every unit, in whole words."""
    return -(-table.total_units // 32) * 4


def _settings(stage: Stage) -> tuple[Any, ...]:
    return tuple(
        _by_name(getattr(stage, own.name))
        for own in dataclasses.fields(stage)  # type: ignore[arg-type]  # stages are dataclasses
        if own.name not in stage.each
    )


def _by_name(setting: Any) -> Any:
    """Return a function as its import path, which is the same in every process; anything else as it is."""
    return f"{setting.__module__}:{setting.__qualname__}" if isinstance(setting, FunctionType) else setting
