"""Models on their way to the clients, whole or as coded differences, and back: for every sub-model that there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from feddd.wire.format import encode, encode_coded, unpack_mask
from feddd.wire.quantise import Coded
from feddd.core.submodel import prefix, slice_model
from feddd.core.units import Mask, Units, frozen_digest, units
from feddd.flower.names import RecordDict
from feddd.flower.records import MOVE, PAYLOAD, REFERENCE, Order, write_payload
from feddd.strategies.protocol import Task
from feddd.strategies.reference import Sending, bases, narrowed, received

MOVES_KEPT = 16
"""Of the reference; with two bits a value, all of it costs as much as so many."""

Model = Mapping[str, Tensor]


def frozen_digests(model: Model, modules: Sequence[nn.Module]) -> list[str]:
    """Return for every sub-model what a client with the server's frozen parameters finds too."""
    digests = []
    for module in modules:
        table, own = units(module), module.state_dict()
        digests.append(frozen_digest({name: prefix(model[name], own[name].shape) for name in table.frozen}, table))
    return digests


class Downloads:
    """tables: the layer tables of the sub-models, the global one first"""

    def __init__(self, tables: Sequence[Units]) -> None:
        self._tables = tables
        self._moves: dict[int, Coded] = {}

    def part(self, model: Model, sub_model: int) -> Model:
        """What a sub-model has of the global model."""
        return slice_model(model, self._tables[0], self._tables[sub_model]) if sub_model else model

    def remember(self, sent: Sending) -> None:
        """Keep a move of the reference, for those that will have missed it."""
        if sent.coded is not None and sent.reference is not None and sent.moves:
            self._moves[sent.reference.number] = sent.coded
            self._moves.pop(sent.reference.number - MOVES_KEPT, None)

    def write(
        self, content: RecordDict, order: Order, sent: Sending, task: Task, sub_model: int, chunk: int
    ) -> tuple[Order, int]:
        """Put a client's payloads into a message; the order that goes with them, and their bytes."""
        table = self._tables[sub_model]
        mask = table.full_mask() if task.download is None else unpack_mask(task.download, table)
        if sent.before is None or sent.reference is None:
            payloads = {PAYLOAD: encode(self.part(sent.model, sub_model), mask, units=table)}
        else:
            payloads = {}
            number, missed = sent.before.number, sent.missed(task.client, table)
            numbers = range(number - (missed or 0) + 1, number + 1)
            whole = missed is None or any(one not in self._moves for one in numbers)
            if whole:
                there = sent.reference if sent.moves else sent.before
                number, missed = there.number, 0
                payloads[REFERENCE] = encode(self.part(there.model, sub_model), table.full_mask(), units=table)
            else:
                coded = {one: narrowed(self._moves[one], self._tables[0], table) for one in numbers}
                payloads = {
                    f"{MOVE}.{one}": encode_coded(move, table.full_mask(), table, sent.bits)
                    for one, move in coded.items()
                }
            if sent.coded is not None and not (whole and sent.moves):
                payloads[PAYLOAD] = encode_coded(narrowed(sent.coded, self._tables[0], table), mask, table, sent.bits)
            order = dataclasses.replace(
                order, bits=sent.bits, reference=number, missed=missed or 0, whole=whole, broadcast=sent.moves
            )
        for key, data in payloads.items():
            write_payload(content, data, chunk, key)
        return order, sum(map(len, payloads.values()))

    def arrived(
        self, values: Tensor, mask: Mask, sent: Sending, task: Task, server_model: Model, sub_model: int
    ) -> Model:
        """The dense values behind an upload; differences are added to the server's own values."""
        table, own = self._tables[sub_model], self.part(server_model, sub_model)
        dense = table.zeros_like(own)
        table.put(dense, mask, values)
        if sent.reference is None:
            return dense
        base = bases(own, self.part(sent.reference.model, sub_model), received([task], table), table)
        return {slot.name: base[slot.name][0] + dense[slot.name] for slot in table.slots}
