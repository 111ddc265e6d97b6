"""Rounding to whole units: how far a fleet's uploads stray from the budget."""

import numpy as np
import pytest

from feddd import allocate, units
from feddd.core.selection import kept_units
from feddd.wire.format import droppable_bytes, fixed_bytes
from feddd.world import models

PAPER = [
    ("mlp", (1, 28, 28), 0.01),
    ("cnn1", (1, 28, 28), 0.02),
    ("cnn2", (3, 32, 32), 0.01),
    ("heterogeneous-a", (3, 32, 32), 0.01),
    ("heterogeneous-b", (3, 32, 32), 0.01),
]


@pytest.mark.parametrize(("name", "shape", "tolerance"), PAPER)
@pytest.mark.parametrize("budget", [0.2, 0.4, 0.6, 0.8])
def test_the_paper_fleet_meets_its_budget_in_encoded_bytes(name, shape, tolerance, budget):
    count = models.widths(name)
    tables = [units(models.build(name, shape, 10, width)) for width in range(count)]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        own = [tables[client % count] for client in range(100)]
        sizes = np.array([8.0 * droppable_bytes(table) for table in own])
        rates = allocate(
            sizes,
            1 / rng.uniform(1e4, 5e4, 100) + 1 / rng.uniform(4e4, 2e5, 100),
            rng.uniform(0, 5, 100),
            rng.random(100) / 100,
            budget=budget,
            max_dropout=0.8,
            penalty=1.0,
        ).dropout
        sent = 0
        for table, rate in zip(own, rates, strict=True):
            kept = sum(layer.unit_elements * kept_units(layer.units, rate) for layer in table.layers)
            sent += fixed_bytes(table) + 4 * kept
        assert sent / (sizes.sum() / 8) == pytest.approx(budget, rel=tolerance)
