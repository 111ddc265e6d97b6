"""SCAFFOLD (Karimireddy et al., 2020): FedAvg whose clients correct their drift by control variates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from feddd.core.units import Params
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Plan, ServerState
from feddd.strategies.with_rules import WithRules
from feddd.wire.chosen import flat, unflat
from feddd.wire.local import LocalRound, Memory, Rule, Vectors
from feddd.wire.stage import ClientState

CONTROL = "control"
"""The name of the server's control variate c, and of a client's own c_i among what it keeps."""


@dataclass(frozen=True)
class ControlVariates(Rule):
    """Follow g − c_i + c instead of the gradient g; c_i ← c_i − c + (W − Ŵ) / (K · η) after K steps (option II).

    The change of c_i travels up beside the model, c travels down; both are zero at first. The server adds the changes
    of the clients that took part, divided by the number of all clients, to c.
    """

    lasting: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (CONTROL,)

    def excludes(self, others: Sequence[Rule]) -> str:
        """Refuse whatever else changes the steps: c_i is worked out from where plain ones lead to."""
        return next((type(other).__name__ for other in others if other.steps), "")

    def start(self, at: LocalRound) -> Memory:
        """Return the correction c − c_i."""
        own = unflat(self._own(at), at.table)
        return {name: control - own[name].to(control.device) for name, control in at.vectors[CONTROL].items()}

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Correct the drift."""
        return {name: own + memory[name] for name, own in gradients.items()}, memory

    def finish(self, at: LocalRound, after: Params) -> tuple[list[ClientState], Vectors]:
        """Keep the new c_i, and send how it has changed."""
        control = flat({name: own[None] for name, own in at.vectors[CONTROL].items()}, at.table)
        moved = flat(at.before, at.table) - flat(after, at.table)
        change = moved / (at.steps * at.learning_rate)[:, None] - control
        new = self._own(at) + change
        kept = [state | {CONTROL: own.clone()} for state, own in zip(at.states, new, strict=True)]
        return kept, {CONTROL: unflat(change, at.table)}

    def absorb(self, vectors: Vectors, means: Vectors, share: float) -> Vectors:
        """Return c + |S|/N · mean of the changes."""
        before, change = vectors[CONTROL], means[CONTROL]
        return {CONTROL: {name: own + share * change[name] for name, own in before.items()}}

    def _own(self, at: LocalRound) -> Tensor:
        """Return every client's c_i, [clients, elements]."""
        nothing = torch.zeros(at.table.elements)
        return torch.stack([state.get(CONTROL, nothing) for state in at.states])


@dataclass(frozen=True)
class SCAFFOLD(Memoryless):
    """participation: the share of clients drawn at random each round

    Models are averaged by samples as in FedAvg, control variates evenly. Where both stand still, the gradients of all
    clients cancel out evenly, as published. Whoever drives the rounds lets the rule move the server's control variate.
    """

    participation: float = 1.0

    def __post_init__(self) -> None:
        self._parts()

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Plan what FedAvg does, with the rule."""
        return self._parts().plan(state, fleet, rng)

    def _parts(self) -> WithRules:
        return WithRules(FedAvg(self.participation), (ControlVariates(),))
