"""FedProx (Li et al., 2020): FedAvg whose clients are held back to the model that they were sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddd.core.units import Params
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Feedback, Fleet, Plan, ServerState
from feddd.strategies.with_rules import WithRules
from feddd.wire.local import LocalRound, Memory, Rule


@dataclass(frozen=True)
class Proximal(Rule):
    """Add μ/2 · ‖w − W‖² to the loss, W the model that the client began the round with: g + μ · (w − W)."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu < float("inf"):
            raise ValueError(f"mu must be finite and at least 0, not {self.mu}")

    @property
    def config(self) -> dict[str, float]:
        """Return μ."""
        return {"proximal-mu": self.mu}

    def start(self, at: LocalRound) -> Memory:
        """Remember the model that training begins with."""
        return at.before

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Pull towards it."""
        return {name: own + self.mu * (params[name] - memory[name]) for name, own in gradients.items()}, memory


@dataclass(frozen=True)
class FedProx(Memoryless):
    """mu: how strongly clients are held back to the model that they were sent; 0 is FedAvg

    participation, value_bits, error_feedback: as for `FedAvg`
    """

    mu: float = 0.01
    participation: float = 1.0
    value_bits: int = 32
    error_feedback: Feedback = "none"

    def __post_init__(self) -> None:
        self._parts()

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Plan what FedAvg does, with the rule."""
        return self._parts().plan(state, fleet, rng)

    def _parts(self) -> WithRules:
        average = FedAvg(self.participation, self.value_bits, self.error_feedback)
        return WithRules(average, (Proximal(self.mu),))
