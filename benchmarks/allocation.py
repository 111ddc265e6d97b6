"""The exact allocation solver beside HiGHS, over the number of clients.

python benchmarks/allocation.py [--highs-up-to 10000]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import feddd


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--highs-up-to", type=int, default=10_000)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"{'clients':>9} {'exact s':>9} {'HiGHS s':>9} {'ratio':>7} {'relative gap':>13}")
    for clients in (100, 1_000, 10_000, 100_000, 1_000_000):
        fleet = (
            rng.choice([1.0, 0.8, 0.6, 0.4, 0.2], clients) * 2.7e6,
            1 / rng.uniform(1e4, 5e4, clients) + 1 / rng.uniform(4e4, 2e5, clients),
            rng.uniform(0, 5, clients),
            rng.random(clients) / clients,
        )
        exact, ours = timed(fleet, "exact", repeats=5)
        if clients > given.highs_up_to:
            print(f"{clients:>9} {exact:>9.4f}")
            continue
        highs, reference = timed(fleet, "highs", repeats=1)
        gap = abs(ours - reference) / abs(reference)
        print(f"{clients:>9} {exact:>9.4f} {highs:>9.3f} {highs / exact:>7.0f} {gap:>13.1e}")


def timed(fleet: tuple[np.ndarray, ...], solver: str, repeats: int) -> tuple[float, float]:
    """Least wall seconds of a few solutions, and the objective."""
    best, objective = float("inf"), 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        solved = feddd.allocate(*fleet, budget=0.6, max_dropout=0.8, penalty=1.0, solver=solver)
        best, objective = min(best, time.perf_counter() - begun), solved.objective
    return best, objective


if __name__ == "__main__":
    main()
