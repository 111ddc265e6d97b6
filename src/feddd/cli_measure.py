"""The verbs that measure: the paper's figures, and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddd.cli_options import DataDir, Json, Overrides, ScaleChoice, print_json, stoppable
from feddd.errors import InputError

if TYPE_CHECKING:
    from feddd.paper.reproduce import Request


def reproduce(
    figures: Annotated[
        list[str] | None, typer.Argument(metavar="[FIGURE]...", help="Which figures; default: all. See --list.")
    ] = None,
    scale: Annotated[
        ScaleChoice | None,
        typer.Option(help="smoke: seconds, means nothing; small: about an hour a figure; full: the paper's setting."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Only experiments whose name begins with this, * for anything; may be repeated."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds; default: the scale's.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs are kept and figures written; work goes on there.")] = Path(
        "runs/reproduce"
    ),
    report_too: Annotated[
        bool, typer.Option("--report", help="Also write an interactive page beside every picture.")
    ] = False,
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Run nothing; draw what there is.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one per core.")] = None,
    list_figures: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no tables.")] = False,
) -> None:
    """Run the paper's figures, draw them, and print the paper's numbers beside ours.

    What is finished is kept: interrupt it, and the same command goes on. Without a figure and a scale it lists them.

    Examples: `feddd reproduce accuracy-noniid-b --only mnist`   `feddd reproduce --scale smoke`
    """
    from feddd.paper.catalogue import FIGURES, figure_named
    from feddd.paper.reproduce import Request, draw
    from feddd.paper.scales import SCALES
    from feddd.reporting import ReproduceProgress, print_figures

    chosen = [figure_named(name) for name in dict.fromkeys(figures)] if figures else list(FIGURES)
    request = Request(chosen, SCALES[(scale or ScaleChoice.small).value], out, only or (), seeds, report_too, data_dir)
    if list_figures or not (figures or scale):
        _list_figures(request, as_json)
        return
    missing = [] if draw_only else request.store.missing(request.cells())
    with (
        stoppable("what is finished is kept, and the same command goes on"),
        ReproduceProgress(missing, hidden=as_json or quiet, lines=not quiet) as progress,
    ):
        for _ in request.store.run(missing, workers=workers, data_dir=data_dir, watch=progress.watch):
            pass
    drawn = draw(request)
    if as_json:
        print_json([json.loads(path.read_text()) for one in drawn for path in one.files if path.suffix == ".json"])
    elif not quiet:
        print_figures(drawn)


def _list_figures(request: Request, as_json: bool) -> None:
    rows = request.progress()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        number = f"Fig. {row['number']}" if row["number"] else ""
        kept = f"{row['kept']:>4} of {row['cells']} runs kept" if row["cells"] else "   needs no runs"
        typer.echo(f"{row['figure']:<31} {number:<8} {row['title']:<72} {kept}")
    typer.echo(
        f"At scale {request.scale.name}. `feddd reproduce FIGURE` runs one; --scale full is the paper's setting."
    )


def run_on_testbed(
    experiment: Annotated[str, typer.Argument(help="A preset's name or a TOML file, e.g. testbed-cifar10-iid.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the results; default: runs/NAME-TIMESTAMP.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fleet, split, initial weights and batch order.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to run.")] = None,
    deadline_seconds: Annotated[
        float, typer.Option(min=1, help="A round goes on without those that have not answered by then.")
    ] = 1800.0,
    shaping: Annotated[
        bool,
        typer.Option("--shaping/--no-shaping", help="Links as slow as the experiment says (needs root), or loopback."),
    ] = True,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys; only with --no-shaping, on loopback.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no summary.")] = False,
) -> None:
    """Run an experiment on a real Flower deployment: a SuperLink and a SuperNode per client, on this machine.

    Every client is a process in a network namespace of its own, behind a link shaped to the experiment's rates. The
    tables are those of a simulation, with wall seconds; wire.json has the bytes that passed the cables.
    """
    _check_flower()
    from feddd.experiments.loading import load_experiment
    from feddd.reporting import RunProgress, print_summary
    from feddd.testbed.running import Options, run_testbed

    base = {key: value for key, value in (("seed", seed), ("rounds", rounds)) if value is not None}
    loaded = load_experiment(experiment, overrides or (), base)
    options = Options(shaping, insecure, deadline_seconds, data_dir=data_dir)
    with RunProgress(loaded, hidden=as_json or quiet) as progress:
        results = run_testbed(loaded, out, options, lambda label, _, accuracy: progress.advance(label, accuracy))
    if as_json:
        print_json({"path": str(results.path), **results.summary})
    elif not quiet:
        print_summary(results, "wall")


def _check_flower() -> None:
    """Refuse to begin without Flower, which comes with an extra and brings what makes certificates."""
    if not all(find_spec(package) for package in ("flwr", "cryptography")):
        raise InputError('the testbed needs the extra flower: pip install "feddd[flower]"')


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Which benchmarks; default: all. See --list."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PYTHON", help="A Python that has flower, pfl, fedlab or jax; may be repeated."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every contestant; figures are medians.")] = 9,
    full: Annotated[bool, typer.Option("--full", help="Also HiGHS with 100,000 clients, which takes minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json, .md and .png; default: runs/bench-TIMESTAMP.")
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the benchmarks and exit.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Measure: rounds beside plain loops and other frameworks, and what rounds are made of; ratios within one run.

    Examples: `feddd bench throughput`   `feddd bench engine --peer flower=peers/flower/bin/python`
    """
    from feddd.benchmarks.measuring import Settings
    from feddd.benchmarks.printing import BenchProgress
    from feddd.benchmarks.suite import BENCHMARKS, run_suite, write_results

    if list_names:
        about = {name: (benchmark.__doc__ or "").strip() for name, benchmark in BENCHMARKS.items()}
        if as_json:
            print_json([{"name": name, "about": text} for name, text in about.items()])
        else:
            typer.echo("\n".join(f"{name:<11} {text}" for name, text in about.items()))
        return
    settings = Settings(rounds, _peers(peer or ()), data_dir, full)
    with BenchProgress(hidden=as_json) as progress:
        figures = []
        for figure in run_suite(names or (), settings, progress.begin):
            figures.append(figure)
            progress.show(figure)
    folder = out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    paths = write_results(figures, folder)
    if as_json:
        print_json({"folder": str(folder), "figures": [figure.to_dict() for figure in figures]})
    else:
        typer.echo(f"{folder}: {', '.join(path.name for path in paths)}")


def _peers(given: Sequence[str]) -> dict[str, Path]:
    peers = {}
    for text in given:
        name, equals, python = text.partition("=")
        if not equals or not name or not python:
            raise InputError(f"--peer takes NAME=PYTHON, not {text!r}")
        peers[name] = Path(python)
    return peers
