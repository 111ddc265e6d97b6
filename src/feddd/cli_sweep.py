"""`feddd run` with --seeds or --sweep, and its folders on --resume: many cells behind one bar, and one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from feddd.errors import InputError

if TYPE_CHECKING:
    from feddd.simulation.worker_process import WorkerPool
    from feddd.sweeps.results import SweepResults


def run_sweep(
    asked: Mapping[str, Any], pool: WorkerPool, options: dict[str, Any], *, quiet: bool, as_json: bool
) -> SweepResults:
    """Begin a sweep; asked: the options by their names."""
    from feddd.experiments.cells import in_order
    from feddd.experiments.loading import load_experiment
    from feddd.reporting import ReproduceProgress
    from feddd.sweeps.folders import Index
    from feddd.sweeps.grid import parse_axis
    from feddd.sweeps.results import SweepResults
    from feddd.sweeps.running import beside, plan_sweep, sweep

    base = {key: asked[f"--{key}"] for key in ("seed", "rounds") if asked[f"--{key}"] is not None}
    loaded = load_experiment(asked["EXPERIMENT"] or "quickstart", asked["--set"] or (), base)
    axes = beside([parse_axis(text) for text in asked["--sweep"] or ()], Path(asked["EXPERIMENT"] or "quickstart"))
    seeds = 1 if asked["--seeds"] is None else asked["--seeds"]
    grid = plan_sweep(loaded, seeds, axes)
    names = SweepResults(Path(), Index(grid)).cell_names()
    with ReproduceProgress(in_order(grid.cells), hidden=quiet or as_json, lines=not quiet, names=names) as progress:
        return sweep(
            loaded,
            asked["--out"],
            seeds=seeds,
            sweep={axis.key: axis.values for axis in _once(axes)},
            watch=progress.watch,
            pool=pool,
            **options,
        )


def _once(axes: Sequence[Any]) -> Sequence[Any]:
    """Return a dict would forget an axis that is given twice."""
    keys = [axis.key for axis in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise InputError(f"--sweep {twice} is given twice; all its values go into one: {twice}=A,B")
    return axes


def go_on(
    folder: Path, rounds: int | None, pool: WorkerPool, options: dict[str, Any], *, quiet: bool, as_json: bool
) -> SweepResults:
    """Go on with a sweep; one with nothing left to do is read at once."""
    from feddd.experiments.results import is_finished
    from feddd.reporting import ReproduceProgress
    from feddd.sweeps.results import SweepResults
    from feddd.sweeps.running import lengthened, missing_cells, resume_sweep

    index = lengthened(folder, rounds)
    missing, names = missing_cells(folder, index), SweepResults(folder, index).cell_names()
    if not missing and is_finished(folder) and not (quiet or as_json):
        typer.echo(f"{folder} is finished: there is nothing to resume")
    hidden = quiet or as_json or not missing
    with ReproduceProgress(missing, hidden=hidden, lines=not quiet, names=names) as progress:
        return resume_sweep(folder, rounds=rounds, watch=progress.watch, pool=pool, **options)


def print_sweep(results: SweepResults) -> None:
    """The table that a sweep ends with: a row for each strategy and setting, mean and interval over the seeds."""
    from feddd.reporting import print_rows
    from feddd.sweeps.tables import terminal_table

    widths = [(2, True), (1, True), (1, False), (0, False)]  # the report has everything
    print_rows([terminal_table(results, goals, clock=clock) for goals, clock in widths], results.path / "report.html")
