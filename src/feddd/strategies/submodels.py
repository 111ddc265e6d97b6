"""What HeteroFL, FjORD, FedRolex and Federated Dropout share: everybody is sent, trains and sends back a sub-model.

They differ in which units of the hidden layers a client gets in a round; the input and the output stay whole. The
server averages each element over the clients that sent it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from feddd.core.units import Units, units
from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Floats, Plan, ServerState, Task, check_share, draw_clients
from feddd.wire.blocks import block_elements, check_chain
from feddd.wire.down import SubModel
from feddd.wire.exchange import chain
from feddd.wire.format import pack_masks
from feddd.wire.local import Scaler
from feddd.wire.select import Blocks

ASSIGNMENTS = ("capacity", "round-robin")
WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""HeteroFL's five."""

Chosen = Mapping[str, NDArray[np.bool_]]
"""Which units of each hidden layer a client gets."""


@dataclass(frozen=True)
class AssignedWidths(Memoryless):
    """A method in which every client has a width for good; subclasses say which units of a layer that is.

    widths: shares of every hidden layer    participation: the share of clients drawn at random each round
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

    def units(self, count: int, share: float, number: int) -> NDArray[np.bool_]:
        """Return which of a layer's units a client of this width has; number: of the rounds before this one."""
        raise NotImplementedError

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Give every client that is drawn the units of its width in every hidden layer."""
        table, widths = chain_table(state, fleet), assign_widths(fleet, self.widths, self.assignment)
        layers = hidden_layers(table)
        clients = draw_clients(len(fleet), self.participation, rng)
        chosen = {
            client: {name: self.units(count, widths[client], state.round) for name, count in layers.items()}
            for client in clients
        }
        return submodel_plan(state, table, chosen, widths if self.scale else None)


def check_widths(widths: Sequence[float]) -> None:
    """Refuse shares of a layer that are none."""
    if not widths or not all(0.0 < width <= 1.0 for width in widths):
        raise ValueError(f"widths must lie above 0 and at most at 1, not {list(widths)}")


def check_assignment(assignment: str) -> None:
    """Refuse an unknown way to give clients their widths."""
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"assignment must be one of {', '.join(ASSIGNMENTS)}, not {assignment!r}")


def assign_widths(fleet: Fleet, widths: Sequence[float], assignment: str) -> Floats:
    """Each client's width: "capacity" gives the widest to those that are quickest with the full model, in equal parts;
    "round-robin" goes by client number."""
    count = len(fleet)
    if assignment == "round-robin":
        return np.array([widths[client % len(widths)] for client in range(count)])
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(fleet.full_seconds, kind="stable")] = np.arange(count)
    return np.array(sorted(widths, reverse=True))[ranks * len(widths) // count]


def units_up(count: int, share: float) -> int:
    """⌈share · count⌉, but not one more because of a rounding error."""
    return max(1, math.ceil(share * count - 1e-9))


def units_down(count: int, share: float) -> int:
    """⌊share · count⌋, at least one."""
    return max(1, math.floor(share * count + 1e-9))


def first_units(count: int, share: float) -> NDArray[np.bool_]:
    """Return the first ⌈share · N_l⌉ units of a layer; count: N_l."""
    first: NDArray[np.bool_] = np.arange(count) < units_up(count, share)
    return first


def chain_table(state: ServerState, fleet: Fleet) -> Units:
    """Return the layer table of the model, if its sub-models are networks."""
    if fleet.heterogeneous:
        raise ValueError("sub-models are cut from one model for all: not of models that differ in width")
    table = units(state.model)
    check_chain(table)
    return table


def hidden_layers(table: Units) -> dict[str, int]:
    """N_l of every layer but the output."""
    return {layer.name: layer.units for layer in table.layers[:-1]}


def submodel_plan(
    state: ServerState, table: Units, chosen: Mapping[int, Chosen], scalers: Floats | None = None
) -> Plan:
    """Return a round in which each client has the units chosen for it; scalers: of each client, see `Scaler`."""
    clients, output = sorted(chosen), table.layers[-1]
    masks = {
        name: torch.from_numpy(np.stack([chosen[client][name] for client in clients])) for name in hidden_layers(table)
    }
    masks[output.name] = torch.ones(len(clients), output.units, dtype=torch.bool)
    shares = block_elements(masks, table) / table.elements
    tasks = tuple(
        Task(
            client,
            chain(Blocks(packed, 1.0 - float(share))),
            SubModel(packed),
            () if scalers is None else (Scaler(float(scalers[client])),),
        )
        for client, share, packed in zip(clients, shares, pack_masks(masks, table), strict=True)
    )
    return Plan(state.round + 1, tasks)
