"""Answers of faulty clients on their way to the server: really encoded, damaged, and checked as a deployment does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from feddd.core.payload import VALUE_BYTES, PayloadError, encode, fixed_bytes, pack_mask, unpack_mask
from feddd.core.quantise import FLOAT_BITS
from feddd.core.streams import stream
from feddd.core.units import Mask, Params, Units
from feddd.simulation.differences import Sent
from feddd.simulation.faults import GONE
from feddd.strategies.checks import Limits, Refused, check_payload, check_told, check_version
from feddd.strategies.protocol import Task, Upload
from feddd.strategies.reference import bases, received

ABSENT = ("lost", GONE, "late")
"""Clients that never send anything; what they would have trained is of no use."""
BLOCK_BYTES = 64
"""So many bytes of a corrupted payload are random."""


@dataclass(frozen=True)
class FaultyTask(Task):
    """A task whose answer will not be what it should: the engine's knowledge, not the strategy's.

    fault: one of `faults.ANSWERS` or ABSENT
    """

    fault: str = ""
    lie_factor: float = 1.0


def fault_of(task: Task) -> str:
    """What is wrong with a task's answer; "" for nothing."""
    return task.fault if isinstance(task, FaultyTask) else ""


@dataclass(frozen=True)
class Wire:
    """Some trained clients and what the server makes of what they send; stacks, [clients] first.

    after: Ŵ    arrived: the values of the uploads    sent: what they were sent, which differences are taken to
    """

    after: Params
    arrived: Params
    masks: Mask
    sent: Sent
    units: Units


@dataclass(frozen=True)
class Answer:
    """What a client sends: the round it answers, what it says, and its payload."""

    round: int
    told: Upload
    data: bytes


def receive_answers(
    seed: int, number: int, tasks: Sequence[Task], uploads: Sequence[Upload], wire: Wire
) -> list[Upload]:
    """What the server knows of some trained clients; of an answer that it refused, why.

    uploads: what it would know without faults
    A damaged payload that passes the checks counts: what it holds is written into the stacks.
    """
    known = list(uploads)
    for place, (task, upload) in enumerate(zip(tasks, uploads, strict=True)):
        if not isinstance(task, FaultyTask):
            continue
        if task.fault == "crashed":
            known[place] = Upload(upload.client, "lost", download_bytes=upload.download_bytes)
            continue
        found = answer(seed, number, task, place, upload, wire)
        try:
            known[place], mask, values = read_answer(found, task, number, wire)
        except (Refused, PayloadError) as error:
            known[place] = Upload(
                upload.client,
                f"refused: {error}",
                upload_bytes=len(found.data),
                download_bytes=upload.download_bytes,
            )
            continue
        if task.fault == "corrupted":  # in bytes that no check can tell from good ones
            if wire.sent.server is not None:
                values = values + wire.units.take(_base(wire, wire.sent.server, task), mask)
            stack = {name: one[place] for name, one in wire.arrived.items()}
            wire.units.put(stack, mask, values.to(next(iter(stack.values())).device))
            for name, units in mask.items():
                wire.masks[name][place].copy_(units)
    return known


def answer(seed: int, number: int, task: FaultyTask, place: int, upload: Upload, wire: Wire) -> Answer:
    """One client's answer, wrong in the way that the task's fault says."""
    table, bits, told = wire.units, wire.sent.bits, upload
    values = {name: stack[place].cpu() for name, stack in wire.after.items()}
    if bits != FLOAT_BITS:
        base = _base(wire, wire.sent.model, task)
        values = {slot.name: values[slot.name] - base[slot.name] for slot in table.slots}
    mask = {name: rows[place] for name, rows in wire.masks.items()}
    if task.fault == "replayed" and number > 1:
        # Of the old payload only the size matters: the round that it belongs to gives it away.
        number -= 1
        mask = table.full_mask() if task.download is None else unpack_mask(task.download, table)
    elif task.fault == "wrong_model":
        table = replace(table, layers=tuple(replace(layer, name=f"other.{layer.name}") for layer in table.layers))
        mask = {f"other.{name}": kept for name, kept in mask.items()}
    elif task.fault == "lying":
        factor = task.lie_factor
        samples, loss = max(1, round(factor * told.samples)), factor * told.train_loss
        told = replace(told, samples=samples, train_loss=loss, oort_statistic=factor * told.oort_statistic)
    data = encode(values, mask, units=table, bits=bits, rng=stream(seed, "rounding", number, task.client))
    return Answer(number, told, damage(data, task.fault, table, stream(seed, "faults", number, task.client)))


def damage(data: bytes, fault: str, table: Units, rng: np.random.Generator) -> bytes:
    """The payload with random bytes throughout or in one block, or with a number that is none."""
    if fault == "garbage":
        return rng.bytes(len(data))
    if fault == "corrupted":
        block = rng.bytes(min(BLOCK_BYTES, len(data)))
        start = int(rng.integers(len(data) - len(block) + 1))
    elif fault == "non_finite":
        block = np.float32(rng.choice([np.nan, np.inf, -np.inf])).tobytes()
        # In every encoding float32 numbers follow the mask, at least one for each layer.
        first = fixed_bytes(table) - VALUE_BYTES * len(table.fixed)
        start = first + VALUE_BYTES * int(rng.integers(len(table.layers)))
    else:
        return data
    return data[:start] + block + data[start + len(block) :]


def read_answer(found: Answer, task: Task, number: int, wire: Wire) -> tuple[Upload, Mask, Tensor]:
    """What the server believes of an answer; Refused or PayloadError if nothing."""
    told = found.told
    check_version(str(found.round), str(number))
    check_told(told.samples, told.train_loss, told.oort_statistic, told.label_coverage, Limits())
    mask, values = check_payload(found.data, task, wire.units, Limits(), wire.sent.bits)
    return replace(told, mask=pack_mask(mask, wire.units), upload_bytes=len(found.data)), mask, values


def _base(wire: Wire, model: Params, task: Task) -> dict[str, Tensor]:
    """The model where a client was sent it, the reference elsewhere."""
    if wire.sent.reference is None:
        raise ValueError("differences need a reference")
    base = bases(model, wire.sent.reference, received([task], wire.units), wire.units)
    return {name: stack[0].cpu() for name, stack in base.items()}
