"""Answers of faulty clients on their way to the server: really encoded, damaged, and checked as a deployment does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddd.core.streams import stream
from feddd.core.units import Units
from feddd.simulation.faults import GONE
from feddd.strategies.checks import Limits, Refused, check_told, check_version, read_upload
from feddd.strategies.protocol import Task, Upload
from feddd.wire.chosen import with_one
from feddd.wire.exchange import Arrived, Chain, decode, write
from feddd.wire.format import VALUE_BYTES, PayloadError, fixed_bytes, pack_mask
from feddd.wire.local import vector_bytes
from feddd.wire.select import Given
from feddd.wire.stage import At, Update

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
    """Return what is wrong with a task's answer; "" for nothing."""
    return task.fault if isinstance(task, FaultyTask) else ""


@dataclass(frozen=True)
class Answer:
    """What a client sends: the round it answers, what it says, and its payload."""

    round: int
    told: Upload
    data: bytes


def receive_answers(
    tasks: Sequence[Task], uploads: Sequence[Upload], update: Update, arrived: Arrived, at: At
) -> tuple[list[Upload], Arrived]:
    """Return what the server knows of some trained clients, and what it makes of their uploads; of refused ones, why.

    update: what they send    uploads, arrived: what the server has of it without faults
    A damaged payload that passes the checks counts, with what it holds.
    """
    known = list(uploads)
    for place, (task, upload) in enumerate(zip(tasks, uploads, strict=True)):
        if not isinstance(task, FaultyTask):
            continue
        if task.fault == "crashed":
            known[place] = Upload(upload.client, "lost", download_bytes=upload.download_bytes)
            continue
        found = answer(task, place, upload, update, at)
        try:
            known[place], sent = read_answer(found, task, at)
        except (Refused, PayloadError) as error:
            known[place] = Upload(
                upload.client,
                f"refused: {error}",
                upload_bytes=len(found.data) + vector_bytes(task.local, at.table),
                download_bytes=upload.download_bytes,
            )
            continue
        if task.fault == "corrupted":  # in bytes that no check can tell from good ones
            own = decode(task.up, sent, at.only(np.arange(len(tasks)) == place))
            values = with_one(arrived.values, place, own.values)
            arrived = Arrived(values, arrived.chosen.with_one(place, own.chosen), arrived.sizes)
    return known, arrived


def answer(task: FaultyTask, place: int, upload: Upload, update: Update, at: At) -> Answer:
    """Return one client's answer, wrong in the way that the task's fault says; update: what all of them send."""
    table, number, told, line = at.table, at.round, upload, task.up
    if task.fault == "replayed" and number > 1:
        # Of the old payload only the size matters: the round that it belongs to gives it away.
        size = upload_bytes(task, task.fault, number, table) - vector_bytes(task.local, table)
        return Answer(number - 1, told, bytes(size))
    if task.fault == "lying":
        factor = task.lie_factor
        samples, loss = max(1, round(factor * told.samples)), factor * told.train_loss
        told = replace(told, samples=samples, train_loss=loss, oort_statistic=factor * told.oort_statistic)
    data = write(line, update, place, table)
    if task.fault == "wrong_model":
        other = replace(table, layers=tuple(replace(layer, name=f"other.{layer.name}") for layer in table.layers))
        data = line.head(other) + data[len(line.head(table)) :]
    return Answer(number, told, damage(data, task.fault, table, stream(at.seed, "faults", number, task.client)))


def upload_bytes(task: Task, fault: str, number: int, table: Units) -> int:
    """Return the size of a task's upload; a replayed one is that of the last round, of the units that came back."""
    line = task.up
    if fault == "replayed" and number > 1 and line.sub_model is None:
        last = Given(task.down.mask if task.down.mask is not None else pack_mask(table.full_mask(), table))
        line = Chain((last, *(stage for stage in line.stages if not stage.chooses)))
    size = line.planned_bytes(table)
    assert size is not None
    return size + vector_bytes(task.local, table)


def damage(data: bytes, fault: str, table: Units, rng: np.random.Generator) -> bytes:
    """Return the payload with random bytes throughout or in one block, or with a number that is none."""
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


def read_answer(found: Answer, task: Task, at: At) -> tuple[Upload, Update]:
    """Return what the server believes of an answer; Refused or PayloadError if nothing."""
    told = found.told
    check_version(str(found.round), str(at.round))
    check_told(told.samples, told.train_loss, told.oort_statistic, told.label_coverage, Limits())
    update = read_upload(found.data, task, at.table, Limits())
    size = len(found.data) + vector_bytes(task.local, at.table)
    return replace(told, mask=update.chosen.packed(at.table)[0], upload_bytes=size), update
