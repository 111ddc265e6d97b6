"""FedRolex: a window of units that moves on by one unit in every round (Alam et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.strategies.protocol import (
    Fleet,
    Plan,
    ServerState,
    Upload,
    check_share,
    digest,
    draw_clients,
)
from feddd.strategies.submodels import (
    WIDTHS,
    assign_widths,
    chain_table,
    check_assignment,
    check_widths,
    hidden_layers,
    submodel_plan,
    units_down,
)


@dataclass(frozen=True)
class FedRolex:
    """widths: shares of every hidden layer, given to clients for good

    assignment: "capacity" gives the widest to the quickest clients, "round-robin" goes by client number
    scale: divide the outputs of hidden layers by a client's width while it trains, as the full model will not be
    """

    widths: tuple[float, ...] = WIDTHS
    assignment: Literal["capacity", "round-robin"] = "capacity"
    scale: bool = True
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_widths(self.widths)
        check_assignment(self.assignment)
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """In round j ⌊width · N_l⌋ units of every hidden layer from unit (j − 1) mod N_l on, around its end."""
        table, widths = chain_table(state, fleet), assign_widths(fleet, self.widths, self.assignment)
        layers = hidden_layers(table)
        clients = draw_clients(len(fleet), self.participation, rng)
        chosen = {
            client: {name: window(count, widths[client], state.round) for name, count in layers.items()}
            for client in clients
        }
        return submodel_plan(state, table, chosen, widths if self.scale else None)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model."""
        return digest(state, plan, uploads, model)


def window(count: int, share: float, first: int) -> NDArray[np.bool_]:
    """So much of a layer's units, from this one on, around the end."""
    inside: NDArray[np.bool_] = (np.arange(count) - first) % count < units_down(count, share)
    return inside
