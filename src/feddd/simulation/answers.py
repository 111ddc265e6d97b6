"""Answers of faulty clients on their way to the server: really encoded, damaged, and checked as a deployment does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from feddd.core.payload import PayloadError, encode, pack_mask, unpack_mask
from feddd.core.streams import stream
from feddd.core.units import Mask, Params, Units
from feddd.simulation.faults import GONE
from feddd.strategies.checks import Limits, Refused, check_payload, check_told, check_version
from feddd.strategies.protocol import Task, Upload

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
class Work:
    """One client after training: W, Ŵ, the mask it chose, and what the server would know of it without faults."""

    before: Params
    after: Params
    mask: Mask
    upload: Upload


@dataclass(frozen=True)
class Answer:
    """What a client sends: the round it answers, what it says, and its payload."""

    round: int
    told: Upload
    data: bytes


def answer(task: FaultyTask, number: int, work: Work, table: Units, rng: np.random.Generator) -> Answer:
    """The answer to a task, wrong in the way that its fault says."""
    own, mask, told = work.after, work.mask, work.upload
    if task.fault == "lying":
        factor = task.lie_factor
        samples, loss = max(1, round(factor * told.samples)), factor * told.train_loss
        told = replace(told, samples=samples, train_loss=loss, oort_statistic=factor * told.oort_statistic)
    elif task.fault == "non_finite":
        own, values = {name: tensor.clone() for name, tensor in own.items()}, table.take(own, mask)
        values[int(rng.integers(len(values)))] = float(rng.choice([np.nan, np.inf, -np.inf]))
        table.put(own, mask, values)
    elif task.fault == "replayed" and number > 1:
        old = table.full_mask() if task.download is None else unpack_mask(task.download, table)
        # Of the old payload only the size matters: the round that it belongs to gives it away.
        return Answer(number - 1, told, encode(work.before, old, units=table))
    elif task.fault == "wrong_model":
        other = replace(table, layers=tuple(replace(layer, name=f"other.{layer.name}") for layer in table.layers))
        return Answer(number, told, encode(own, {f"other.{name}": kept for name, kept in mask.items()}, units=other))
    return Answer(number, told, damage(encode(own, mask, units=table), task.fault, rng))


def damage(data: bytes, fault: str, rng: np.random.Generator) -> bytes:
    """The payload with random bytes throughout ("garbage") or in one block ("corrupted")."""
    if fault == "garbage":
        return rng.bytes(len(data))
    if fault == "corrupted":
        start = int(rng.integers(max(1, len(data) - BLOCK_BYTES + 1)))
        block = rng.bytes(min(BLOCK_BYTES, len(data)))
        return data[:start] + block + data[start + len(block) :]
    return data


def read_answer(found: Answer, task: Task, number: int, table: Units) -> tuple[Upload, Mask, Tensor]:
    """What the server believes of an answer; Refused or PayloadError if nothing."""
    check_version(str(found.round), str(number))
    told = found.told
    check_told(told.samples, told.train_loss, told.oort_statistic, told.label_coverage, Limits())
    mask, values = check_payload(found.data, task, table, Limits())
    return replace(told, mask=pack_mask(mask, table), upload_bytes=len(found.data)), mask, values


def receive_answers(
    seed: int,
    number: int,
    tasks: Sequence[Task],
    uploads: Sequence[Upload],
    stacks: tuple[Params, Params, Mask],
    table: Units,
) -> list[Upload]:
    """What the server knows of some trained clients; of an answer that it refused, why.

    uploads: what it would know without faults    stacks: W, Ŵ and masks, [clients] first
    A damaged payload that passes the checks counts: what it holds is written into the stacks.
    """
    known = list(uploads)
    for place, (task, upload) in enumerate(zip(tasks, uploads, strict=True)):
        if not isinstance(task, FaultyTask):
            continue
        if task.fault == "crashed":
            known[place] = Upload(upload.client, "lost", download_bytes=upload.download_bytes)
            continue
        before, after, mask = ({name: stack[place] for name, stack in one.items()} for one in stacks)
        work = Work(_on_cpu(before), _on_cpu(after), mask, upload)
        found = answer(task, number, work, table, stream(seed, "faults", number, task.client))
        try:
            known[place], arrived, values = read_answer(found, task, number, table)
        except (Refused, PayloadError) as error:
            known[place] = Upload(
                upload.client,
                f"refused: {error}",
                upload_bytes=len(found.data),
                download_bytes=upload.download_bytes,
            )
            continue
        if task.fault == "corrupted":  # in bytes that no check can tell from good ones
            table.put(after, arrived, values.to(next(iter(after.values())).device))
            for name, units in arrived.items():
                mask[name].copy_(units)
    return known


def _on_cpu(params: Params) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in params.items()}
