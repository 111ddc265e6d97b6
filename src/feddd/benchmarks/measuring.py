"""How the benchmarks measure: figures beside what was asked for, and programs that take turns round by round."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from feddd.errors import InputError, RunError
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world
from feddd.simulation.simulator import EngineName, Simulation, World
from feddd.strategies.protocol import Strategy
from feddd.world.datasets import ImageDataset

Step = Callable[[], float]
"""Does a round and says how many seconds it took."""


@dataclass(frozen=True)
class Figure:
    """One measured number.

    asked: what the project set itself, None for a number that only informs    limit: which side of it is good
    """

    benchmark: str
    what: str
    measured: float
    unit: str
    asked: float | None = None
    limit: Literal["at least", "at most"] = "at least"
    detail: str = ""

    @property
    def reached(self) -> bool | None:
        """Return whether it is as good as asked; None if nothing was."""
        if self.asked is None:
            return None
        return self.measured >= self.asked if self.limit == "at least" else self.measured <= self.asked

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self) | {"reached": self.reached}


@dataclass(frozen=True)
class Settings:
    """How much to measure, and with what.

    rounds: of every contestant    peers: framework → the Python that has it    full: also what takes minutes
    """

    rounds: int = 9
    peers: Mapping[str, Path] | None = None
    data_dir: Path | None = None
    full: bool = False


def make_world(settings: Settings, dataset: str, model: str, clients: int, samples: int) -> World:
    """Return clients with equally many samples of a real data set."""
    document = {
        "data": {"dataset": dataset, "partition": "iid", "train_limit": clients * samples},
        "fleet": {"clients": clients},
        "model": {"name": model},
    }
    return build_world(parse_experiment(document), settings.data_dir)


@contextmanager
def simulated(
    world: World, strategy: Strategy, *, workers: int | None = None, engine: EngineName = "local"
) -> Iterator[Step]:
    """Run rounds of our engine, without evaluation; one round to start the workers and two more are done before."""
    with Simulation(world, workers=workers, engine=engine) as simulation:
        run = simulation.run(strategy, 10**9, evaluate_every=10**9)

        def step() -> float:
            begun = time.perf_counter()
            next(run)
            return time.perf_counter() - begun

        for _ in range(3):
            step()
        yield step


@contextmanager
def program(python: Path | str, script: Path, *arguments: str) -> Iterator[Step]:
    """Run rounds of another program: it does one for each line it reads, and answers with a line of JSON."""
    command = [str(python), str(script), *arguments]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise InputError(f"cannot start {python}: {error.strerror}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    into, out = process.stdin, process.stdout

    def answer() -> dict[str, Any]:
        line = out.readline()
        if not line:
            raise RunError(f"{script.stem} ended with exit code {process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def step() -> float:
        into.write("round\n")
        into.flush()
        return float(answer()["seconds"])

    try:
        answer()
        step()
        yield step
    finally:
        into.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        out.close()


def take_turns(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return seconds of every contestant's rounds; they take turns, so that a busy neighbour hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios of neighbouring rounds."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def own_script(name: str) -> Path:
    """Return a peer's program, which comes with the package."""
    return Path(__file__).parent / "peers" / f"{name}.py"


def write_work(world: World, weights: Mapping[str, np.ndarray[Any, Any]], folder: Path) -> None:
    """The work of a round as files that any program can read; see the peers for their names."""
    order = np.concatenate([np.asarray(part) for part in world.parts])
    data = world.dataset
    assert isinstance(data, ImageDataset)
    np.save(folder / "images.npy", data.inputs(data.train_images[order]).reshape(len(order), -1))
    np.save(folder / "labels.npy", data.train_labels[order].astype(np.int64))
    arrays = list(weights.values())
    for number in range(len(arrays) // 2):
        np.save(folder / f"weight{number}.npy", arrays[2 * number])
        np.save(folder / f"bias{number}.npy", arrays[2 * number + 1])
    spec = {
        "clients": len(world.parts),
        "samples": len(world.parts[0]),
        "batch_size": world.training.batch_size,
        "learning_rate": world.training.learning_rate,
        "layers": len(arrays) // 2,
        "model": world.model,
        "image_shape": data.image_shape,
    }
    (folder / "spec.json").write_text(json.dumps(spec))


def in_child(code: str, *arguments: str) -> dict[str, Any]:
    """Run some code in a fresh interpreter; its last line is JSON."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"a benchmark failed: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
        )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
