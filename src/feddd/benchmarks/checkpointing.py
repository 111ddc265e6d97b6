"""What it costs that a run can be resumed: the share of its time that goes into checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from feddd.benchmarks.measuring import Figure, Settings, make_world
from feddd.experiments.checkpoints import Checkpoints
from feddd.experiments.loading import load_experiment
from feddd.experiments.running import build_world
from feddd.experiments.tables import Tables
from feddd.simulation.simulator import Simulation
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.feddd import FedDD
from feddd.strategies.protocol import Strategy


def checkpoints(settings: Settings) -> Iterator[Figure]:
    """The share of checkpoints in the quickstart's time and with CNN2, and what one costs with clients' own values."""
    quickstart = load_experiment("quickstart")
    strategies = {section.label: section.build() for section in quickstart.strategy}
    with Simulation(build_world(quickstart)) as simulation:
        yield _share("quickstart", simulation, strategies, quickstart.rounds)
    with Simulation(make_world(settings, "cifar10", "cnn2", 24, 500)) as simulation:
        methods: dict[str, Strategy] = {"feddd": FedDD(), "fedavg": FedAvg()}
        yield _share("cnn2, 24 × 500 images", simulation, methods, settings.rounds)
        spent, _, _ = _measured(simulation, {"never": FedDD(broadcast_every=0)}, 4, seconds=0.0)
        what = "cnn2, a checkpoint with what 24 clients hold of their own"
        yield Figure("checkpoints", what, spent[-1], "s", detail="two minutes apart, or 100 times what it took")


def _share(name: str, simulation: Simulation, strategies: Mapping[str, Strategy], rounds: int) -> Figure:
    spent, seconds, written = _measured(simulation, strategies, rounds)
    detail = f"{written} in {seconds:.3g} s, {1e3 * sum(spent) / max(written, 1):.3g} ms each"
    what = f"{name}, share of checkpoints in the time of a run"
    return Figure("checkpoints", what, 100.0 * sum(spent) / seconds, "%", 2.0, "at most", detail)


def _measured(
    simulation: Simulation, strategies: Mapping[str, Strategy], rounds: int, seconds: float | None = None
) -> tuple[list[float], float, int]:
    """Return the seconds that every round waited for its checkpoint, those of all rounds, and how many were written."""
    begun, spent, written = time.perf_counter(), [], 0
    # Not in the system's folder for temporary files, which may be memory.
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, Tables(Path(name), seed=0) as tables:
        for place, (label, strategy) in enumerate(strategies.items()):
            kept = Checkpoints(Path(name), place, label, strategy, seconds)
            kept.find(simulation.initial)
            for record in simulation.run(strategy, rounds):
                added = tables.add(label, record)
                before = time.perf_counter()
                kept.offer(simulation, record, added)
                spent.append(time.perf_counter() - before)
            written += kept.written
            kept.clear()
        return spent, time.perf_counter() - begun, written
