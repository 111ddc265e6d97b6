"""Small models and the ways to send them: what the tests of stages, chains and downloads share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from feddd.core.units import Params, Units, units
from feddd.wire.difference import Difference, Feedback
from feddd.wire.format import pack_mask
from feddd.wire.quantised import Bits, Ternary
from feddd.wire.select import Blocks, Given, Select, TopK
from feddd.wire.stage import At, Known, Stage


class Net(nn.Module):
    """A convolution with statistics, a linear layer, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


MODELS: dict[str, nn.Module] = {
    "statistics": Net(),
    "layers": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
}
TABLES = {name: units(model) for name, model in MODELS.items()}


def some_units(table: Units) -> bytes:
    """Every other unit of each layer, packed."""
    return pack_mask({layer.name: torch.arange(layer.units) % 2 == 0 for layer in table.layers}, table)


CHOOSERS: dict[str, Any] = {
    "everything": lambda table: (),
    "Select": lambda table: (Select(0.5, "delta"),),
    "Given": lambda table: (Given(some_units(table)),),
    "TopK": lambda table: (TopK(0.3),),
    "Blocks": lambda table: (Blocks(some_units(table)),),
}
WRITERS: dict[str, tuple[Stage, ...]] = {
    "float32": (),
    "8 bits": (Bits(8),),
    "4 bits": (Bits(4, "nearest"),),
    "2 bits": (Bits(2),),
    "ternary": (Ternary(),),
}
BASES: dict[str, tuple[Stage, ...]] = {
    "values": (),
    "difference": (Difference(),),
    "feedback": (Difference(), Feedback()),
}
COMBINATIONS = [
    (model, base, chooser, writer)
    for model in MODELS
    for base in BASES
    for chooser in CHOOSERS
    for writer in WRITERS
    if not (chooser == "Blocks" and model == "statistics")  # sub-models are of chains of layers
]


def stages_of(base: str, chooser: str, writer: str, table: Units) -> tuple[Stage, ...]:
    return (*BASES[base], *CHOOSERS[chooser](table), *WRITERS[writer])


def model_of(table: Units, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {slot.name: torch.from_numpy(np.array(rng.normal(size=slot.shape), np.float32)) for slot in table.slots}


def stack_of(table: Units, seeds: list[int]) -> dict[str, Tensor]:
    models = [model_of(table, seed) for seed in seeds]
    return {slot.name: torch.stack([model[slot.name] for model in models]) for slot in table.slots}


def at_clients(table: Units, clients: list[int], *, round: int = 1, wire: bool = True, **changes: Any) -> At:
    """Where some clients stand: each has trained from one model to another of its own."""
    known = Known(model_of(table, 1000), model_of(table, 1001))
    before = stack_of(table, [1000] * len(clients))
    after = stack_of(table, [100 * round + client for client in clients])
    given: dict[str, Any] = {"known": known, "masks": [None] * len(clients), "before": before, "after": after}
    return At(table, clients, round, 7, wire=wire, **(given | changes))


def equal(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
