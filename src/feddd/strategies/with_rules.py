"""Any method with other local training: rules that its tasks take along, and two that torch.optim's SGD knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from feddd.core.units import Params
from feddd.strategies.protocol import Fleet, Plan, ServerState, Strategy, Upload
from feddd.wire.local import LocalRound, Memory, Rule


@dataclass(frozen=True)
class WithRules:
    """A method, and rules that all of its clients train by, in this order."""

    method: Strategy
    rules: tuple[Rule, ...]

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Plan what the method does, with the rules."""
        return with_rules(self.method.plan(state, fleet, rng), self.rules)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Digest the round as the method does."""
        return self.method.absorb(state, fleet, plan, uploads, model)


def with_rules(plan: Plan, rules: tuple[Rule, ...]) -> Plan:
    """Return the plan whose clients also train by these rules, after their own."""
    tasks = tuple(dataclasses.replace(task, local=task.local + rules) for task in plan.tasks)
    return dataclasses.replace(plan, tasks=tasks)


@dataclass(frozen=True)
class Momentum(Rule):
    """Follow v ← β·v + g instead of the gradient g; v is zero at the beginning of every round."""

    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise ValueError(f"beta must lie at 0 or above and below 1, not {self.beta}")

    @property
    def config(self) -> dict[str, float]:
        """Return β."""
        return {"momentum": self.beta}

    def start(self, at: LocalRound) -> Memory:
        """Begin at rest."""
        return {name: torch.zeros_like(own) for name, own in at.before.items()}

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Gather speed."""
        moving = {name: self.beta * memory[name] + own for name, own in gradients.items()}
        return moving, {**memory, **moving}


@dataclass(frozen=True)
class WeightDecay(Rule):
    """Add rate/2 · ‖w‖² to the loss: g + rate · w. Before momentum it is what torch.optim's SGD does."""

    rate: float = 1e-4

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < float("inf"):
            raise ValueError(f"rate must be finite and at least 0, not {self.rate}")

    @property
    def config(self) -> dict[str, float]:
        """Return the rate."""
        return {"weight-decay": self.rate}

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Pull towards zero."""
        return {name: own + self.rate * params[name] for name, own in gradients.items()}, memory
