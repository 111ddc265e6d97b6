"""Memory of the masked average over the number of clients: it does not grow.

python benchmarks/aggregation_memory.py
"""

from __future__ import annotations

import resource

import numpy as np
import torch

import feddd
from feddd.world.models import build


def main() -> None:
    """Print the table."""
    model = build("cnn2", (3, 32, 32), 10)
    table, params = feddd.units(model), model.state_dict()
    rng = np.random.default_rng(0)
    aggregator = feddd.Aggregator(params, units=table)
    print(f"model: {table.elements * 4 / 1e6:.1f} MB\n{'clients':>8} {'peak MB':>8}")
    for client in range(1, 1001):
        values = {name: torch.from_numpy(rng.random(tensor.shape, dtype=np.float32)) for name, tensor in params.items()}
        mask = feddd.select(params, values, 0.4, selector="random", rng=rng, units=table)
        aggregator.add(values, mask, 1.0)
        if client in (1, 10, 100, 1000):
            print(f"{client:>8} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:>8.0f}")
    aggregator.result()


if __name__ == "__main__":
    main()
