"""Server optimisers: the average of a round is a direction in which the model moves, not where it goes.

Any method can take one: `WithServerOptimizer(FedDD(), FedAvgM(0.9))`. The pseudo-gradient of a round is
Δ = average − model; the optimiser says how far the model moves. Trained tensors move. What `Fleet.buffers` names
(running statistics) and integer tensors take the average as it is: a mean that is stepped past is no statistic. A
layer table that was made from a bare state_dict knows no buffers; there all tensors of floats move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from feddd.strategies.protocol import Fleet, Plan, ServerState, Strategy, Upload

Memory = Mapping[str, Tensor]
"""What an optimiser remembers of one tensor, by names of its own; empty before the first round."""


class ServerOptimizer(Protocol):
    """How far a model moves, tensor by tensor. Pure: the same arguments give the same result."""

    def step(self, delta: Tensor, memory: Memory) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is added to a tensor of the model, and what is remembered of it; delta: Δ, float64."""
        ...


@dataclass(frozen=True)
class FedAvgM:
    """Move on along earlier rounds too (Hsu et al., 2019): v ← β v + Δ, w ← w + η v.

    momentum: β    learning_rate: η; with β = 0 and η = 1 this is FedAvg
    """

    momentum: float = 0.9
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _check_decay("momentum", self.momentum)
        _check_positive("learning_rate", self.learning_rate)

    def step(self, delta: Tensor, memory: Memory) -> tuple[Tensor, dict[str, Tensor]]:
        """Return η v, and v."""
        velocity = self.momentum * memory["velocity"] + delta if memory else delta
        return self.learning_rate * velocity, {"velocity": velocity}


@dataclass(frozen=True)
class FedAdam:
    """Move every number at a pace of its own (Reddi et al., 2021, Algorithm 2), without correction of the bias.

    m ← β₁ m + (1 − β₁) Δ,  v ← β₂ v + (1 − β₂) Δ²,  w ← w + η m / (√v + τ),  from m = 0 and v = τ²
    """

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_decay("beta1", self.beta1)
        _check_decay("beta2", self.beta2)
        _check_positive("learning_rate", self.learning_rate)
        _check_positive("tau", self.tau)

    def step(self, delta: Tensor, memory: Memory) -> tuple[Tensor, dict[str, Tensor]]:
        """Return η m / (√v + τ), and m and v."""
        mean = memory["mean"] if memory else torch.zeros_like(delta)
        square = memory["square"] if memory else torch.full_like(delta, self.tau**2)
        mean = self.beta1 * mean + (1 - self.beta1) * delta
        square = self.beta2 * square + (1 - self.beta2) * delta**2
        return self.learning_rate * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}


@dataclass(frozen=True)
class WithServerOptimizer:
    """A method whose averages are taken as directions; all else is the method's.

    What nobody sent in a round has Δ = 0 there. With momentum it moves all the same, ever less, in the direction of
    the rounds in which it was sent. A round in which no upload counted moves nothing.
    """

    method: Strategy
    optimizer: ServerOptimizer

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Plan as the method does, which sees only its own memory."""
        return self.method.plan(_of_method(state), fleet, rng)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Take a step towards the average, and let the method digest where that leads."""
        memory: Any = state.memory["server"] if isinstance(state.memory, dict) else {}
        if any(upload.status == "ok" for upload in uploads):
            model, memory = take_step(self.optimizer, state.model, model, memory, fleet.buffers)
        after = self.method.absorb(_of_method(state), fleet, plan, uploads, model)
        return dataclasses.replace(after, memory={"method": after.memory, "server": memory})


def take_step(
    optimizer: ServerOptimizer,
    model: Mapping[str, Tensor],
    average: Mapping[str, Tensor],
    memory: Mapping[str, Memory],
    buffers: frozenset[str],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the model after a step from it towards the average, and what is remembered, by tensor.

    The step is worked out in double precision, so that one of all of Δ ends at the average to the last bit.
    """
    moved, remembered = {}, {}
    for name, mean in average.items():
        if name in buffers or not mean.is_floating_point():
            moved[name] = mean
            continue
        before = model[name].detach().double()
        own = {key: tensor.double() for key, tensor in memory.get(name, {}).items()}
        step, kept = optimizer.step(mean.detach().double() - before, own)
        moved[name] = torch.empty_like(mean).copy_(before + step)
        remembered[name] = {key: tensor.float() for key, tensor in kept.items()}
    return moved, remembered


def _of_method(state: ServerState) -> ServerState:
    """Return the state as the method itself left it."""
    return dataclasses.replace(state, memory=state.memory["method"] if isinstance(state.memory, dict) else None)


def _check_decay(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, not {value}")


def _check_positive(name: str, value: float) -> None:
    if not 0.0 < value < np.inf:
        raise ValueError(f"{name} must be finite and above 0, not {value}")
