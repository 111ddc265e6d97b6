"""What the command line shows people: progress with time left, the summary after a run, a fleet's plan."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from feddd.cli_progress import ProgressLines
from feddd.experiments.cells import Cell
from feddd.experiments.config import Experiment
from feddd.experiments.metrics import Metric, metric_of
from feddd.experiments.results import Results
from feddd.experiments.running import Progress as RoundDone
from feddd.experiments.views import human_bytes, human_seconds, lines, not_counted
from feddd.paper.tables import Drawn
from feddd.simulation.simulator import RoundRecord


class _Bar:
    """Shows its bar inside a `with`; nothing where nobody watches."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class RunProgress(_Bar):
    """A bar over all rounds of a run; nothing where nobody watches."""

    def __init__(self, experiment: Experiment, *, hidden: bool, lines: bool = False) -> None:
        """hidden: no bar    lines: a line now and then where there is no terminal"""
        console = Console(stderr=True)
        self._lines = ProgressLines() if lines and not console.is_terminal else None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=hidden or not console.is_terminal,
        )
        self._metric = metric_of(experiment.model_dump(include={"task"}))
        self._rounds, self._total = experiment.rounds, experiment.rounds * len(experiment.strategy)
        total = self._total
        self._before = {section.label: n * experiment.rounds for n, section in enumerate(experiment.strategy)}
        self._task = self._bar.add_task(experiment.name, total=total, state="starting")

    def __call__(self, done: RoundDone) -> None:
        """One more round is done."""
        evaluation = done.record.evaluation
        # A run that was resumed begins somewhere in the middle.
        before = self._before[done.label] + done.record.round - 1
        self._bar.update(self._task, completed=before)
        self.advance(done.label, evaluation.metric if evaluation else None)
        if self._lines:
            words = f"{done.label}, round {done.record.round} of {self._rounds}{_tested(done.record, self._metric)}"
            self._lines.tell(before / self._total, (before + 1) / self._total, words)

    def advance(self, label: str, value: float | None) -> None:
        """One more round of this strategy is done; value: of the metric, if it was tested."""
        shown = f" {self._metric.show(value).replace(' ', '')}" if value is not None else ""
        self._bar.update(self._task, advance=1, description=escape(label), state=f"{shown:>6}")


def print_summary(results: Results, clock: str = "simulated") -> None:
    """The table that a run ends with; clock: what its seconds are."""
    targets = [float(target) for target in results.config["targets"]]
    reached = [t for t in targets if any(_time(s, t)["seconds"] is not None for s in _strategies(results).values())]
    console = Console()
    table = _summary_table(results, clock, reached[-2:])
    if console.measure(table, options=console.options.update_width(1000)).maximum > console.width:
        table = _summary_table(results, clock, reached[-1:])  # the report has all targets
    console.print(table)
    missed = [target for target in targets if target not in reached]
    if missed:
        names = ", ".join(_short_target(results, target) for target in missed)
        console.print(f"No strategy reached {names}.", highlight=False)
    absent = _not_counted(results)
    if absent:
        console.print(absent, soft_wrap=True, highlight=False, markup=False)
    console.print(f"report: {results.path / 'report.html'}", soft_wrap=True, highlight=False, markup=False)


def _short_target(results: Results, target: float) -> str:
    """80%, or the metric's name and the number."""
    metric = results.metric
    return f"{target:.0%}" if metric.percent else f"{metric.name} {metric.show_target(target)}"


def _summary_table(results: Results, clock: str, targets: Sequence[float]) -> Table:
    table = Table(
        title=f"{results.config['name']}: {results.config['rounds']} rounds, {clock} time",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    metric = results.metric
    worst = ["worst tenth"] if any("worst_tenth_of_clients" in one for one in _strategies(results).values()) else []
    goals = [f"to {_short_target(results, target)}" for target in targets]
    for column in ("strategy", escape(metric.name), *worst, clock, "bytes", *map(escape, goals)):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for label, summary in _strategies(results).items():
        table.add_row(
            escape(label),
            _or_dash(summary["final_metric"], metric.show),
            *(_or_dash(summary.get("worst_tenth_of_clients"), metric.show) for _ in worst),
            _or_dash(summary["clock_seconds"], human_seconds),
            human_bytes(summary["upload_bytes"] + summary["download_bytes"]),
            *(_time_cell(_time(summary, target)) for target in targets),
        )
    return table


def _not_counted(results: Results) -> str:
    """Return one line on the answers that did not count, by kind; nothing if all did."""
    kinds: Counter[str] = Counter()
    for line in lines([results]):
        for reason, count in not_counted(line).items():
            kinds[reason.partition(":")[0]] += count
    asked = results.tables["clients"].num_rows
    words = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    return f"Of {asked:,} answers asked for, {kinds.total():,} did not count: {words}." if kinds else ""


def print_plan(planned: Mapping[str, Any]) -> None:
    """A fleet's plan: totals, the rates (the slowest clients first), and the curve over budgets."""
    console = Console()
    saved = 1 - planned["round_seconds"] / planned["full_round_seconds"]
    console.print(
        f"{planned['clients_count']} clients at budget {planned['budget']:g}: "
        f"{planned['round_seconds']:.1f} s a round instead of {planned['full_round_seconds']:.1f} s "
        f"(−{saved:.0%}), {human_bytes(planned['upload_bytes'])} up "
        f"instead of {human_bytes(planned['full_upload_bytes'])}",
        soft_wrap=True,
        highlight=False,
    )
    rows = sorted(planned["clients"], key=lambda row: -row["dropout"])
    rates = Table(title="dropout rates", title_justify="left")
    for column in ("client", "dropout", "upload", "seconds"):
        rates.add_column(column, justify="left" if column == "client" else "right")
    shown = rows if len(rows) <= 20 else rows[:10] + rows[-10:]
    for row in shown:
        rates.add_row(
            escape(row["client"]), f"{row['dropout']:.3f}", human_bytes(row["upload_bytes"]), f"{row['seconds']:.1f}"
        )
    console.print(rates)
    if len(rows) > len(shown):
        console.print(f"({len(rows) - len(shown)} clients in between; --json has all)")
    curve = Table(title="over budgets", title_justify="left")
    for column in ("budget", "round", "upload a round", "mean dropout"):
        curve.add_column(column, justify="right")
    for point in planned["curve"]:
        upload, seconds = human_bytes(point["upload_bytes"]), f"{point['round_seconds']:.1f} s"
        curve.add_row(f"{point['budget']:.2f}", seconds, upload, f"{point['mean_dropout']:.2f}")
    console.print(curve)
    shortest = planned["curve"][0]["round_seconds"]
    if sum(point["round_seconds"] <= shortest * (1 + 1e-9) for point in planned["curve"]) > 1:
        console.print(
            f"No budget gets below {shortest:.1f} s: the slowest client needs it even at max_dropout "
            f"{planned['max_dropout']:g}.",
            soft_wrap=True,
            highlight=False,
        )


def _strategies(results: Results) -> Mapping[str, Any]:
    strategies: Mapping[str, Any] = results.summary["strategies"]
    return strategies


def _time(summary: Mapping[str, Any], target: float) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(time for time in summary["time_to_target"] if time["target"] == target)
    return found


def _time_cell(time: Mapping[str, Any]) -> str:
    if time["seconds"] is None:
        return "never"
    ratio = time["ratio_to_fedavg"]
    return human_seconds(time["seconds"]) + (f" (×{ratio:.2f})" if ratio is not None else "")


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "–" if value is None else show(value)


class ReproduceProgress(_Bar):
    """A bar over all cells of a reproduction, by what they cost."""

    def __init__(
        self, missing: Sequence[Cell], *, hidden: bool, lines: bool = False, names: Mapping[str, str] | None = None
    ) -> None:
        """hidden: no bar    lines: now and then where there is no terminal    names: of cells, by their folder"""
        self._names = names or {}
        console = Console(stderr=True)
        self._lines = ProgressLines() if lines and not console.is_terminal else None
        self._places = {cell.folder: place for place, cell in enumerate(missing)}
        self._before = [0.0, *itertools.accumulate(cell.cost for cell in missing)]
        self._cost = self._before[-1]
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=hidden or not console.is_terminal,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("starting", total=self._cost)

    def watch(self, cell: Cell, record: RoundRecord) -> None:
        """One more round of a cell is done."""
        experiment, place = cell.experiment, self._places.get(cell.folder, 0)
        name = self._names.get(cell.folder, f"{experiment.name} seed {experiment.seed} {cell.label}")
        what = f"{place + 1}/{len(self._places)} {name}"
        # A cell that is gone on with begins somewhere in the middle.
        each = cell.cost / experiment.rounds
        before = self._before[place] + each * (record.round - 1)
        self._bar.update(self._task, completed=before + each, description=escape(f"{what} round {record.round}"))
        if self._lines:
            metric = metric_of(experiment.model_dump(include={"task"}))
            words = f"{what}, round {record.round} of {experiment.rounds}{_tested(record, metric)}"
            self._lines.tell(before / self._cost, (before + each) / self._cost, words)


def _tested(record: RoundRecord, metric: Metric) -> str:
    return f", {metric.name} {metric.show(record.evaluation.metric)}" if record.evaluation else ""


def print_rows(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]], page: Path) -> None:
    """Print the first of some tables (title, head, rows) that fits, else the last, and where the page about it is."""
    console = Console()
    drawn = [_text_table(*table) for table in tables]
    wide = console.options.update_width(1000)
    fitting = (table for table in drawn if console.measure(table, options=wide).maximum <= console.width)
    console.print(next(fitting, drawn[-1]))
    console.print(f"report: {page}", soft_wrap=True, highlight=False, markup=False)


def _text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for place, column in enumerate(head):
        table.add_column(escape(column), justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_figures(drawn: Sequence[Drawn]) -> None:
    """What the paper says, what was measured, and where the pictures are."""
    console = Console()
    for one in drawn:
        number = f" (the paper's figure {one.figure.number})" if one.figure.number else ""
        console.print(f"\n[bold]{one.figure.name}[/bold]: {one.figure.title}{number}", highlight=False)
        console.print(" ".join(one.notes), style="dim", highlight=False)
        if one.claims:
            rows = [[row.claim, row.paper, row.ours, row.difference] for row in one.claims]
            console.print(_grid(["the paper says", "paper", "ours", "ours − paper"], rows))
        else:
            for title, (head, *body) in one.tables:
                console.print(_grid(head, body, title))
        console.print(f"files: {one.files[0].with_suffix('')}.*", soft_wrap=True, highlight=False, markup=False)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in head:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
