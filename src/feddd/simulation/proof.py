"""Proof that a fast trainer trains the user's model: its first steps against those of autograd, on real samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from feddd.core.streams import stream
from feddd.core.units import units
from feddd.simulation.samples import make_samples
from feddd.simulation.trainers import Choice, check_steps, choose_trainer, convolves, make_trainer
from feddd.simulation.training import Local, Trained, Training
from feddd.world.dataset import Dataset
from feddd.world.objectives import CLASSIFICATION, Objective

TOLERANCE = 1e-3
"""How far the change of a tensor may be from autograd's, relative to its size: sums in another order differ by about
1e-6, and whatever is really another model by far more."""
ROUNDING = 1e-6
"""What float32 cannot tell apart, relative to the size of the tensor itself."""
STEADY_LEARNING_RATE = 0.05
"""A larger learning rate would let the differences of rounding grow."""


@dataclass(frozen=True)
class Trial:
    """What a trainer is tried on.

    build: makes the model, always with the same weights    part: one client's sample numbers
    """

    build: Callable[[], nn.Module]
    data: Dataset
    part: NDArray[np.int64]
    objective: Objective = CLASSIFICATION


def settle_trainer(
    model: nn.Module, training: Training, trial: Trial | None, obstacle: str = ""
) -> tuple[Training, str]:
    """Replace "auto" by the fastest trainer that trains this very model; also return why it is not a faster one.

    A trainer that was asked for by name is refused with a ValueError where it does not fit.
    trial: None to believe what an earlier trial has found    obstacle: why the data or the loss allow autograd only
    """
    if obstacle and training.trainer == "stacked":
        raise ValueError(f'trainer "stacked" does not fit: {obstacle}; use "auto" or "reference"')
    choice = Choice(training.trainer)
    if training.trainer == "auto":
        choice = choose_trainer(model, training.optimizer, obstacle)
    if choice.name in ("stacked", "batched"):
        check_steps(training.optimizer)
    settled = dataclasses.replace(training, trainer=choice.name)
    make_trainer(model, units(model), choice.name)
    found = disagreement(trial, settled) if trial and choice.name != "reference" else None
    if found is None:
        return settled, choice.reason
    if training.trainer != "auto":
        raise ValueError(f'trainer "{choice.name}" does not fit this model: {found}; use "auto" or "reference"')
    return dataclasses.replace(training, trainer="reference"), f'with "{choice.name}" {found}'


def disagreement(trial: Trial, training: Training) -> str | None:
    """Train one client for a batch and a half both ways; return what differs, or None if nothing does.

    By plain SGD, whatever the optimiser: it is the gradients that may differ, and Adam would make much of little ones.
    """
    build, part = trial.build, trial.part
    part = part[: training.batch_size + max(1, training.batch_size // 2)]
    steady = min(training.learning_rate, STEADY_LEARNING_RATE)
    training = dataclasses.replace(training, epochs=1, learning_rate=steady, optimizer="sgd")
    before = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    # Stacks by autograd have a second client, with fewer samples: how its batches are filled up must not matter.
    counts = [len(part), max(1, len(part) // 2)] if training.trainer == "batched" else [len(part)]
    expected = _trained(trial, part, counts, dataclasses.replace(training, trainer="reference"))
    try:
        found = _trained(trial, part, counts, training)
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        return f"it fails with {' '.join(str(error).split())}"
    for name, after in expected.after.items():
        start = before[name].to(after.device)
        apart = float((found.after[name] - after).norm())
        if not apart <= TOLERANCE * float((after - start).norm()) + ROUNDING * float(start.norm()):
            return f"it trains {name!r} otherwise than autograd does"
    if not np.allclose(found.mean_loss, expected.mean_loss, rtol=TOLERANCE, equal_nan=True):
        return "its loss is not that of autograd"
    return None


def _trained(trial: Trial, part: NDArray[np.int64], counts: Sequence[int], training: Training) -> Trained:
    """Train the model as a worker does, from its own weights; counts: the samples of each client, from the first on."""
    model = trial.build()
    together = training.trainer != "reference" and convolves(model)
    samples, _ = make_samples(trial.data, part, trial.objective, channels_last=together, device=training.device)
    table = units(model.to(training.device))
    trainer = make_trainer(model, table, training.trainer)
    tensors = model.state_dict()
    stack = {slot.name: tensors[slot.name].clone(memory_format=torch.contiguous_format)[None] for slot in table.slots}
    stack = {name: own.repeat_interleave(len(counts), 0) for name, own in stack.items()}
    clients = [Local(0, count, stream(0, "proof", *[place][:place])) for place, count in enumerate(counts)]
    return trainer.train(stack, samples, clients, training)
