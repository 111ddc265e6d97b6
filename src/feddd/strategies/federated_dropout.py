"""Federated Dropout: everybody trains a random sub-model of the same size (Caldas et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feddd.core.selection import kept_units
from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Plan, ServerState, check_share, draw_clients
from feddd.strategies.submodels import chain_table, check_widths, hidden_layers, submodel_plan


@dataclass(frozen=True)
class FederatedDropout(Memoryless):
    """width: the share of every hidden layer's units that a client gets, drawn for every client and round

    scale: divide the outputs of hidden layers by the width while clients train, as dropout usually does
    """

    width: float = 0.75
    scale: bool = False
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_widths((self.width,))
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Return a fixed number of each hidden layer's units, uniformly at random."""
        table = chain_table(state, fleet)
        layers = hidden_layers(table)
        clients = draw_clients(len(fleet), self.participation, rng)
        chosen = {
            client: {name: _drawn(count, self.width, rng) for name, count in layers.items()}
            for client in sorted(clients)
        }
        return submodel_plan(state, table, chosen, np.full(len(fleet), self.width) if self.scale else None)


def _drawn(count: int, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    chosen = np.zeros(count, np.bool_)
    chosen[rng.permutation(count)[: kept_units(count, 1.0 - share)]] = True
    return chosen
