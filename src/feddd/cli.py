"""The verbs. Each one prints for people, or JSON with --json; wrong input is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import click
import typer

from feddd import __version__
from feddd.cli_measure import bench, reproduce, run_on_testbed
from feddd.cli_options import DataDir, Json, Overrides, Stopped, Verb, print_json
from feddd.cli_presets import presets_app
from feddd.cli_run import run
from feddd.errors import InputError, RunError

INTERRUPTED = 130  # what shells call a process ended by Ctrl-C

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    epilog="Start with `feddd run`: four methods on 100 unequal clients, in about a minute, without a download.",
)
data_app = typer.Typer(help="Bring a data set, or look at how an experiment spreads it.", no_args_is_help=True)
app.add_typer(presets_app, name="presets")
app.add_typer(data_app, name="data")


@app.callback()
def feddd(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Federated learning over slow, unequal links: FedDD, FedAvg, FedCS and Oort on a byte-true simulator."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; every expected failure is one line."""
    try:
        code = app(standalone_mode=False, prog_name="feddd")
        if code == INTERRUPTED:
            _fail("interrupted", INTERRUPTED)
    except Stopped as stop:
        _fail(str(stop), stop.code)
    except click.exceptions.Abort:
        _fail("interrupted", INTERRUPTED)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except InputError as error:
        _fail(str(error), 2)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _fail("; ".join([f"{named}{error.strerror or error}", *_notes(error)]), 1)
    except RunError as error:
        _fail("; ".join([str(error), *_notes(error)]), 1)


def _notes(error: Exception) -> list[str]:
    """How to go on, where whoever raised it knew."""
    return getattr(error, "__notes__", [])


def _fail(reason: str, code: int) -> None:
    # What a reason quotes may come from a stranger's file, and a terminal obeys some characters.
    line = "".join(letter if letter.isprintable() else "�" for letter in " ".join(reason.split()))
    sys.stderr.write(f"feddd: {line}\n")
    sys.exit(code)


app.command(cls=Verb)(run)


@app.command(cls=Verb)
def plan(
    fleet: Annotated[
        Path, typer.Argument(help="CSV: client, uplink_bits_per_s, downlink_bits_per_s, compute_seconds …")
    ],
    budget: Annotated[float, typer.Option(help="A: share of all parameters to be uploaded.")] = 0.6,
    max_dropout: Annotated[float, typer.Option(help="D_max: no client drops more.")] = 0.8,
    penalty: Annotated[float, typer.Option(help="Weight of the contribution, relative to the full round time.")] = 0.1,
    model_bits: Annotated[
        float | None, typer.Option(help="Model size where the file has none; default: the MLP's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a budget would cost a fleet: rates, round time and bytes, and the curve over budgets."""
    from feddd.experiments.planning import plan_fleet
    from feddd.reporting import print_plan

    planned = plan_fleet(fleet, budget=budget, max_dropout=max_dropout, penalty=penalty, model_bits=model_bits)
    if as_json:
        print_json(planned)
    else:
        print_plan(planned)


@app.command(cls=Verb)
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs or sweeps; several seeds of one experiment become bands.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html and pictures; default: the run's, for several runs/comparison-TIMESTAMP."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make report.html and picture files from the tables of runs."""
    from feddd.experiments.figures import write_figures
    from feddd.experiments.report import write_report
    from feddd.experiments.results import load_results
    from feddd.sweeps.figures import write_sweep_figures
    from feddd.sweeps.folders import is_sweep
    from feddd.sweeps.report import write_sweep_report
    from feddd.sweeps.results import load_sweep

    sweeps = {folder: load_sweep(folder) for folder in folders if is_sweep(folder)}
    results = [
        run for folder in folders for run in (sweeps[folder].runs if folder in sweeps else [load_results(folder)])
    ]
    target = out or (folders[0] if len(folders) == 1 else _comparison_folder())
    target.mkdir(parents=True, exist_ok=True)
    if len(folders) == len(sweeps) == 1:
        page = write_sweep_report(sweeps[folders[0]], target / "report.html")
    else:
        page = write_report(results, target / "report.html")
    pictures = write_figures(results, target / "figures")
    for one in sweeps.values():
        pictures += write_sweep_figures(one, target / "figures")
    if as_json:
        print_json({"report": str(page), "figures": [str(path) for path in pictures]})
    else:
        typer.echo(f"{page}\n{target / 'figures'}: {len(pictures)} pictures")


app.command(cls=Verb)(reproduce)
app.command("testbed", cls=Verb)(run_on_testbed)
app.command(cls=Verb)(bench)


@data_app.command("fetch", cls=Verb)
def data_fetch(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Bring a data set into the data folder, checked against its checksums."""
    from feddd.world.fetching import fetch

    folder = fetch(name, data_dir)
    if as_json:
        print_json({"dataset": name, "folder": str(folder)})
    else:
        typer.echo(f"{name} is in {folder}")


@data_app.command("show", cls=Verb)
def data_show(
    experiment: Annotated[str, typer.Argument(help="A preset's name or a TOML file.")],
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Another split.")] = None,
    out: Annotated[Path, typer.Option(help="Where to put the picture.")] = Path("partition.png"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Draw how an experiment spreads its data over the clients."""
    from feddd.experiments.figures import partition_figure
    from feddd.experiments.loading import load_experiment
    from feddd.experiments.plotting import check_format
    from feddd.experiments.running import preview

    check_format(out)
    loaded = load_experiment(experiment, overrides or (), {} if seed is None else {"seed": seed})
    results = preview(loaded, data_dir)
    partition_figure([results]).savefig(out, dpi=150)
    table = results.tables["partition"]
    if as_json:
        print_json({"picture": str(out), "partition": table.to_pylist()})
        return
    samples = [row["samples_sum"] for row in table.group_by("client").aggregate([("samples", "sum")]).to_pylist()]
    typer.echo(
        f"{loaded.data.dataset}, {loaded.data.partition}: {len(samples)} clients, {sum(samples)} samples, "
        f"{min(samples)} to {max(samples)} each; picture: {out}"
    )


def _comparison_folder() -> Path:
    """Name a folder that is not there yet, for a page about several runs: none of them loses its own."""
    stamped = f"comparison-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stamped, *(f"{stamped}-{number}" for number in range(2, 1000)))
    return next(folder for folder in (Path("runs") / name for name in names) if not folder.exists())
