"""A client's copy of the reference that differences are taken to, and how a message brings it up to date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from feddd.wire.format import PayloadError, decode, decode_values, most_bytes
from feddd.core.units import Mask, Params, Units
from feddd.flower.names import RecordDict
from feddd.flower.records import MOVE, PAYLOAD, REFERENCE, Order, read_payload


@dataclass(frozen=True)
class Held:
    """number: how often the reference had moved when it was this one."""

    model: Mapping[str, Tensor]
    number: int


def brought_up(held: Held | None, content: RecordDict, order: Order, table: Units, like: Params) -> Held | None:
    """The reference that a message's payload refers to; None if it cannot be made from what the client holds."""
    if order.whole:
        model, mask = decode(read_payload(content, most_bytes(table), REFERENCE), like, units=table, finite=True)
        if not all(bool(kept.all()) for kept in mask.values()):
            raise PayloadError("the reference is not whole")
        return Held(model, order.reference)
    if held is None or not order.reference - order.missed <= held.number <= order.reference:
        return None
    for number in range(held.number + 1, order.reference + 1):
        model, _ = applied(held, read_payload(content, most_bytes(table, order.bits), f"{MOVE}.{number}"), order, table)
        held = Held(model, number)
    return held


def received(held: Held, content: RecordDict, order: Order, table: Units) -> tuple[dict[str, Tensor], Mask, Held]:
    """The download: its values, with the reference where nothing came, its mask, and the reference from now on."""
    if order.whole and order.broadcast:
        return dict(held.model), table.full_mask(), held
    data = read_payload(content, most_bytes(table, order.bits), PAYLOAD)
    model, mask = applied(held, data, order, table)
    return model, mask, Held(model, held.number + 1) if order.broadcast else held


def applied(held: Held, data: bytes, order: Order, table: Units) -> tuple[dict[str, Tensor], Mask]:
    """The reference with a coded difference added to it; the same sum, to the bit, as at the server."""
    mask, values = decode_values(data, table, order.bits)
    if not bool(values.isfinite().all()):
        raise PayloadError("the payload holds a value that is not finite")
    difference = table.zeros_like(held.model)
    table.put(difference, mask, values)
    model = {slot.name: held.model[slot.name].float() + difference[slot.name] for slot in table.slots}
    return model | {alias: model[name] for alias, name in table.aliases}, mask
