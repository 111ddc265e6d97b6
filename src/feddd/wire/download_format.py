"""Downloads as bytes: what a server writes for one client, and what that client makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from feddd.core.submodel import slice_model
from feddd.core.units import Params, Units
from feddd.wire.chosen import flat, one, unflat
from feddd.wire.difference import RESIDUAL
from feddd.wire.down import Down, Moves, Sending, coding_of, moved, whole_bytes
from feddd.wire.exchange import EVERYTHING, Chain, encode, read, write
from feddd.wire.format import PayloadError
from feddd.wire.select import MASK, OWN
from feddd.wire.stage import At, ClientState, Known, Update

PAYLOAD, REFERENCE, MOVE = "payload", "reference", "move"
"""The parts of a download, by name; moves have their number behind it."""
HELD, HELD_NUMBER = "reference", "reference-number"
"""What a client keeps of the reference."""
TOLD_COVERAGE = "coverage"
"""CR(k), which the server tells once in a run: what clients of different widths keep of it."""
MOVES_KEPT = 16
"""Of the reference; with two bits a value, all of it costs as much as so many."""


@dataclass(frozen=True)
class Basis:
    """What the reference in a download is: its number, after so many missed moves, or whole if all of it is sent."""

    number: int = 0
    missed: int = 0
    whole: bool = False


@dataclass(frozen=True)
class Received:
    """A download at the client: the model to train, what both ends know of it, and what the client holds now."""

    local: dict[str, Tensor]
    known: Known
    state: ClientState


def own_model(model: Params, wide: Units, table: Units) -> Params:
    """Return what a width of model has of the global one."""
    return model if table is wide else slice_model(model, wide, table)


def known_at_server(sending: Sending, wide: Units, table: Units) -> Known:
    """Return the download of one width of model as the server knows it."""
    reference = sending.reference.model if sending.reference else None
    return Known(
        own_model(sending.sent, wide, table),
        own_model(sending.server, wide, table),
        None if reference is None else own_model(reference, wide, table),
    )


def write_download(
    sending: Sending, down: Down, client: int, table: Units, wide: Units, moves: Mapping[int, Update]
) -> tuple[dict[str, bytes], Basis]:
    """Return a client's payloads by name, and what they build on; moves: of the reference, as far as still known."""
    if sending.before is None or sending.reference is None:
        return {PAYLOAD: _write_values(down.line, own_model(sending.sent, wide, table), table)}, Basis()
    number, missed = sending.before.number, sending.missed(down, client, table)
    numbers = range(number - (missed or 0) + 1, number + 1)
    payloads: dict[str, bytes] = {}
    whole = missed is None or any(one not in moves for one in numbers)
    if whole:
        there = sending.reference if sending.moves else sending.before
        number, missed = there.number, 0
        payloads[REFERENCE] = _write_values(EVERYTHING, own_model(there.model, wide, table), table)
    else:
        for one_number in numbers:
            update = moves[one_number]
            for stage in sending.coding.stages if table is not wide else ():
                update = stage.narrowed(update, wide, table)
            payloads[f"{MOVE}.{one_number}"] = write(sending.coding, update, 0, table)
    if sending.coded is not None and not (whole and sending.moves):
        payloads[PAYLOAD] = sending.payload(down, table, wide)
    return payloads, Basis(number, missed or 0, whole)


def read_download(
    payloads: Mapping[str, bytes], down: Down, basis: Basis, state: ClientState, table: Units, *, moves: bool
) -> Received | None:
    """Return what a client makes of its download; None if that builds on something that it does not hold.

    moves: the reference becomes what is sent
    """
    state, replaced = dict(state), held_reference(state, table)
    if not isinstance(down, Moves):
        values = one(read(down.line, payloads[PAYLOAD], table).values, 0)
        known = Known(_finite(values), values)
    else:
        held = _brought_up(payloads, down.coding, basis, state, table)
        if held is None:
            return None
        values, number = held, basis.number
        if PAYLOAD in payloads:
            line = coding_of(down.coding, down.mask)
            values = moved(held, _finite(one(read(line, payloads[PAYLOAD], table).values, 0)), table)
            number += int(moves)
        state |= _as_held(values if moves else held, number, table)
        known = Known(values, values, values, replaced)
    local = {slot.name: values[slot.name].clone()[None] for slot in table.slots}
    down.local(local, [down], [state], table)
    return Received(one(local, 0), known, state)


def held_reference(state: ClientState, table: Units) -> dict[str, Tensor] | None:
    """Return the reference that a client holds; None if it holds none."""
    return one(unflat(state[HELD][None], table), 0) if HELD in state else None


def is_sound(state: ClientState, table: Units) -> bool:
    """Return whether what was read from a disk can be what a client of this model keeps."""
    whole = (table.elements,)
    fine = all(bool(tensor.isfinite().all()) for tensor in state.values() if tensor.is_floating_point())
    fine &= all(state[name].shape == whole and _is_float(state[name]) for name in (RESIDUAL, HELD) if name in state)
    fine &= (MASK in state) == (OWN in state) and (HELD in state) == (HELD_NUMBER in state)
    if HELD_NUMBER in state:
        fine &= state[HELD_NUMBER].dtype == torch.int64 and state[HELD_NUMBER].shape == (1,)
    if TOLD_COVERAGE in state:
        told = state[TOLD_COVERAGE]
        fine &= told.dtype == torch.float64 and told.shape == (table.total_units,)
        fine &= bool(((told > 0) & (told <= 1)).all())
    if not fine or MASK not in state:
        return fine
    mask, own = state[MASK], state[OWN]
    if mask.dtype != torch.bool or mask.shape != (table.total_units,) or not _is_float(own):
        return False
    parts = torch.split(~mask, [layer.units for layer in table.layers])
    unsent = sum(int(part.sum()) * layer.unit_elements for part, layer in zip(parts, table.layers, strict=True))
    return own.shape == (unsent,)


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


def most_upload_bytes(line: Chain, table: Units) -> int:
    """Return more bytes than any upload of this chain has."""
    planned = line.planned_bytes(table)
    whole = whole_bytes(table)
    return max(planned, whole) if planned is not None else 2 * whole + table.elements


def _write_values(line: Chain, model: Params, table: Units) -> bytes:
    stack = {slot.name: model[slot.name].detach().cpu()[None] for slot in table.slots}
    update, _ = encode([line], [{}], At(table, [0], 0, 0, Known(model, model), after=stack, wire=True))
    return write(line, update, 0, table)


def _brought_up(
    payloads: Mapping[str, bytes], coding: Chain, basis: Basis, state: ClientState, table: Units
) -> dict[str, Tensor] | None:
    """Return the reference that a payload refers to; None if it cannot be made from what the client holds."""
    if basis.whole:
        return _finite(one(read(EVERYTHING, payloads[REFERENCE], table).values, 0))
    held = held_reference(state, table)
    if held is None or not basis.number - basis.missed <= int(state[HELD_NUMBER]) <= basis.number:
        return None
    for number in range(int(state[HELD_NUMBER]) + 1, basis.number + 1):
        held = moved(held, _finite(one(read(coding, payloads[f"{MOVE}.{number}"], table).values, 0)), table)
    return held


def _as_held(model: Params, number: int, table: Units) -> ClientState:
    whole = flat({slot.name: model[slot.name][None] for slot in table.slots}, table)[0]
    return {HELD: whole, HELD_NUMBER: torch.tensor([number])}


def _finite(values: dict[str, Tensor]) -> dict[str, Tensor]:
    if not all(bool(tensor.isfinite().all()) for tensor in values.values()):
        raise PayloadError("the payload holds a value that is not finite")
    return values
