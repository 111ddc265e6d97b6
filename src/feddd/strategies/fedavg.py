"""FedAvg: full models both ways, for everybody or for a random share of the clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import (
    Feedback,
    Fleet,
    Plan,
    ServerState,
    check_bits,
    check_share,
    draw_clients,
    full_model_plan,
)


@dataclass(frozen=True)
class FedAvg(Memoryless):
    """participation: the share of clients drawn at random each round

    value_bits: 32, or 8, 4 or 2 to send rounded differences
    error_feedback: "rounded" makes clients add what was rounded away to what they send later; "all" is the same here
    """

    participation: float = 1.0
    value_bits: int = 32
    error_feedback: Feedback = "none"

    def __post_init__(self) -> None:
        check_bits(self.value_bits, self.error_feedback)
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Draw the round's clients without replacement."""
        chosen = draw_clients(len(fleet), self.participation, rng)
        return full_model_plan(state, chosen, self.value_bits, feedback=self.error_feedback)
