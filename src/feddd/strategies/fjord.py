"""FjORD: ordered dropout; a width is drawn for every client and round, up to its greatest (Horváth et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Plan, ServerState, check_share, draw_clients
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
class FjORD(Memoryless):
    """widths: shares of every hidden layer; a client draws among those up to its greatest

    greatest: "full" for everybody; "capacity" assigns it, the widest to the quickest clients, "round-robin" by number
    """

    widths: tuple[float, ...] = WIDTHS
    greatest: Literal["full", "capacity", "round-robin"] = "full"
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_widths(self.widths)
        if self.greatest != "full":
            check_assignment(self.greatest)
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Return the first ⌈p · N_l⌉ units of every hidden layer, p uniform over the widths that a client may have."""
        table = chain_table(state, fleet)
        layers = hidden_layers(table)
        most = np.full(len(fleet), max(self.widths))
        if self.greatest != "full":
            most = assign_widths(fleet, self.widths, self.greatest)
        clients = draw_clients(len(fleet), self.participation, rng)
        drawn = {client: float(rng.choice([p for p in self.widths if p <= most[client]])) for client in clients}
        chosen = {
            client: {name: first_units(count, p) for name, count in layers.items()} for client, p in drawn.items()
        }
        return submodel_plan(state, table, chosen)
