"""One idea of what travels, with both its halves, and what it may look at: the stages of a chain are made of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.streams import stream
from feddd.core.units import Mask, Params, Units
from feddd.wire.chosen import Chosen, Ints, one, some
from feddd.wire.format import PayloadError, pack_mask, unpack_masks

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
        whole = pack_mask(self.table.full_mask(), self.table)
        return unpack_masks([whole if mask is None else mask for mask in self.masks], self.table)

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

    def check(self) -> None:
        """Refuse, with a ValueError, settings that make no sense."""

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


def fixed_values(update: Update, place: int, table: Units) -> NDArray[np.float32]:
    """Return the numbers of a client that are always sent."""
    if not update.chosen.fixed(table):
        return np.empty(0, np.float32)
    own = one(update.values, place)
    return np.array([float(own[slot.name]) for slot in table.fixed], np.float32)
