"""What the report's interactive pictures draw, as plain lists and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from feddd.experiments.metrics import common_metric
from feddd.experiments.results import Results
from feddd.experiments.views import (
    Line,
    Matrix,
    byte_unit,
    class_accuracies,
    client_rounds,
    curve,
    dropout_matrix,
    lines,
    metric_of_all,
    missing_bar,
    partition_matrix,
    reach,
    targets,
    thin,
    time_unit,
    timelines,
)

# Enough to see, and small next to plotly.js: rounds and clients of the straggler picture; rows, columns of heat maps.
_MOST_ROUNDS, _MOST_CLIENTS, _MOST_ROWS, _MOST_COLUMNS = 30, 40, 300, 200
_MOST_LETTERS = 40


def page_data(results: Sequence[Results]) -> dict[str, Any]:
    """Return what the interactive pictures draw."""
    shown = lines(results)
    curves = [(line, curve(line)) for line in shown]
    seconds, time_name = time_unit(max((found.seconds[-1] for _, found in curves if found.seconds), default=0))
    amount, byte_name = byte_unit(max((found.bytes[-1] for _, found in curves if found.bytes), default=0))
    metric = metric_of_all(results)
    return {
        "metric": {"name": metric.name, "percent": metric.percent},
        "axes": {
            "rounds": "round",
            "time": f"simulated time ({time_name})",
            "bytes": f"uploaded and downloaded ({byte_name})",
        },
        "targets": targets(results),
        "curves": [
            {
                **_style(line),
                "several": len(line.runs) > 1,
                "rounds": found.rounds,
                "time": _short(value / seconds for value in found.seconds),
                "bytes": _short(value / amount for value in found.bytes),
                **{name: _short(getattr(found, name)) for name in ("mean", "low", "high")},
            }
            for line, found in curves
        ],
        "reached": _reached(shown, targets(results)),
        "dropout": [
            {"label": _run_label(line, run), **_heat(matrix, y=_names(run))}
            for line in shown
            for run in line.runs
            if (matrix := dropout_matrix(run, line.strategy)) is not None
        ],
        "stragglers": [
            {"label": _run_label(line, run), "run": results.index(run), "rounds": _rounds(line, run, len(results))}
            for line in shown
            for run in line.runs
        ],
        "partitions": [
            {
                "label": f"{run.config['name']}, seed {run.config['seed']}",
                **_heat(matrix, x=_names(run), y=_class_names(run, matrix)),
            }
            for run in results
            if (matrix := partition_matrix(run)) is not None
        ],
        "classes": [{**_style(line), **_classes(line.runs[0], class_accuracies(line))} for line in shown],
    }


def _reached(shown: Sequence[Line], goals: Sequence[float]) -> dict[str, Any]:
    """Bars of the time to each target: as a ratio to FedAvg's where there is one, else in a unit of time."""
    relative = any(line.reference for line in shown)
    reached = {line.label: [reach(line, goal) for goal in goals] for line in shown}
    longest = max((max(one.seconds) for row in reached.values() for one in row if one.seconds), default=0)
    scale, unit = time_unit(longest)
    lines = []
    for line in shown:
        row = reached[line.label]
        bars = [one.time_ratios if relative else [value / scale for value in one.seconds] for one in row]
        lines.append(
            {
                **_style(line),
                "mean": _short(fmean(bar) if bar else math.nan for bar in bars),
                "low": _short(min(bar) if bar else math.nan for bar in bars),
                "high": _short(max(bar) if bar else math.nan for bar in bars),
                "words": [None if bar else missing_bar(line, one) for bar, one in zip(bars, row, strict=True)],
            }
        )
    metric = common_metric(line.runs[0].config for line in shown)
    return {"goals": [metric.show_target(goal) for goal in goals], "relative": relative, "unit": unit, "lines": lines}


def _style(line: Line) -> dict[str, Any]:
    return {"label": line.label, "colour": line.colour, "index": line.index}


def _run_label(line: Line, run: Results) -> str:
    return line.label if len(line.runs) == 1 else f"{line.label}, seed {run.config['seed']}"


def _names(run: Results) -> Callable[[int], str | int]:
    """Return how pictures call a run's clients: a long name would leave no room for them."""

    def name(client: int) -> str | int:
        full = run.client_name(client)
        return full if len(full) <= _MOST_LETTERS else f"{full[:_MOST_LETTERS]}… ({client})"

    return name if run.clients else int


def _heat(matrix: Matrix, x: Callable[[int], str | int] = int, y: Callable[[int], str | int] = int) -> dict[str, Any]:
    rows, columns = thin(range(len(matrix.rows)), _MOST_ROWS), thin(range(len(matrix.columns)), _MOST_COLUMNS)
    return {
        "x": [x(matrix.columns[at]) for at in columns],
        "y": [y(matrix.rows[at]) for at in rows],
        "z": [_short(row) for row in matrix.values[rows][:, columns].tolist()],
        "thinned": len(rows) < len(matrix.rows) or len(columns) < len(matrix.columns),
    }


def _rounds(line: Line, run: Results, runs: int) -> list[dict[str, Any]]:
    some_rounds = thin(client_rounds(run, line.strategy), max(3, _MOST_ROUNDS // runs))
    rounds = []
    for number, clients in timelines(run, line.strategy, some_rounds).items():
        some = thin(clients, _MOST_CLIENTS)
        rounds.append(
            {
                "round": number,
                "of": len(clients),
                "clients": [_names(run)(one.client) for one in some],
                "status": [one.status for one in some],
                **{phase: _short(getattr(one, phase) for one in some) for phase in ("download", "compute", "upload")},
            }
        )
    return rounds


def _class_names(run: Results, matrix: Matrix) -> Callable[[int], str | int]:
    """Return how pictures call the classes; where there are none, all samples are in one row."""
    if len(matrix.rows) == 1 and not run.classes:
        return lambda _: "all"
    return (lambda label: run.class_name(label)[:_MOST_LETTERS]) if run.classes else int


def _classes(run: Results, accuracies: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    return {
        "x": [run.class_name(label)[:_MOST_LETTERS] if run.classes else label for label in accuracies],
        "mean": _short(fmean(values) for values in accuracies.values()),
        "low": _short(min(values) for values in accuracies.values()),
        "high": _short(max(values) for values in accuracies.values()),
    }


def _short(values: Iterable[float]) -> list[float | None]:
    """Return numbers as JSON wants them: five digits are more than a screen shows, and NaN is null."""
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in values]
