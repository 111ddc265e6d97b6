"""Local training: what goes in and comes out, and the reference loop of one client, plain autograd and SGD by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.units import Params
from feddd.simulation.optimizers import own_optimizer
from feddd.wire.chosen import some
from feddd.wire.local import Rule, Scaler, Stepping, change_gradients
from feddd.world.objectives import CLASSIFICATION, Objective, apply

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Training:
    """How clients train: for so many epochs, by the trainer of this name, on this device of torch's.

    optimizer: "sgd", "adam", "adamw", or what makes one of torch's for a client's round, by import path
    max_gradient_norm: shorten longer gradients to this    learning_rate_later: (round, rate) pairs, from that round on
    learning_rate_decay: what the rate is multiplied by from round to round
    """

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.01
    trainer: str = "reference"
    device: str = "cpu"
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_gradient_norm: float | None = None
    learning_rate_later: tuple[tuple[int, float], ...] = ()
    learning_rate_decay: float = 1.0

    def in_round(self, number: int) -> Training:
        """Return the settings with the learning rate of a round; rounds count from 1."""
        begun = [self.learning_rate, *(rate for turn, rate in self.learning_rate_later if turn <= number)]
        return dataclasses.replace(self, learning_rate=begun[-1] * self.learning_rate_decay ** (number - 1))


@dataclass(frozen=True)
class Samples:
    """Everybody's data, one client after the other: inputs [samples, …], one tensor or several by name, and targets.

    scale, shift: a number or [channels, 1, 1], from bytes to what a network takes; None for what bytes always get
    """

    inputs: Tensor | dict[str, Tensor]
    targets: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    objective: Objective = CLASSIFICATION

    def taken(self, values: Tensor) -> Tensor:
        """Return what a network takes of some samples of an input."""
        if self.scale is not None and self.shift is not None:
            return values.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if values.dtype == torch.uint8:
            return values.to(torch.float32).div_(255.0)
        return values if values.is_floating_point() or values.dtype == torch.bool else values.long()

    def between(self, start: int, end: int) -> Tensor | dict[str, Tensor]:
        """Return what a network takes of neighbouring samples."""
        if isinstance(self.inputs, dict):
            return {name: self.taken(own[start:end]) for name, own in self.inputs.items()}
        return self.taken(self.inputs[start:end])

    def losses(self, model: nn.Module, chosen: Tensor) -> Tensor:
        """Return the loss of every sample of these numbers, [batch]."""
        targets = self.targets.index_select(0, chosen)
        return self.objective.losses(apply(model, gather(self, chosen)), targets)


@dataclass(frozen=True)
class Local:
    """A client about to train: where its samples lie, its generator, and what is different in its training."""

    first: int
    count: int
    rng: np.random.Generator
    rules: tuple[Rule, ...] = ()

    @property
    def width(self) -> float:
        """Return what the outputs of hidden layers are divided by while it trains."""
        return next((rule.width for rule in self.rules if isinstance(rule, Scaler)), 1.0)


@dataclass(frozen=True)
class Trained:
    """Some clients after training; everything but `after` is [clients].

    after: Ŵ, a stack    mean_loss: over all samples processed    oort_statistic: √(mean of squared sample losses)
    """

    after: dict[str, Tensor]
    mean_loss: Floats
    oort_statistic: Floats

    def only(self, chosen: NDArray[np.bool_]) -> Trained:
        """Return some of the clients."""
        return Trained(some(self.after, chosen), self.mean_loss[chosen], self.oort_statistic[chosen])

    def finite(self) -> NDArray[np.bool_]:
        """Return which clients may be counted: loss and weights are numbers."""
        fine = np.isfinite(self.mean_loss)
        for stack in self.after.values():
            rows = stack.flatten(1) if stack.dim() > 1 else stack[:, None]
            # A norm is a number only if all its values are; it may overflow where they do not, so ask again.
            if not np.isfinite(torch.linalg.vector_norm(rows, dim=1).cpu().numpy()).all():
                fine &= rows.isfinite().all(1).cpu().numpy()
        return fine


class Train(Protocol):
    """Train some clients from W to Ŵ, both stacks of the tensors of the layer table."""

    def __call__(
        self,
        before: Params,
        samples: Samples,
        clients: Sequence[Local],
        training: Training,
        rules: Sequence[Stepping] = (),
    ) -> Trained:
        """Return the trained clients; rules: that change their steps, at work on the same stack."""
        ...


def batches(samples: int, training: Training, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Return index arrays of a client's round: every epoch a new order, the last batch as short as it comes."""
    for _ in range(training.epochs):
        order = rng.permutation(samples)
        for start in range(0, samples, training.batch_size):
            yield order[start : start + training.batch_size]


def own_modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return every module with the mode, training or evaluation, that the model's author gave it."""
    if any(type(module).train is not nn.Module.train for module in model.modules()):
        model.train()  # an own `train` is the other way to keep a layer in evaluation mode
    return [(module, module.training) for module in model.modules()]


def train(
    model: nn.Module,
    samples: Samples,
    client: Local,
    training: Training,
    modes: Sequence[tuple[nn.Module, bool]] | None = None,
    rules: Sequence[Stepping] = (),
) -> Tensor:
    """Run the configured epochs on one client's data, changing the model; returns the loss of every sample seen.

    modes: of a model that was evaluated in the meantime, see `own_modes`    rules: that change the steps of this client
    """
    for module, mode in own_modes(model) if modes is None else modes:
        module.training = mode
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = list(named.values())
    optimizer = own_optimizer(training, parameters)
    sample_losses = []
    # Stochastic layers draw from torch's global generator: lend it the client's own seed and put it back.
    with torch.random.fork_rng(devices=[]), scaled(model, client.width):
        torch.default_generator.manual_seed(int(client.rng.integers(2**63)))
        for index in batches(client.count, training, client.rng):
            chosen = torch.from_numpy(index + client.first).to(samples.targets.device)
            losses = samples.losses(model, chosen)
            gradients: Sequence[Tensor | None] = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
            with torch.no_grad():
                if rules:
                    gradients, rules = _changed(named, gradients, rules)
                _step(parameters, gradients, training.learning_rate, optimizer)
            sample_losses.append(losses.detach())
    return torch.cat(sample_losses)


def _step(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    learning_rate: float,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Follow the gradients, or let an optimiser of the user's own do it; what has none stays."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if optimizer is not None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.add_(gradient, alpha=-learning_rate)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _changed(
    named: Mapping[str, Tensor], gradients: Sequence[Tensor | None], rules: Sequence[Stepping]
) -> tuple[tuple[Tensor | None, ...], Sequence[Stepping]]:
    """Send one client's gradients through its rules, as a stack of one; None where nothing is learnt."""
    pairs = zip(named, gradients, strict=True)
    stack = {name: gradient[None] for name, gradient in pairs if gradient is not None}
    found, rules = change_gradients(rules, stack, {name: named[name][None] for name in stack})
    return tuple(found[name][0] if name in found else None for name in named), rules


@contextmanager
def scaled(model: nn.Module, width: float | Tensor) -> Iterator[None]:
    """Divide what the hidden layers put out; by a tensor where every client of a stack has its own number."""
    plain = isinstance(width, float) and width == 1.0
    hidden = [] if plain else [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][:-1]
    hooks = [layer.register_forward_hook(lambda _, __, out: out / width) for layer in hidden]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gather(samples: Samples, index: Tensor) -> Any:
    """Return what a network takes of these samples; images with their channels together if all images have that."""
    inputs = samples.inputs
    if isinstance(inputs, dict):
        return {name: samples.taken(own.index_select(0, index)) for name, own in inputs.items()}
    if inputs.is_contiguous():
        return samples.taken(inputs.index_select(0, index))
    return samples.taken(inputs.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2))
