"""Differences need a base that both ends know: the reference, a model that server and clients hold alike.

It is the initial model at first. What goes down is the server's model as a rounded difference to it; in a broadcast
everybody is sent all of it, and the reference moves to what was sent. So the code of a unit is the same for every
client, is worked out once a round, and errors do not add up: the next difference is taken from the server's own,
unrounded model. What goes up is a rounded difference to what the client was just sent, and to the reference where it
was sent nothing; the server adds it to its own values in place of what it sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.blocks import block_bytes
from feddd.core.payload import coverage_size, most_bytes, payload_sizes, unpack_mask
from feddd.core.quantise import FLOAT_BITS, Coded, dequantise, quantise
from feddd.core.streams import stream
from feddd.core.submodel import slice_model
from feddd.core.units import Mask, Units
from feddd.strategies.protocol import Plan, Reference, ServerState, Task, Upload


@dataclass(frozen=True)
class Sending:
    """What goes down in a round.

    model: the values that clients are sent    before, reference: the reference before and during the round, None if
    values travel as they are    coded: the difference of the two, None if there is none
    """

    bits: int
    model: Mapping[str, Tensor]
    before: Reference | None = None
    reference: Reference | None = None
    coded: Coded | None = None

    def download_bytes(self, task: Task, table: Units) -> int:
        """Of one client: its payload, CR(k) if it is told, and what it takes to bring its reference up to date."""
        return self._payload_bytes(task, table) + (coverage_size(table) if task.coverage else 0)

    def _payload_bytes(self, task: Task, table: Units) -> int:
        if task.submodel is not None:
            return block_bytes(unpack_mask(task.submodel, table), table)
        mask = [task.download] if task.download is not None else None
        if self.before is None or self.reference is None:
            return int(payload_sizes(mask, table)[0]) if mask else most_bytes(table)
        own = int(payload_sizes(mask, table, self.bits)[0]) if mask else most_bytes(table, self.bits)
        missed = self.missed(task.client, table)
        if missed is not None:
            return own + missed * most_bytes(table, self.bits)
        # Where the reference is sent as it is, a broadcast has nothing to add to it.
        return most_bytes(table) + (0 if self.moves else own)

    @property
    def moves(self) -> bool:
        """Whether the reference becomes what is sent."""
        if self.before is None or self.reference is None:
            return False
        return self.coded is None or self.reference.number > self.before.number

    def missed(self, client: int, table: Units) -> int | None:
        """How many moves of the reference a client is sent later; None if it is sent all of the reference instead."""
        if self.before is None or self.coded is None or self.before.held[client] < 0:
            return None
        behind = self.before.number - int(self.before.held[client])
        return None if behind * most_bytes(table, self.bits) >= most_bytes(table) else behind


def sending(state: ServerState, plan: Plan, table: Units, seed: int) -> Sending:
    """What the server sends in a round of this plan."""
    if plan.bits == FLOAT_BITS:
        return Sending(plan.bits, state.model)
    if state.reference is None:
        first = Reference(state.model, 0, np.full(len(state.masks), -1))
        return Sending(plan.bits, state.model, first, first)
    reference = state.reference
    difference = {slot.name: state.model[slot.name] - reference.model[slot.name] for slot in table.slots}
    coded = quantise(difference, table, plan.bits, stream(seed, "download", plan.round))
    sent = dict(state.model) | moved(reference.model, coded, table)
    after = Reference(sent, reference.number + 1, reference.held) if plan.broadcast else reference
    return Sending(plan.bits, sent, reference, after, coded)


def moved(reference: Mapping[str, Tensor], coded: Coded, table: Units) -> dict[str, Tensor]:
    """The values behind a coded difference; the same sum, to the bit, at both ends."""
    difference = dequantise(coded, table)
    moved = {slot.name: reference[slot.name].float() + difference[slot.name] for slot in table.slots}
    return moved | {alias: moved[name] for alias, name in table.aliases}


def received(tasks: Sequence[Task], units: Units) -> Mask | None:
    """The units that each client was sent in this round, stacked; None if all were sent all."""
    if all(task.download is None for task in tasks):
        return None
    everything = units.full_mask()
    own = [everything if task.download is None else unpack_mask(task.download, units) for task in tasks]
    return {layer.name: torch.stack([mask[layer.name] for mask in own]) for layer in units.layers}


def bases(
    model: Mapping[str, Tensor], reference: Mapping[str, Tensor], received: Mask | None, units: Units
) -> dict[str, Tensor]:
    """The model where a client was sent it in this round, the reference elsewhere: a stack, of one if all are alike."""
    stack = {slot.name: model[slot.name][None] for slot in units.slots}
    if received is None:
        return stack
    for layer in units.layers:
        sent = received[layer.name].unsqueeze(2)
        for slot in layer.slots:
            new, old = (slot.stacked_rows(values[slot.name][None]) for values in (model, reference))
            stack[slot.name] = slot.tensors(torch.where(sent.to(new.device), new, old))
    return stack


def narrowed(coded: Coded, wide: Units, narrow: Units) -> Coded:
    """What a sub-model has of a coded difference: the same codes, the same scales."""
    scales = {layer.name: coded.scales[layer.name][: layer.units] for layer in narrow.layers}
    return Coded(slice_model(coded.codes, wide, narrow), scales)


def reference_after(sent: Sending, uploads: Sequence[Upload]) -> Reference | None:
    """The reference after a round: those that trained have it."""
    reference = sent.reference
    if reference is None:
        return None
    held: NDArray[np.int64] = reference.held.copy()
    for upload in uploads:
        if upload.status in ("ok", "diverged"):
            held[upload.client] = reference.number
    return replace(reference, held=held)
