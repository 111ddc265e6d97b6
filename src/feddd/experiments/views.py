"""What the report and the pictures show, worked out from the tables: lines, curves, targets, matrices, time lines.

A line is one strategy of one experiment; runs that differ in nothing but their seed share it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from feddd.experiments.metrics import Metric, common_metric
from feddd.experiments.results import Results, reference_label

# Okabe and Ito's colours without yellow and black, which vanish on a white or a dark page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")

_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?(?![\w.])")
_T = TypeVar("_T")

_MOST_CELLS = 2000
"""A picture has at most so many rows and so many columns: a table can name as many of each as it has rows."""

_SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class Line:
    """One strategy of one experiment: its label on the page and in the tables, FedAvg's label, and its runs."""

    index: int
    label: str
    strategy: str
    reference: str | None
    runs: tuple[Results, ...]

    @property
    def colour(self) -> str:
        """Return the same colour in every picture."""
        return COLOURS[self.index % len(COLOURS)]

    @property
    def metric(self) -> Metric:
        """Return what its models are tested by."""
        return self.runs[0].metric

    @property
    def finished(self) -> bool:
        """Return whether every run has all its rounds of this strategy."""
        return all(rounds_done(run, self.strategy) >= run.config["rounds"] for run in self.runs)


@dataclass(frozen=True)
class Point:
    """The global model after a round in which it was tested; bytes go both ways and count from the start."""

    round: int
    seconds: float
    bytes: int
    metric: float


@dataclass(frozen=True)
class Curve:
    """The metric over the rounds that all runs of a line were tested in: mean, lowest and highest."""

    rounds: list[int]
    seconds: list[float]
    bytes: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Reach:
    """How the runs of a line reached a target: seconds of those that did, ratios where FedAvg did too."""

    runs: int
    seconds: list[float]
    time_ratios: list[float]
    byte_ratios: list[float]


@dataclass(frozen=True)
class Matrix:
    """Values [rows, columns] with the names of rows and columns; NaN where there is nothing."""

    rows: list[int]
    columns: list[int]
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """What one client did in one round, in seconds."""

    client: int
    status: str
    download: float
    compute: float
    upload: float

    @property
    def total(self) -> float:
        """Return when the client was done."""
        return self.download + self.compute + self.upload


def experiments(results: Sequence[Results]) -> list[tuple[str, list[Results]]]:
    """Runs that differ in nothing but their seed, together, under a name of their own."""
    groups: list[list[Results]] = []
    for run in results:
        group = next((group for group in groups if _but_seed(group[0]) == _but_seed(run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    names = [str(group[0].config["name"]) for group in groups]
    unique = len(set(names)) == len(names)
    return [(name if unique else group[0].path.name, group) for name, group in zip(names, groups, strict=True)]


def _but_seed(run: Results) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key != "seed"}


def lines(results: Sequence[Results]) -> list[Line]:
    """Return one line per strategy and experiment, in the order of the configs."""
    groups = experiments(results)
    named = [(name, label, runs) for name, runs in groups for label in runs[0].labels]
    return [
        Line(
            index=index,
            label=label if len(groups) == 1 else f"{label} ({name})",
            strategy=label,
            reference=reference_label(runs[0].config),
            runs=tuple(runs),
        )
        for index, (name, label, runs) in enumerate(named)
    ]


def rounds_done(run: Results, strategy: str) -> int:
    """Return how many rounds of a strategy the run has behind it."""
    return int(pc.sum(pc.equal(run.tables["rounds"]["strategy"], strategy)).as_py() or 0)


def points(run: Results, strategy: str) -> list[Point]:
    """Return the rounds of a strategy after which the model was tested."""
    found, total = [], 0
    for row in run.rows("rounds", strategy=strategy):
        total += (row["upload_bytes"] or 0) + (row["download_bytes"] or 0)
        value = run.metric.tested(row)
        if value is not None and row["clock_seconds"] is not None:
            found.append(Point(row["round"], row["clock_seconds"], total, value))
    return found


def curve(line: Line) -> Curve:
    """Return the mean and the range over runs, at the rounds all of them have: a mean over fewer runs would jump."""
    runs = [{point.round: point for point in points(run, line.strategy)} for run in line.runs]
    begun = [run for run in runs if run]
    common = sorted(set.intersection(*(set(run) for run in begun))) if begun else []
    at = [[run[number] for run in begun] for number in common]
    return Curve(
        rounds=common,
        seconds=[fmean(point.seconds for point in row) for row in at],
        bytes=[fmean(point.bytes for point in row) for row in at],
        mean=[fmean(point.metric for point in row) for row in at],
        low=[min(point.metric for point in row) for row in at],
        high=[max(point.metric for point in row) for row in at],
    )


def reach(line: Line, target: float) -> Reach:
    """Return when the runs of a line first reached a target, and how that compares with the same run's FedAvg."""
    seconds, time_ratios, byte_ratios = [], [], []
    for run in line.runs:
        mine = _first(points(run, line.strategy), target, run.metric)
        reference = _first(points(run, line.reference), target, run.metric) if line.reference else None
        if mine:
            seconds.append(mine.seconds)
        if mine and reference and reference.seconds > 0 and reference.bytes > 0:
            time_ratios.append(mine.seconds / reference.seconds)
            byte_ratios.append(mine.bytes / reference.bytes)
    return Reach(len(line.runs), seconds, time_ratios, byte_ratios)


def missing_bar(line: Line, one: Reach) -> str:
    """Return why a line has no bar at a target: it was not reached, or FedAvg never reached it."""
    if one.seconds:
        return f"{human_seconds(fmean(one.seconds))} (FedAvg: none)"
    return "never" if line.finished else "not yet"


def _first(tested: Sequence[Point], target: float, metric: Metric) -> Point | None:
    return next((point for point in tested if metric.reached(point.metric, target)), None)


def targets(results: Sequence[Results]) -> list[float]:
    """Return all targets asked for, the one that is reached last at the end."""
    asked = {float(target) for run in results for target in run.config["targets"]}
    return metric_of_all(results).hardest_last(asked)


def metric_of_all(results: Sequence[Results]) -> Metric:
    """Return what all these runs are tested by."""
    return common_metric(run.config for run in results)


def thin(values: Sequence[_T], most: int) -> list[_T]:
    """At most `most` of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[int(at)] for at in np.linspace(0, len(values) - 1, most).round()]


def _client_rows(run: Results, strategy: str) -> Any:
    table = run.tables["clients"]
    return table.filter(pc.equal(table["strategy"], strategy))


def dropout_matrix(run: Results, strategy: str) -> Matrix | None:
    """Dropout rate [clients, rounds]; None for a strategy that drops nothing."""
    rows = _client_rows(run, strategy)
    if not (pc.max(rows["dropout"]).as_py() or 0) > 0:
        return None
    return _matrix(*(rows[column].to_numpy() for column in ("client", "round", "dropout")))


def partition_matrix(run: Results) -> Matrix | None:
    """Return the samples [labels, clients]; None where the partition is not known."""
    rows = run.tables["partition"]
    if not rows.num_rows:
        return None
    matrix = _matrix(*(rows[column].to_numpy() for column in ("label", "client", "samples")))
    return Matrix(matrix.rows, matrix.columns, np.nan_to_num(matrix.values))


def _matrix(rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any]) -> Matrix:
    row_names, column_names = (
        np.array(thin(np.unique(names).tolist(), _MOST_CELLS), np.int64) for names in (rows, columns)
    )
    shown = np.isin(rows, row_names) & np.isin(columns, column_names)
    filled = np.full((len(row_names), len(column_names)), np.nan)
    filled[np.searchsorted(row_names, rows[shown]), np.searchsorted(column_names, columns[shown])] = values[shown]
    return Matrix(row_names.tolist(), column_names.tolist(), filled)


def client_rounds(run: Results, strategy: str) -> list[int]:
    """Return the rounds of which the clients are recorded."""
    return sorted(pc.unique(_client_rows(run, strategy)["round"]).to_pylist())


def timelines(run: Results, strategy: str, rounds: Sequence[int]) -> Mapping[int, list[Timeline]]:
    """Return what each client did in these rounds; unknown seconds count as none.

    Slowest first, so that the round's straggler leads; clients that did not count come last.
    """
    rows = _client_rows(run, strategy)
    rows = rows.filter(pc.is_in(rows["round"], value_set=pa.array(rounds, pa.int64())))
    found: defaultdict[int, list[Timeline]] = defaultdict(list)
    for row in rows.to_pylist():
        seconds = [row[f"{phase}_seconds"] for phase in ("download", "compute", "upload")]
        if any(value is not None for value in seconds):
            found[row["round"]].append(Timeline(row["client"], row["status"], *(value or 0.0 for value in seconds)))
    return {
        number: sorted(found[number], key=lambda one: (one.status != "ok", -one.total, one.client))
        for number in sorted(found)
    }


def class_accuracies(line: Line) -> dict[int, list[float]]:
    """Return accuracy per class after the last round known, one value per run."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for run in line.runs:
        rows = [row for row in run.rows("classes", strategy=line.strategy) if row["accuracy"] is not None]
        last = max((row["round"] for row in rows), default=None)
        for row in rows:
            if row["round"] == last:
                found[row["label"]].append(row["accuracy"])
    return dict(sorted(found.items()))


def not_counted(line: Line) -> Counter[str]:
    """How often a client did not count, by reason, over all rounds and runs; reasons that differ in numbers are one."""
    counts: Counter[str] = Counter()
    for run in line.runs:
        for entry in pc.value_counts(_client_rows(run, line.strategy)["status"]).to_pylist():
            if entry["values"] not in ("ok", None):
                counts[_NUMBER.sub("…", entry["values"])] += entry["counts"]
    return counts


def time_unit(longest: float) -> tuple[float, str]:
    """Return seconds in the unit for durations up to this one, and its name."""
    return next((unit for unit in _SECONDS if longest >= 2 * unit[0]), _SECONDS[-1])


def byte_unit(most: float) -> tuple[float, str]:
    """Return the bytes in the unit for amounts up to this one, and its name."""
    return next((unit for unit in _BYTES if most >= unit[0]), _BYTES[-1])


def human(value: float, unit: tuple[float, str]) -> str:
    """Return a number of three digits with its unit: 1.23 GB, 12.3 min, 123 s."""
    scaled = value / unit[0]
    digits = 0 if scaled >= 100 or unit[1] == "B" else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {unit[1]}"


def human_seconds(seconds: float) -> str:
    """Return a duration in words people use."""
    return human(seconds, time_unit(seconds))


def human_bytes(number: float) -> str:
    """Return an amount of data in words people use."""
    return human(number, byte_unit(number))


def percent(share: float) -> str:
    """88.0 % for 0.88."""
    return f"{100 * share:.1f} %"
