"""What travels from the server to the clients: values, a sub-model, or moves of a reference that both ends hold.

Differences need a base that both ends know: the reference. It is the initial model at first. What goes down is the
server's model as a coded difference to it; in a broadcast everybody is sent all of it, and the reference moves to
what was sent. So a move is coded once for everybody, and errors do not add up: the next difference is taken from the
server's own, unrounded model. A client that has missed some moves is sent them all, or the reference itself if that
is less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.stacks import put_stack
from feddd.core.units import Params, Units
from feddd.wire.chosen import ChosenUnits, one
from feddd.wire.exchange import EVERYTHING, Chain, chain, encode, payload_sizes, read, write
from feddd.wire.format import pack_mask, unit_payload_sizes, unpack_mask, unpack_masks
from feddd.wire.select import MASK, OWN, Blocks, Given, blocks_of
from feddd.wire.stage import At, ClientState, Known, Update


@dataclass(frozen=True)
class Values:
    """The server's values as they are: all of a client's model, or the units of a packed mask, which it sent last."""

    mask: bytes | None = None

    @property
    def shared(self) -> tuple[Any, ...]:
        """Return what all downloads of a round must have in common: nothing."""
        return ()

    @property
    def known(self) -> bool:
        """Return whether the server knows all that the client begins the round with."""
        return self.mask is None

    @property
    def sub_model(self) -> bytes | None:
        """Return the units of the sub-model that is sent: it is not one."""
        return None

    @property
    def builds_on_last(self) -> bool:
        """Return whether the download builds on what the client kept of its last upload."""
        return self.mask is not None

    def whole(self) -> Values:
        """Return the same for a client that holds nothing that a mask could build on."""
        return dataclasses.replace(self, mask=None)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to run as one stack."""
        return ("values",)

    @property
    def line(self) -> Chain:
        """Return the chain that writes the values."""
        return chain() if self.mask is None else chain(Given(self.mask))

    def local(
        self, stack: dict[str, Tensor], downs: Sequence[Any], states: Sequence[ClientState], table: Units
    ) -> None:
        """Turn what clients were sent into the models that they train: their own values where they were sent none."""
        if all(down.mask is None for down in downs):
            return
        nothing, empty = torch.zeros(table.total_units, dtype=torch.bool), torch.empty(0)
        unsent = [
            nothing if down.mask is None else ~_sent_units(down.mask, state, table)
            for down, state in zip(downs, states, strict=True)
        ]
        parts = torch.split(torch.stack(unsent), [layer.units for layer in table.layers], 1)
        masks = {layer.name: part for layer, part in zip(table.layers, parts, strict=True)}
        own = [empty if down.mask is None else state.get(OWN, empty) for down, state in zip(downs, states, strict=True)]
        put_stack(table, stack, masks, own)


@dataclass(frozen=True)
class SubModel:
    """The server's values of a sub-model: some units with the rows and columns between them; mask: packed."""

    mask: bytes | None

    @property
    def shared(self) -> tuple[Any, ...]:
        """Return what all downloads of a round must have in common: nothing."""
        return ()

    @property
    def known(self) -> bool:
        """Return whether the server knows all that the client begins the round with: zeros are not what it has."""
        return False

    @property
    def sub_model(self) -> bytes | None:
        """Return the units of the sub-model."""
        return self.mask

    @property
    def builds_on_last(self) -> bool:
        """Return whether the download builds on what the client kept: it does not."""
        return False

    def whole(self) -> SubModel:
        """Return the same: it builds on nothing."""
        return self

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to run as one stack."""
        return ("sub-model",)

    @property
    def line(self) -> Chain:
        """Return the chain that writes the values."""
        return chain(Blocks(self.mask or b""))

    def local(
        self, stack: dict[str, Tensor], downs: Sequence[Any], states: Sequence[ClientState], table: Units
    ) -> None:
        """Leave of every client's model what it was sent, and zero elsewhere.

        With all weights into and out of a unit at zero, a rectified network computes what it would without the unit,
        and its gradients keep them there.
        """
        chosen = blocks_of([down.mask or b"" for down in downs], table)
        for name, values in stack.items():
            values.mul_(chosen.elements[name].to(values.device))


@dataclass(frozen=True)
class Moves(Values):
    """The server's values as a difference to the reference; see `Values` for the mask.

    coding: how the difference is written    broadcast: the reference moves to what is sent
    """

    coding: Chain = EVERYTHING
    broadcast: bool = False

    @property
    def shared(self) -> tuple[Any, ...]:
        """Return what all downloads of a round must have in common: the move."""
        return self.coding, self.broadcast

    @property
    def known(self) -> bool:
        """Whether the server knows all that the client begins the round with: where nothing is sent, the reference."""
        return True

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to run as one stack."""
        return ("moves", self.coding.kind)


Down = Values | SubModel | Moves


@dataclass(frozen=True)
class Reference:
    """The model that differences are taken to.

    number: how often it has moved    held: the number of the one that each client holds, −1 for none
    sizes: what each move took in bytes, where that depends on what was moved
    """

    model: Mapping[str, Tensor]
    number: int
    held: NDArray[np.int64]
    sizes: tuple[int, ...] = ()

    def grow(self, clients: int) -> Reference:
        """Return it with room for so many clients; new ones hold none."""
        more = np.full(max(0, clients - len(self.held)), -1)
        return dataclasses.replace(self, held=np.append(self.held, more))


@dataclass(frozen=True)
class Sending:
    """What goes down in a round, to whoever takes part.

    server: the server's own values    sent: what clients decode    before, reference: the reference before and during
    the round, None if values travel as they are    coding, coded: of the difference, None if there is none
    """

    server: Params
    sent: Params
    before: Reference | None = None
    reference: Reference | None = None
    coding: Chain = EVERYTHING
    coded: Update | None = None

    @property
    def moves(self) -> bool:
        """Return whether the reference becomes what is sent."""
        if self.before is None or self.reference is None:
            return False
        return self.coded is None or self.reference.number > self.before.number

    def missed(self, down: Down, client: int, table: Units) -> int | None:
        """Return how many moves of the reference a client is sent later; None if it is sent all of it instead."""
        if self.before is None or self.coded is None or self.before.held[client] < 0:
            return None
        held, number = int(self.before.held[client]), self.before.number
        late = sum(self._move_bytes(one, table) for one in range(held + 1, number + 1))
        own = self._own_bytes(down, table)
        whole = whole_bytes(table) + (0 if self.moves else own)
        return None if late + own > whole else number - held

    def download_bytes(self, down: Down, client: int, table: Units) -> int:
        """Return the size of one client's download: its payload, and what brings its reference up to date."""
        if self.before is None:
            size = down.line.planned_bytes(table)
            assert size is not None
            return size
        missed = self.missed(down, client, table)
        own = 0 if self.coded is None else self._own_bytes(down, table)
        if missed is None:
            return whole_bytes(table) + (0 if self.moves else own)
        number = self.before.number
        return own + sum(self._move_bytes(one, table) for one in range(number - missed + 1, number + 1))

    def payload(self, down: Down, table: Units, wide: Units) -> bytes:
        """Write a client's coded difference; wide: the layer table of the global model."""
        assert self.coded is not None
        return write(self.coding_of(down), _for_client(self.coding, self.coded, down, table, wide), 0, table)

    def coding_of(self, down: Down) -> Chain:
        """Return the chain that a client reads its difference with."""
        return coding_of(self.coding, down.mask)

    def _own_bytes(self, down: Down, table: Units) -> int:
        planned = self.coding_of(down).planned_bytes(table)
        if planned is None:
            assert self.reference is not None
            return self.reference.sizes[-1]
        return planned

    def _move_bytes(self, number: int, table: Units) -> int:
        planned = self.coding.planned_bytes(table)
        if planned is None:
            assert self.reference is not None
            return self.reference.sizes[number - 1]
        return planned


def download_sizes(
    sending: Sending, downs: Sequence[Down], clients: Sequence[int], tables: Sequence[Units]
) -> list[int]:
    """Return what every client's download takes; tables: of each of them."""
    if sending.before is not None or any(down.sub_model is not None for down in downs):
        return [
            sending.download_bytes(down, client, table)
            for down, client, table in zip(downs, clients, tables, strict=True)
        ]
    sizes = [0] * len(downs)
    for table in {id(table): table for table in tables}.values():
        places = [place for place, own in enumerate(tables) if own is table]
        full = pack_mask(table.full_mask(), table)
        masks = [full if (mask := downs[place].mask) is None else mask for place in places]
        for place, size in zip(places, unit_payload_sizes(masks, table).tolist(), strict=True):
            sizes[place] = size
    return sizes


def whole_bytes(table: Units) -> int:
    """Return the size of a whole model as it is."""
    size = chain().planned_bytes(table)
    assert size is not None
    return size


def coding_of(coding: Chain, mask: bytes | None) -> Chain:
    """Return the chain of a difference of which a client is sent some units only; None for all."""
    return coding if mask is None else Chain((Given(mask), *coding.stages))


def _for_client(coding: Chain, coded: Update, down: Down, table: Units, wide: Units) -> Update:
    if table is not wide:
        for stage in coding.stages:
            coded = stage.narrowed(coded, wide, table)
    if down.mask is None:
        return coded
    return dataclasses.replace(coded, chosen=ChosenUnits(unpack_masks([down.mask], table)))


def prepare(
    downs: Sequence[Down],
    model: Params,
    reference: Reference | None,
    clients: int,
    table: Units,
    *,
    round: int,
    seed: int,
) -> Sending:
    """Return what the server sends in a round; downs: of the tasks, clients: how many there are."""
    moves = next((down for down in downs if isinstance(down, Moves)), None)
    if moves is None:
        return Sending(model, model)
    if reference is None:
        first = Reference(model, 0, np.full(clients, -1))
        return Sending(model, model, first, first, moves.coding)
    difference = {slot.name: (model[slot.name] - reference.model[slot.name])[None] for slot in table.slots}
    known = Known(model, model)
    at = At(table, [0], round, seed, known, after=difference, wire=True, purpose="download")
    coded, _ = encode([moves.coding], [{}], at)
    sent = dict(model) | moved(reference.model, one(coded.values, 0), table)
    after = reference
    if moves.broadcast:
        sizes = reference.sizes
        if moves.coding.planned_bytes(table) is None:
            sizes = (*sizes, int(payload_sizes(moves.coding, coded, table)[0]))
        after = Reference(sent, reference.number + 1, reference.held, sizes)
    return Sending(model, sent, reference, after, moves.coding, coded)


def moved(reference: Params, difference: Params, table: Units) -> dict[str, Tensor]:
    """Return the values behind a difference; the same sum, to the bit, at both ends."""
    found = {slot.name: reference[slot.name].float() + difference[slot.name] for slot in table.slots}
    return found | {alias: found[name] for alias, name in table.aliases}


def reference_after(sent: Sending, trained: Sequence[int]) -> Reference | None:
    """Return the reference after a round; trained: the clients that have it now."""
    if sent.reference is None:
        return None
    held: NDArray[np.int64] = sent.reference.held.copy()
    held[list(trained)] = sent.reference.number
    return dataclasses.replace(sent.reference, held=held)


def _sent_units(mask: bytes, state: ClientState, table: Units) -> Tensor:
    """Return a mask as booleans, one for every unit; a client that sent something has them already."""
    return state[MASK] if MASK in state else torch.cat(list(unpack_mask(mask, table).values()))


def over_the_wire(downs: Sequence[Down], sent: Params, table: Units) -> dict[str, Tensor]:
    """Return what clients decode of the values they are sent, really written and read; zero where nothing is sent."""
    stack = {slot.name: sent[slot.name].cpu()[None] for slot in table.slots}
    found = []
    for down in downs:
        at = At(table, [0], 0, 0, Known(sent, sent), after=stack, wire=True)
        update, _ = encode([down.line], [{}], at)
        found.append(read(down.line, write(down.line, update, 0, table), table))
    return {name: torch.cat([own.values[name] for own in found]) for name in stack}
