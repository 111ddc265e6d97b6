"""FedAvg: full models both ways, for everybody or for a random share of the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from feddd.strategies.protocol import (
    Fleet,
    Plan,
    ServerState,
    Upload,
    check_bits,
    check_participation,
    digest,
    draw_clients,
    full_model_plan,
)


@dataclass(frozen=True)
class FedAvg:
    """participation: the share of clients drawn at random each round

    value_bits: 32, or 8, 4 or 2 to send rounded differences
    """

    participation: float = 1.0
    value_bits: int = 32

    def __post_init__(self) -> None:
        check_bits(self.value_bits)
        check_participation(self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Draw the round's clients without replacement."""
        return full_model_plan(state, draw_clients(len(fleet), self.participation, rng), self.value_bits)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model."""
        return digest(state, plan, uploads, model)
