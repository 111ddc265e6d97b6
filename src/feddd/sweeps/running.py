"""From a grid to a folder with all its cells, and on with one that was interrupted or is to get more rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddd.errors import InputError
from feddd.experiments.cells import Cell, Store, Watch, in_order
from feddd.experiments.config import Experiment
from feddd.experiments.extending import extend
from feddd.experiments.folders import REFRESH_SECONDS, Lock, to_json
from feddd.experiments.loading import load_experiment
from feddd.experiments.results import CHECKPOINTS, is_finished
from feddd.experiments.resuming import resumable
from feddd.experiments.running import settings_of, simulation_options
from feddd.files import write_atomically
from feddd.simulation.simulator import EngineName
from feddd.simulation.worker_process import WorkerPool
from feddd.sweeps.folders import CELLS, Index, check_contents, create, find_imports, read_index, write_index
from feddd.sweeps.grid import MOST_RUNS, Axis, Grid, make_grid, own_contents
from feddd.sweeps.report import write_sweep_report
from feddd.sweeps.results import SweepResults, load_sweep
from feddd.tracking.following import Following, Trackers, Wanted, remembered
from feddd.world.sources import is_path_of_data

PAGE_SHARE = 0.05
"""The page about a sweep that goes on takes at most this share of its time."""


def sweep(
    experiment: Experiment | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    seeds: int = 1,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    ray_address: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    watch: Watch | None = None,
    pool: WorkerPool | None = None,
    checkpoint_seconds: float | None = None,
    track: Sequence[Wanted] = (),
) -> SweepResults:
    """Run an experiment on several seeds and with every combination of the values of some keys, in one folder.

    seeds: how many, from the experiment's own upwards    sweep: values by dotted key, e.g. "strategy.feddd.budget"
    watch: called after every round with the cell (one strategy on one seed) and its record
    The other arguments are those of `run`. What does not depend on a key is run once and shared.
    """
    axes = [Axis(key, tuple(values)) for key, values in (sweep or {}).items()]
    if not isinstance(experiment, Experiment):
        axes = beside(axes, Path(experiment))
        experiment = load_experiment(experiment)
    grid = plan_sweep(experiment, seeds, axes)
    options = simulation_options(workers, engine, ray_address, state_dir, False, pool)
    trackers = Trackers(track)
    in_order(grid.cells)  # whatever they are made from can be read
    grid = dataclasses.replace(grid, contents=own_contents(grid))
    folder = create(grid, out)
    try:
        trackers.remember(folder)
        return _go_on(folder, read_index(folder), options, data_dir, watch, checkpoint_seconds, trackers)
    except InputError:
        if not (folder / CELLS).exists():  # nothing was run: nothing is left behind
            shutil.rmtree(folder)
        raise


def beside(axes: Sequence[Axis], experiment: Path) -> list[Axis]:
    """Look for files of fleets and data beside the experiment's file, then in the current folder."""

    def find(name: object) -> str:
        near, here = experiment.parent.absolute() / str(name), Path(str(name)).absolute()
        return str(here if here.exists() and not near.exists() else near)

    def is_path(key: str, value: object) -> bool:
        return key == "fleet.file" or (key == "data.dataset" and isinstance(value, str) and is_path_of_data(value))

    return [
        Axis(axis.key, tuple(find(value) if is_path(axis.key, value) else value for value in axis.values))
        for axis in axes
    ]


def plan_sweep(experiment: Experiment, seeds: int, axes: Sequence[Axis]) -> Grid:
    """Work out what is to be run, from the experiment's seed upwards."""
    if type(seeds) is not int or seeds < 1:
        raise InputError(f"--seeds must be a whole number of at least 1, not {seeds}")
    if seeds > MOST_RUNS:
        raise InputError(f"--seeds {seeds}: more than {MOST_RUNS} are not taken")
    return make_grid(experiment, axes, range(experiment.seed, experiment.seed + seeds))


def resume_sweep(
    folder: str | os.PathLike[str],
    *,
    rounds: int | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    ray_address: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    watch: Watch | None = None,
    pool: WorkerPool | None = None,
    checkpoint_seconds: float | None = None,
    track: Sequence[Wanted] | None = None,
) -> SweepResults:
    """Go on with an interrupted sweep, or give all its cells more rounds; a finished one is read."""
    folder = Path(folder)
    index = lengthened(folder, rounds)
    find_imports(index)
    options = simulation_options(workers, engine, ray_address, state_dir, False, pool)
    if is_finished(folder) and not _store(folder).missing(index.grid.cells):
        return load_sweep(folder)
    check_contents(folder, index)
    trackers = Trackers(remembered(folder) if track is None else track)
    trackers.remember(folder)
    return _go_on(folder, index, options, data_dir, watch, checkpoint_seconds, trackers)


def lengthened(folder: Path, rounds: int | None) -> Index:
    """What a sweep's folder is to hold when it has so many rounds; fewer than it has are refused."""
    index = read_index(folder)
    grid, before = index.grid, index.grid.base.rounds
    if rounds is None or rounds == before:
        return index
    if any(axis.key == "rounds" for axis in grid.axes):
        raise InputError(f"--rounds {rounds}: {folder} compares numbers of rounds, it cannot get more of them")
    if rounds < before:
        raise InputError(f"--rounds {rounds}: {folder} has {before} rounds already, and none can be taken away")
    longer = make_grid(grid.base.model_copy(update={"rounds": rounds}), grid.axes, grid.seeds, grid.contents)
    return Index(longer, (*index.before, before), index.imports)


def missing_cells(folder: Path, index: Index) -> list[Cell]:
    """What is still to be run."""
    return _store(folder).missing(index.grid.cells)


def _store(folder: Path) -> Store:
    return Store(folder / CELLS)


def _go_on(
    folder: Path,
    index: Index,
    options: Mapping[str, Any],
    data_dir: str | os.PathLike[str] | None,
    watch: Watch | None,
    checkpoint_seconds: float | None,
    trackers: Trackers,
) -> SweepResults:
    with Lock(folder), resumable(folder):
        write_index(folder, index)
        names = load_sweep(folder).cell_names()

        def follow(cell: Cell) -> Following:
            settings = settings_of(cell.experiment, 0)
            return trackers.follow(folder, names[cell.folder], cell.experiment.seed, settings)

        store = Store(folder / CELLS, checkpoint_seconds, whole=True, follow=follow)
        wanted = index.grid.cells
        _take_over(store, wanted, index.before)
        page = _Page(folder)
        where = Path(data_dir) if data_dir is not None else None
        with contextlib.closing(store.run(wanted, data_dir=where, watch=watch, **options)) as running:
            for _ in running:
                page.renew()
        return finish(folder)


def _take_over(store: Store, wanted: Sequence[Cell], before: Sequence[int]) -> None:
    """Let cells that are to get more rounds go on from where those with fewer rounds ended."""
    for cell in store.missing(wanted):
        target = store.partial(cell)
        if target.exists():
            continue
        for rounds in sorted(before, reverse=True):
            shorter = Cell(cell.experiment.model_copy(update={"rounds": rounds}), cell.content)
            found = [path for path in (store.place(shorter), store.partial(shorter)) if path.is_dir()]
            if found:
                with Lock(found[0]):
                    extend(found[0], cell.experiment.rounds)
                found[0].rename(target)
                break


class _Page:
    """The page about a sweep that goes on: renewed after a cell, but seldom enough to cost little."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = time.monotonic()

    def renew(self) -> None:
        """Write the page again if it is time for it."""
        begun = time.monotonic()
        if begun < self._next:
            return
        # Where there is no room for the page there may be for the tables, which are what counts.
        with contextlib.suppress(OSError, InputError):
            write_sweep_report(load_sweep(self._folder), self._folder / "report.html", REFRESH_SECONDS)
        cost = time.monotonic() - begun
        self._next = time.monotonic() + cost / PAGE_SHARE


def finish(folder: Path) -> SweepResults:
    """Sum up and draw what the cells say; after that there is nothing to go on with."""
    results = load_sweep(folder)
    write_atomically(folder / "summary.json", to_json(results.summary).encode())
    write_sweep_report(results, folder / "report.html")
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return results
