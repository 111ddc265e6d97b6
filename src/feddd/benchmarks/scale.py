"""Time and memory over the number of clients, and how long a first round takes from a cold start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from feddd.benchmarks.measuring import Figure, Settings, in_child

FEW, MANY = 10, 1000
_ROUNDS = """
import json, os, statistics, sys, time
from pathlib import Path
from feddd.benchmarks.measuring import Settings, make_world
from feddd.simulation.simulator import Simulation
from feddd.strategies.feddd import FedDD

clients, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
world = make_world(Settings(data_dir=Path(folder) if folder else None), "mnist", "mlp", clients, 6)
with Simulation(world, workers=2) as simulation:
    taken = []
    run = simulation.run(FedDD(), rounds, evaluate_every=rounds)
    for _ in range(rounds - 1):
        begun = time.perf_counter()
        next(run)
        taken.append(time.perf_counter() - begun)
    processes = [os.getpid(), *(worker.process.pid for worker in simulation._engine._workers)]
    peak = 0
    for process in processes:
        fields = dict(line.split(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
        shared = int(fields["RssShmem"].split()[0])
        peak += 1024 * (int(fields["VmHWM"].split()[0]) - (shared if process != processes[0] else 0))
print(json.dumps({"seconds": statistics.median(taken[2:]) / clients, "peak": peak}))
"""

_FIRST_ROUND = """
import json, sys, time
from tempfile import TemporaryDirectory
from feddd.simulation.worker_process import WorkerPool, default_workers

pool = WorkerPool(default_workers())  # as the command line does
from feddd.experiments.running import run

class Done(Exception):
    pass

def stop(progress):
    raise Done

with TemporaryDirectory() as folder:
    try:
        run("quickstart", folder, pool=pool, watch=stop)
    except Done:
        print(json.dumps({"seconds": time.time() - float(sys.argv[1])}))
"""


_AVERAGE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from feddd.core.aggregation import Aggregator
from feddd.core.selection import select
from feddd.core.units import units
from feddd.world.models import build

model = build("cnn2", (3, 32, 32), 10)
table, params, rng = units(model), model.state_dict(), np.random.default_rng(0)
aggregator, peaks, few, many = Aggregator(params, units=table), [], *map(int, sys.argv[1:])
for client in range(1, many + 1):
    values = {name: torch.from_numpy(rng.random(t.shape, dtype=np.float32)) for name, t in params.items()}
    aggregator.add(values, select(params, values, 0.4, selector="random", rng=rng, units=table), 1.0)
    if client in (few, many):
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        peaks.append(int(fields["VmHWM"].split()[0]))
print(json.dumps({"peaks": peaks}))
"""


def memory(_settings: Settings) -> Iterator[Figure]:
    """Memory of a process that averages CNN2 over MANY clients, over one that averages FEW."""
    few, many = in_child(_AVERAGE, str(FEW), str(MANY))["peaks"]
    what, detail = f"averaging {MANY:,} clients, memory over averaging {FEW}", f"{many / 1e3:.0f} MB"
    yield Figure("memory", what, many / few, "×", detail=detail)


def clients(settings: Settings) -> Iterator[Figure]:
    """FedDD with 1,000 and 10,000 clients of 6 MNIST images each: time of a client's round, and memory in all."""
    folder = str(settings.data_dir or "")
    # Small and large take turns, so that a busy neighbour hits both.
    turns = [(in_child(_ROUNDS, "1000", "14", folder), in_child(_ROUNDS, "10000", "9", folder)) for _ in range(2)]
    small, large = (min(turn[place]["seconds"] for turn in turns) for place in (0, 1))
    yield Figure(
        "clients", "10,000 clients × 6, memory of all processes", turns[0][1]["peak"] / 2**30, "GiB", 6, "at most"
    )
    detail = f"{1e3 * large:.2f} against {1e3 * small:.2f} ms"
    what = "a client's round with 10,000 clients over one with 1,000"
    yield Figure("clients", what, large / small, "×", 1.15, "at most", detail)


def startup(_settings: Settings) -> Iterator[Figure]:
    """From starting the interpreter to the end of round 1 of the quickstart."""
    taken = [in_child(_FIRST_ROUND, str(time.time()))["seconds"] for _ in range(3)]
    yield Figure("startup", "quickstart, cold start to the end of round 1", statistics.median(taken), "s", 5, "at most")
