"""`feddd run`: simulate an experiment, or go on with one that was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddd.cli_options import DataDir, Engine, Json, Overrides, Seeds, Sweep, Track, print_json, stoppable
from feddd.errors import InputError

if TYPE_CHECKING:
    from feddd.experiments.results import Results
    from feddd.simulation.worker_process import WorkerPool
    from feddd.sweeps.results import SweepResults


def run(
    experiment: Annotated[
        str | None, typer.Argument(help="A preset's name or a TOML file; default: quickstart.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the results; default: runs/NAME-TIMESTAMP.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with an interrupted run in its folder, instead of an EXPERIMENT."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fleet, split, initial weights and batch order.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How many rounds to simulate; with --resume: go on to so many.")
    ] = None,
    seeds: Seeds = None,
    sweep: Sweep = None,
    track: Track = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; default: one per core. Same numbers.")] = None,
    engine: Annotated[
        Engine, typer.Option(help="Where the workers run: processes here, or actors of a Ray cluster. Same numbers.")
    ] = Engine.local,
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster; default: RAY_ADDRESS, else a new one on this machine.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Keep clients' state in files here: for fleets larger than memory.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option(help="Save so often what --resume goes on from; default: as often as costs 1 % of the time."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no summary.")] = False,
) -> None:
    """Simulate an experiment: every strategy in it on the same clients, data and links.

    Leaves tables, models and report.html in a new folder. A run that was interrupted, however, goes on with --resume.

    Examples: `feddd run`   `feddd run mnist-iid --rounds 50`   `feddd run my.toml --set strategy.feddd.budget=0.4`
    `feddd run --resume runs/my-20260101-120000`   `feddd run --seeds 3 --sweep strategy.feddd.budget=0.4,0.6`
    """
    asked = {
        **{"EXPERIMENT": experiment, "--set": overrides, "--out": out, "--seed": seed, "--rounds": rounds},
        **{"--seeds": seeds, "--sweep": sweep},
    }
    options = {
        **{"workers": workers, "engine": engine.value, "ray_address": ray_address, "state_dir": state_dir},
        **{"data_dir": data_dir, "checkpoint_seconds": checkpoint_seconds, "track": _trackers(track, resume)},
    }
    _check(asked, resume, checkpoint_seconds)
    with stoppable():
        results = _run(asked, resume, options, quiet=quiet, as_json=as_json)
    if as_json:
        print_json({"folder": str(results.path), **results.summary})
    elif not quiet:
        _print(results)


def _print(results: Results | SweepResults) -> None:
    from feddd.experiments.results import Results
    from feddd.reporting import print_summary
    from feddd.tracking.following import FOLDER

    if isinstance(results, Results):
        print_summary(results)
    else:
        from feddd.cli_sweep import print_sweep

        print_sweep(results)
    if (results.path / FOLDER).is_dir():
        typer.echo(f"tracked: {results.path / FOLDER}")


def _trackers(given: list[str] | None, resume: Path | None) -> list[str] | None:
    """Who is asked to follow; on resume None stands for those who did before, and "none" for nobody."""
    if given is None:
        return None if resume is not None else []
    return [] if given == ["none"] else given


def _check(asked: Mapping[str, object], resume: Path | None, checkpoint_seconds: float | None) -> None:
    """Options that do not go together, and a folder that no run has left."""
    if checkpoint_seconds is not None and not checkpoint_seconds >= 0:
        raise InputError(f"--checkpoint-seconds must be at least 0, not {checkpoint_seconds}")
    if resume is not None:
        for name, value in asked.items():
            if value is not None and name != "--rounds":
                raise InputError(f"{name} cannot be given with --resume: the run goes on as it was begun")
        from feddd.experiments.results import check_run_folder

        if not _is_sweep(resume):
            check_run_folder(resume)


def _is_sweep(folder: Path | None) -> bool:
    return folder is not None and (folder / "sweep.toml").is_file()


def _run(
    asked: Mapping[str, Any], folder: Path | None, options: dict[str, Any], *, quiet: bool, as_json: bool
) -> Results | SweepResults:
    from feddd.experiments.results import is_finished, load_results
    from feddd.simulation.worker_process import WorkerPool, default_workers

    several, rounds = asked["--seeds"] is not None or asked["--sweep"], asked["--rounds"]
    if folder is not None and not _is_sweep(folder) and is_finished(folder) and not _longer(folder, rounds):
        if not (quiet or as_json):
            typer.echo(f"{folder} is finished: there is nothing to resume")
        return load_results(folder)
    workers = options["workers"]
    count = default_workers() if workers is None else min(workers, default_workers())
    # Workers import torch while this process does.
    with WorkerPool(count if options["engine"] == Engine.local and count > 1 else 0) as pool:
        from feddd.cli_sweep import go_on, run_sweep

        if folder is not None and _is_sweep(folder):
            return go_on(folder, rounds, pool, options, quiet=quiet, as_json=as_json)
        if several:
            return run_sweep(asked, pool, options, quiet=quiet, as_json=as_json)
        return _run_one(asked, folder, pool, options, hidden=quiet or as_json, lines=not quiet)


def _run_one(
    asked: Mapping[str, Any], folder: Path | None, pool: WorkerPool, options: dict[str, Any], **shown: bool
) -> Results:
    """A plain run; shown: what of its progress."""
    from feddd.experiments.loading import load_experiment
    from feddd.experiments.running import resume
    from feddd.experiments.running import run as run_experiment
    from feddd.reporting import RunProgress

    if folder is not None:
        found = load_experiment(folder / "config.toml")
        found = found.model_copy(update={"rounds": asked["--rounds"] or found.rounds})
        with RunProgress(found, **shown) as progress:
            return resume(folder, rounds=asked["--rounds"], watch=progress, pool=pool, **options)
    base = {key: asked[f"--{key}"] for key in ("seed", "rounds") if asked[f"--{key}"] is not None}
    loaded = load_experiment(asked["EXPERIMENT"] or "quickstart", asked["--set"] or (), base)
    with RunProgress(loaded, **shown) as progress:
        return run_experiment(loaded, asked["--out"], watch=progress, pool=pool, **options)


def _longer(folder: Path, rounds: int | None) -> bool:
    if rounds is None:
        return False
    from feddd.experiments.extending import is_longer

    return is_longer(folder, rounds)
