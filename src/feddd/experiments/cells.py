"""One strategy on one seed, run once and kept: what figures share is not run twice, and interrupted work goes on.

A cell is a run's folder with a single strategy. Its address is a digest of everything its tables are a function of, so
FedDD with its defaults is the same cell in the comparison of methods, of selection rules and of budgets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from feddd.errors import InputError
from feddd.experiments.checkpoints import Checkpoints
from feddd.experiments.config import Experiment
from feddd.experiments.data import write_data_facts
from feddd.experiments.folders import Lock, keep_identity, model_file, write_model
from feddd.experiments.methods import construct
from feddd.experiments.results import CHECKPOINTS, SCHEMAS, Results, load_results, summarise
from feddd.experiments.resuming import identity, reuse_folder
from feddd.experiments.running import (
    build_world,
    check_plans,
    label_counts_of,
    resolved,
    settings_of,
    simulate_rounds,
)
from feddd.experiments.tables import Tables
from feddd.files import portable_name
from feddd.simulation.simulator import EverybodyDiverged, RoundRecord, Simulation
from feddd.tracking.following import Following, Trackers
from feddd.world.sources import content_digest, is_path_of_data

VERSION = 1
"""Raised when a change of the simulator makes kept cells wrong."""

SECONDS_A_SAMPLE = {
    **{"mlp": 1e-5, "mlp-a": 2e-5, "mlp-b": 2e-5},
    **{"cnn1": 1.1e-4, "cnn2": 4e-4, "heterogeneous-a": 4e-3, "heterogeneous-b": 4e-3},
}
"""Of training, by network, on one core of a small machine."""

Watch = Callable[["Cell", RoundRecord], None]


@dataclass(frozen=True)
class Cell:
    """An experiment with one strategy.

    content: digest of the data's file or folder, where it has one; left out, it is read
    """

    experiment: Experiment
    content: str | None = None

    @property
    def label(self) -> str:
        """The strategy's label in the experiment that asked for it first."""
        return self.experiment.strategy[0].label

    @property
    def cost(self) -> float:
        """About what the cell takes, in seconds of one core; for the time left."""
        experiment = self.experiment
        samples = experiment.data.train_limit or 60_000
        base, _, divisor = experiment.model.name.partition("/")
        share = experiment.strategy[0].options.get("budget", 1.0) if experiment.strategy[0].name != "feddd" else 1.0
        each = SECONDS_A_SAMPLE.get(base, SECONDS_A_SAMPLE["cnn2"]) / int(divisor or 1) ** 2
        return 1.0 + experiment.rounds * samples * experiment.training.epochs * float(share) * each

    @property
    def world_key(self) -> str:
        """Equal for cells that share data, fleet, model and settings."""
        facts = _facts(self.experiment, self.content)
        return json.dumps({key: value for key, value in facts.items() if key not in ("strategy", "rounds")})

    @functools.cached_property
    def folder(self) -> str:
        """Where the cell is kept, below the store's folder."""
        experiment = self.experiment
        facts = [VERSION, _facts(experiment, self.content)]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        name = experiment.data.dataset
        name = Path(name).name if is_path_of_data(name) else name
        world = f"{name}-{experiment.data.partition}-{experiment.model.network}"
        return f"{_slug(world)[:100]}/{portable_name(experiment.strategy[0].name)}-seed-{experiment.seed}-{digest}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def _facts(experiment: Experiment, content: str | None) -> dict[str, Any]:
    """What the tables are a function of; defaults are left out, so that a new option does not lose what was run."""
    facts = experiment.model_dump(mode="json", exclude_defaults=True, exclude={"name", "targets", "strategy"})
    if experiment.fleet.file is not None:  # what it says, wherever it lies
        try:
            facts["fleet"]["file"] = hashlib.sha256(Path(experiment.fleet.file).read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"cannot read {experiment.fleet.file}: {error.strerror}") from error
    if is_path_of_data(experiment.data.dataset):
        facts["data"]["dataset"] = content or content_digest(experiment.data.dataset)
    section = experiment.strategy[0]
    plain = _defaults(section.name)
    options = {key: value for key, value in section.options.items() if plain.get(key, ...) != value}
    return facts | {"strategy": {"name": section.name, **options}}


@functools.cache
def _defaults(strategy: str) -> dict[str, Any]:
    return dataclasses.asdict(construct(strategy, {})) if ":" not in strategy else {}


def cells(experiment: Experiment, seeds: Iterable[int], contents: Mapping[str, str] | None = None) -> list[Cell]:
    """Every strategy of an experiment on every seed; contents: digests of data sets, by name."""
    content = (contents or {}).get(experiment.data.dataset)
    return [
        Cell(experiment.model_copy(update={"seed": seed, "strategy": (strategy,)}), content)
        for seed in seeds
        for strategy in experiment.strategy
    ]


def in_order(wanted: Iterable[Cell]) -> list[Cell]:
    """Each cell once, worlds together."""
    unique = {cell.folder: cell for cell in wanted}
    order: dict[str, int] = {}
    for cell in unique.values():
        order.setdefault(cell.world_key, len(order))
    return sorted(unique.values(), key=lambda cell: order[cell.world_key])


class Store:
    """A folder of finished cells; one that was interrupted goes on from its latest checkpoint.

    checkpoint_seconds: from one to the next (default: as often as costs 1 % of the time)
    whole: keep models, and what more rounds go on from, beside the tables
    follow: who is told about a cell's rounds
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_seconds: float | None = None,
        *,
        whole: bool = False,
        follow: Callable[[Cell], Following] | None = None,
    ) -> None:
        self.folder = folder
        self._checkpoint_seconds = checkpoint_seconds
        self._whole = whole
        self._follow = follow

    def has(self, cell: Cell) -> bool:
        """Whether the cell was run to its end: its folder gets its name only then."""
        return (self.folder / cell.folder / "config.toml").is_file()

    def place(self, cell: Cell) -> Path:
        """Where a finished cell lies."""
        return self.folder / cell.folder

    def partial(self, cell: Cell) -> Path:
        """Where a cell lies that is under way."""
        return self.folder / f"{cell.folder}.partial"

    def missing(self, wanted: Iterable[Cell]) -> list[Cell]:
        """Those still to be run, each once, worlds together."""
        return in_order(cell for cell in wanted if not self.has(cell))

    def run(
        self,
        wanted: Sequence[Cell],
        *,
        data_dir: Path | None = None,
        watch: Watch | None = None,
        **options: Any,
    ) -> Generator[Cell, None, None]:
        """Run what is missing, yielding each cell when it is kept; options: what a simulation is told."""
        for _, group in groupby(self.missing(wanted), key=lambda cell: cell.world_key):
            first, *rest = group
            with Simulation(build_world(first.experiment, data_dir), **options) as simulation:
                for cell in (first, *rest):
                    check_plans(simulation, cell.experiment)
                for cell in (first, *rest):
                    self._run(simulation, cell, watch)
                    yield cell

    def _run(self, simulation: Simulation, cell: Cell, watch: Watch | None) -> None:
        target, partial = self.place(cell), self.partial(cell)
        # Where nobody's training ends in finite numbers the run is over; it would end there again, and its tables tell.
        with contextlib.suppress(EverybodyDiverged):
            write_strategy(
                simulation,
                cell.experiment,
                partial,
                lambda record: watch(cell, record) if watch else None,
                self._checkpoint_seconds,
                following=self._follow(cell) if self._follow else None,
                whole=self._whole,
            )
        keep_identity(partial)
        shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
        partial.replace(target)

    def combine(self, experiment: Experiment, seed: int) -> Results:
        """The kept cells of an experiment and a seed as one run with all its strategies; empty where not run yet."""
        wanted = cells(experiment, [seed])
        found = {cell.label: load_results(self.folder / cell.folder) for cell in wanted if self.has(cell)}
        config = tomllib.loads(experiment.model_copy(update={"seed": seed}).to_toml())
        environments = [run.environment for run in found.values()]
        tables = {name: joined(name, found) for name in SCHEMAS}
        path = Path(f"{experiment.name}-seed-{seed}")
        combined = Results(path, config, environments[0] if environments else {}, {}, tables)
        return dataclasses.replace(combined, summary=summarise(combined))


def write_strategy(
    simulation: Simulation,
    experiment: Experiment,
    folder: Path,
    watch: Callable[[RoundRecord], None],
    checkpoint_seconds: float | None = None,
    *,
    following: Following | None = None,
    whole: bool = False,
) -> None:
    """Run the only strategy of an experiment on a world that is there already; leave config and tables in `folder`.

    What an interrupted call has left there is gone on with, if it was of the same experiment.
    """
    (section,) = experiment.strategy
    experiment = resolved(experiment, simulation.world)
    reuse_folder(folder, experiment, identity(experiment, simulation))
    nobody = Trackers(()).follow(folder, section.label, experiment.seed, settings_of(experiment, 0))
    with Lock(folder):
        checkpoints = Checkpoints(folder, 0, section.label, section.build(), checkpoint_seconds)
        with Tables(folder, seed=experiment.seed) as tables, following or nobody as told:
            tables.write_partition(label_counts_of(simulation.world))
            write_data_facts(folder, experiment, simulation.world)
            for record in simulate_rounds(simulation, experiment, checkpoints, tables, told):
                watch(record)
        if whole:
            checkpoints.keep_last(simulation, record)
            write_model(model_file(folder, experiment, section.label), record.state.model)


def joined(name: str, runs: Mapping[str, Results]) -> Any:
    """One table of several runs, under the labels they have here."""
    parts = [(label, run.tables[name]) for label, run in runs.items()]
    if name == "partition":
        return parts[0][1] if parts else SCHEMAS[name].empty_table()
    renamed = [
        table.set_column(0, "strategy", pa.array([label] * table.num_rows, pa.string())) for label, table in parts
    ]
    return pa.concat_tables([SCHEMAS[name].empty_table(), *renamed])
