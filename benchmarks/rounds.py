"""What a FedDD round costs beside a FedAvg round, and two workers beside one, measured within one run.

    python benchmarks/rounds.py [--dataset mnist] [--rounds 12] [--trainer auto]

Rounds of the two methods alternate, so that a busy neighbour hits both; ratios are of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

from feddd import FedAvg, FedDD
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world
from feddd.simulation.simulator import RoundRecord, Simulation, World


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--trainer", default="auto")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    experiment = parse_experiment(
        {
            "data": {"dataset": given.dataset, "partition": "iid"},
            "model": {"name": given.model},
            "training": {"trainer": given.trainer},
        }
    )
    world = build_world(experiment)
    print(f"{given.dataset}, {given.model}, {len(world.parts)} clients, trainer {world.training.trainer}")
    seconds = {workers: measure(world, workers, given.rounds) for workers in (1, 2)}
    print(f"{'workers':>8} {'fedavg s/round':>15} {'feddd s/round':>15} {'feddd/fedavg':>13}")
    for workers, (fedavg, feddd) in seconds.items():
        print(f"{workers:>8} {fedavg:>15.3f} {feddd:>15.3f} {feddd / fedavg:>13.2f}")
    fedavg, feddd = (seconds[1][method] / seconds[2][method] for method in (0, 1))
    print(f"two workers are quicker than one by: fedavg {fedavg:.2f} x, feddd {feddd:.2f} x")


def measure(world: World, workers: int, rounds: int) -> tuple[float, float]:
    """Median wall seconds of a FedAvg and of a FedDD round (evaluation apart), alternating."""
    with Simulation(world, workers=workers) as one, Simulation(world, workers=workers) as other:
        runs = (one.run(FedAvg(), rounds, evaluate_every=rounds), other.run(FedDD(), rounds, evaluate_every=rounds))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for run, taken in zip(runs, times, strict=True):
                taken.append(_timed(run))
    # The first two rounds start workers and send everything; the last one evaluates.
    fedavg, feddd = (statistics.median(taken[2:-1]) for taken in times)
    return fedavg, feddd


def _timed(run: Iterator[RoundRecord]) -> float:
    begun = time.perf_counter()
    next(run)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
