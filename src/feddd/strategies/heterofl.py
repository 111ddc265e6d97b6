"""HeteroFL: every client has a width of its own and trains the first units of every layer (Diao et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
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
    first_units,
    hidden_layers,
    submodel_plan,
)


@dataclass(frozen=True)
class HeteroFL:
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
        """The first ⌈width · N_l⌉ units of every hidden layer, the same in every round."""
        table, widths = chain_table(state, fleet), assign_widths(fleet, self.widths, self.assignment)
        layers = hidden_layers(table)
        clients = draw_clients(len(fleet), self.participation, rng)
        chosen = {client: first_units(layers, widths[client]) for client in clients}
        return submodel_plan(state, table, chosen, widths if self.scale else None)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model."""
        return digest(state, plan, uploads, model)
