"""Which trainer a model gets: a static rule, so that the same experiment always gives the same bits.

- "stacked": chains of convolutions, pooling and linear layers, with gradients written out; small models in stacks of
  clients, large ones one client at a time;
- "batched": autograd over stacks of clients, for other small models of dense layers (see `batched`);
- "channels_last": autograd for other models with two-dimensional convolutions, one client at a time, pixels' channels
  together;
- "reference": autograd for every other model, one client at a time; with one thread for each worker that is also the
  fast way for recurrent layers, whose kernels are torch's own. It is also the oracle: before a run the other three have
  to agree with it on a first few steps (see `proof`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from feddd.core.units import Params, Units
from feddd.simulation.batched import batch_trainer, check_batched
from feddd.simulation.stacked import Unfit, chain, stack_trainer
from feddd.simulation.training import Local, Samples, Train, Trained, Training, own_modes, train
from feddd.wire.local import Stepping
from feddd.world.dataset import Dataset
from feddd.world.objectives import Objective

STACK = 12
"""Clients in one stack, at most: more did not pay, and every one costs memory for its parameters and activations."""
SMALL = 200_000
"""Models with more parameters keep a core busy alone; several at once were slower (CNN2, 587,194)."""


@dataclass(frozen=True)
class Trainer:
    """train: some clients from W to Ŵ, both stacks of the tensors of the layer table    clients: how many at most"""

    train: Train
    clients: int


@dataclass(frozen=True)
class Choice:
    """A trainer's name, and why it is not a faster one; "" for the fastest."""

    name: str
    reason: str = ""


def choose_trainer(model: nn.Module, optimizer: str = "sgd", obstacle: str = "") -> Choice:
    """Return the trainer for this model; it depends on its layers, who makes the steps, the loss and the kind of data.

    obstacle: why the loss or the data allow autograd only, see `obstacle_of`
    """
    try:
        check_steps(optimizer)
        if obstacle:
            raise Unfit(obstacle)
        chain(model)
    except Unfit as error:
        return _by_autograd(model, optimizer, str(error))
    return Choice("stacked")


def obstacle_of(data: Dataset, objective: Objective) -> str:
    """Return why samples and loss are not those that "stacked" has gradients for; "" if they are."""
    if objective.loss != "cross-entropy":
        return f"it is for the loss cross-entropy, not for {objective.loss!r}"
    if isinstance(data.train_inputs, dict):
        return "it takes one input, the samples have several"
    if data.train_inputs.dtype.kind not in "f" and data.train_inputs.dtype != np.uint8:
        return f"it takes floats or bytes, the inputs are {data.train_inputs.dtype}"
    return "" if data.train_targets.ndim == 1 else "a sample has several targets"


def _by_autograd(model: nn.Module, optimizer: str, reason: str) -> Choice:
    """Return the trainer for a model that is no chain, for this reason."""
    if convolves(model):
        return Choice("channels_last", reason)
    try:
        check_steps(optimizer)
        check_batched(model)
    except Unfit as error:
        also = "" if str(error) == reason else f", and {error}"
        return Choice("reference", f"{reason}{also}")
    return Choice("batched", reason)


def check_steps(optimizer: str) -> None:
    """Refuse to train clients in stacks by an optimiser of the user's own: it knows one model."""
    if ":" in optimizer:
        raise Unfit(f"optimizer {optimizer!r} takes one client at a time")


def convolves(model: nn.Module) -> bool:
    """Return whether the model has two-dimensional convolutions, which like a pixel's channels together."""
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def make_trainer(model: nn.Module, table: Units, name: str) -> Trainer:
    """Return a trainer by name; the two that train one client at a time use the model as their workbench."""
    if name in ("stacked", "channels_last"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs do not know it
    if name == "stacked":
        try:
            network = chain(model)
        except Unfit as error:
            raise ValueError(
                f'trainer "stacked" does not fit this model: {error}; use "auto" or "reference"'
            ) from error
        small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL
        return Trainer(stack_trainer(network), STACK if small else 1)
    if name == "batched":
        try:
            check_batched(model)
        except Unfit as error:
            raise ValueError(
                f'trainer "batched" does not fit this model: {error}; use "auto" or "reference"'
            ) from error
        return Trainer(batch_trainer(model, table), 2 * STACK)
    return Trainer(_one_by_one(model, table), 1)


def _one_by_one(model: nn.Module, table: Units) -> Train:
    tensors, modes = model.state_dict(), own_modes(model)
    carried = {slot.name for slot in table.slots} | {alias for alias, _ in table.aliases}
    # Counters and the like are no part of what clients exchange: everybody starts from the same.
    initial = {name: tensor.clone() for name, tensor in tensors.items() if name not in carried}

    def run(
        before: Params,
        samples: Samples,
        clients: Sequence[Local],
        training: Training,
        rules: Sequence[Stepping] = (),
    ) -> Trained:
        after = {slot.name: torch.empty_like(before[slot.name]) for slot in table.slots}
        losses: list[Tensor] = []
        for place, client in enumerate(clients):
            for name, tensor in initial.items():
                tensors[name].copy_(tensor)
            for slot in table.slots:
                tensors[slot.name].copy_(before[slot.name][place])
            own = [one.only(slice(place, place + 1)) for one in rules]
            losses.append(train(model, samples, client, training, modes, own).double())
            for slot in table.slots:
                after[slot.name][place].copy_(tensors[slot.name])
        mean = torch.stack([each.mean() for each in losses])
        mean_square = torch.stack([each.square().mean() for each in losses])
        return Trained(after, mean.cpu().numpy(), mean_square.sqrt().cpu().numpy())

    return run
