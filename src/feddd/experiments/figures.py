"""The pictures of a run as files: accuracy curves, time to accuracy, dropout, stragglers, partition, classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from feddd.experiments.metrics import common_metric
from feddd.experiments.plotting import (
    HATCHES,
    legend_or_note,
    line_title,
    note,
    panel_grid,
    plain_axes,
    plain_text,
    save_figure,
    stroke,
    upright,
    whole_numbers,
)
from feddd.experiments.results import Results
from feddd.experiments.views import (
    COLOURS,
    Line,
    Timeline,
    byte_unit,
    class_accuracies,
    client_rounds,
    curve,
    dropout_matrix,
    human_seconds,
    lines,
    missing_bar,
    partition_matrix,
    reach,
    targets,
    thin,
    time_unit,
    timelines,
)

Abscissa = Literal["rounds", "time", "bytes"]

_MOST_CLIENTS = 30
_MOST_LETTERS = 16


def accuracy_figure(results: Sequence[Results], abscissa: Abscissa = "rounds") -> Figure:
    """The test metric over rounds, simulated time or bytes both ways; a band from lowest to highest of several runs."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = plain_axes(figure)
    legend_or_note(axes, draw_accuracy(axes, lines(results), abscissa), "nothing tested yet")
    return figure


def draw_accuracy(axes: Axes, shown: Sequence[Line], abscissa: Abscissa) -> bool:
    """Return the curves of these lines; whether there was anything to draw."""
    drawn = [(line, found) for line in shown if (found := curve(line)).rounds]
    seconds, time_name = time_unit(max((found.seconds[-1] for _, found in drawn), default=0))
    amount, byte_name = byte_unit(max((found.bytes[-1] for _, found in drawn), default=0))
    for line, found in drawn:
        x = {
            "rounds": np.array(found.rounds, dtype=float),
            "time": np.array(found.seconds) / seconds,
            "bytes": np.array(found.bytes) / amount,
        }[abscissa]
        axes.plot(x, found.mean, label=plain_text(line.label), **stroke(line, len(x)))
        if len(line.runs) > 1:
            axes.fill_between(x, found.low, found.high, color=line.colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(
        {
            "rounds": "round",
            "time": f"simulated time ({time_name})",
            "bytes": f"uploaded and downloaded ({byte_name})",
        }[abscissa]
    )
    metric = common_metric(line.runs[0].config for line in shown)
    axes.set_ylabel(plain_text(f"test {metric.name}"))
    if metric.percent:
        # Steps of which none is a fraction of a percent: 22.5 would be written as 22 or 23.
        axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.25)
    return bool(drawn)


def time_to_accuracy_figure(results: Sequence[Results]) -> Figure:
    """Bars: time to each target as a ratio to FedAvg's, or in hours, … where there is no FedAvg."""
    shown, goals = lines(results), targets(results)
    figure = Figure(figsize=(max(7.2, 0.3 * len(shown) * len(goals)), 4.2), layout="constrained")
    axes = plain_axes(figure)
    draw_targets(axes, shown, goals)
    legend_or_note(axes, bool(shown), "nothing run yet")
    return figure


def draw_targets(axes: Axes, shown: Sequence[Line], goals: Sequence[float]) -> None:
    """Bars of the time to each target."""
    reached = [[reach(line, target) for target in goals] for line in shown]
    relative = any(line.reference for line in shown)
    longest = max((max(one.seconds) for row in reached for one in row if one.seconds), default=0)
    scale, unit = time_unit(longest)
    width = 0.8 / max(1, len(shown))
    for place, (line, row) in enumerate(zip(shown, reached, strict=True)):
        x = np.arange(len(goals)) + (place - (len(shown) - 1) / 2) * width
        values = [one.time_ratios if relative else [value / scale for value in one.seconds] for one in row]
        heights = [fmean(value) if value else 0.0 for value in values]
        hatch = HATCHES[line.index % len(HATCHES)]
        axes.bar(
            x, heights, width * 0.92, color=line.colour, hatch=hatch, edgecolor="white", label=plain_text(line.label)
        )
        for at, one, value in zip(x, row, values, strict=True):
            if not value:
                upright(axes, at, missing_bar(line, one), line.colour)
    if relative:
        axes.axhline(1, color="0.4", linewidth=0.8)
    metric = common_metric(line.runs[0].config for line in shown)
    axes.set_xticks(range(len(goals)), [metric.show_target(target) for target in goals])
    axes.set_xlabel(plain_text(f"target {metric.name}"))
    axes.set_ylabel("time to target, FedAvg = 1" if relative else f"time to target ({unit})")


def dropout_figure(results: Sequence[Results]) -> Figure:
    """Dropout rate per client and round: one panel per strategy that drops (its first run)."""
    found = [(line, dropout_matrix(line.runs[0], line.strategy)) for line in lines(results)]
    panels = [(line, matrix) for line, matrix in found if matrix is not None]
    figure, grid = panel_grid(len(panels), 4.2 if len(panels) > 1 else 7.2, 3.6)
    top = max((float(np.nanmax(matrix.values)) for _, matrix in panels), default=1.0)
    for axes, (line, matrix) in zip(grid, panels, strict=False):
        image = axes.imshow(
            matrix.values,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=top,
            extent=(matrix.columns[0] - 0.5, matrix.columns[-1] + 0.5, -0.5, len(matrix.rows) - 0.5),
        )
        axes.set(title=line_title(line), xlabel="round", ylabel="client")
        whole_numbers(axes)
        figure.colorbar(image, ax=axes, label="dropout rate", format=PercentFormatter(1.0, decimals=0))
    if not panels:
        note(grid[0], "no strategy dropped parameters")
    return figure


def straggler_figure(results: Sequence[Results], round_number: int | None = None) -> Figure:
    """Return one round (the last, if not told) client by client: download, compute, upload; the slowest is marked."""
    panels = []
    for line in lines(results):
        rounds = [round_number] if round_number is not None else client_rounds(line.runs[0], line.strategy)[-1:]
        known = timelines(line.runs[0], line.strategy, rounds)
        panels += [(line, number, clients) for number, clients in known.items()]
    longest = max((one.total for _, _, clients in panels for one in clients), default=0)
    scale, unit = time_unit(longest)
    most = max((min(len(clients), _MOST_CLIENTS) for _, _, clients in panels), default=0)
    figure, grid = panel_grid(len(panels), 4.0, 1.6 + 0.13 * most)
    for axes, (line, number, clients) in zip(grid, panels, strict=False):
        # The same scale everywhere, so that strategies can be compared.
        axes.set_xlim(0, 1.05 * longest / scale)
        _draw_round(axes, line.runs[0], clients, scale)
        rest = f", {_MOST_CLIENTS} of {len(clients)} clients" if len(clients) > _MOST_CLIENTS else ""
        axes.set(title=f"{line_title(line)}: round {number}{rest}", xlabel=f"simulated time ({unit})", ylabel="client")
    if panels:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    else:
        note(grid[0], "no clients recorded yet")
    return figure


def _draw_round(axes: Axes, run: Results, clients: Sequence[Timeline], scale: float) -> None:
    shown = thin(clients, _MOST_CLIENTS)
    y, left = np.arange(len(shown)), np.zeros(len(shown))
    for phase, colour, hatch in (
        ("download", COLOURS[5], ""),
        ("compute", "0.45", "..."),
        ("upload", COLOURS[3], "//"),
    ):
        widths = np.array([getattr(one, phase) for one in shown]) / scale
        axes.barh(y, widths, 0.8, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=phase)
        left += widths
    names = [plain_text(run.client_name(one.client)[:_MOST_LETTERS]) for one in shown]
    states = ["" if one.status == "ok" else f" ({one.status[:12]})" for one in shown]
    axes.set_yticks(y, [name + state for name, state in zip(names, states, strict=True)])
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    slowest = shown[0]
    if slowest.status == "ok":
        _mark_slowest(axes, names[0], slowest, scale)


def _mark_slowest(axes: Axes, name: str, slowest: Timeline, scale: float) -> None:
    end = slowest.total / scale
    axes.get_yticklabels()[0].set(color=COLOURS[1], fontweight="bold")
    axes.axvline(end, color=COLOURS[1], linestyle="--", linewidth=1)
    axes.annotate(
        f"client {name}: {human_seconds(slowest.total)}",
        (end, 0.06),
        xycoords=axes.get_xaxis_transform(),
        xytext=(5 if end < axes.get_xlim()[1] / 2 else -5, 0),
        textcoords="offset points",
        ha="left" if end < axes.get_xlim()[1] / 2 else "right",
        color=COLOURS[1],
        fontweight="bold",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )


def partition_figure(results: Sequence[Results]) -> Figure:
    """Draw the samples of each label at each client: one panel per experiment (its first run)."""
    firsts = {line.runs[0].path: line.runs[0] for line in lines(results)}
    found = [(run, partition_matrix(run)) for run in firsts.values()]
    panels = [(run, matrix) for run, matrix in found if matrix is not None]
    figure, grid = panel_grid(len(panels), 7.6, 3.4)
    for axes, (run, matrix) in zip(grid, panels, strict=False):
        empty_is_blank = np.where(matrix.values > 0, matrix.values, np.nan)
        image = axes.imshow(
            empty_is_blank, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis", vmin=0
        )
        title = f"{plain_text(str(run.config['name']))}, seed {run.config['seed']}"
        axes.set(title=title, xlabel="client", ylabel="label" if len(matrix.rows) > 1 else "")
        names = [plain_text(run.class_name(label)[:_MOST_LETTERS]) for label in matrix.rows]
        axes.set_yticks(range(len(matrix.rows)), names if len(names) > 1 else ["all"])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes, label="samples")
    if not panels:
        note(grid[0], "the partition is not recorded")
    return figure


def classes_figure(results: Sequence[Results]) -> Figure:
    """Return accuracy per class after the last round known; whiskers from lowest to highest of several runs."""
    shown = lines(results)
    labels = {label for line in shown for label in class_accuracies(line)}
    figure = Figure(figsize=(max(7.2, 0.2 * len(labels) * len(shown)), 4.2), layout="constrained")
    axes = plain_axes(figure)
    legend_or_note(axes, draw_classes(axes, shown), "accuracy per class is not recorded yet")
    return figure


def draw_classes(axes: Axes, shown: Sequence[Line]) -> bool:
    """Bars of the accuracy per class; whether there was anything to draw."""
    found = [(line, class_accuracies(line)) for line in shown]
    panels = [(line, accuracies) for line, accuracies in found if accuracies]
    labels = sorted({label for _, accuracies in panels for label in accuracies})
    width = 0.84 / max(1, len(panels))
    for place, (line, accuracies) in enumerate(panels):
        x = np.array([labels.index(label) for label in accuracies]) + (place - (len(panels) - 1) / 2) * width
        mean = np.array([fmean(values) for values in accuracies.values()])
        low, high = (np.array([pick(values) for values in accuracies.values()]) for pick in (min, max))
        axes.bar(
            x,
            mean,
            width * 0.92,
            yerr=[mean - low, high - mean] if len(line.runs) > 1 else None,
            error_kw={"elinewidth": 1, "ecolor": "0.2"},
            color=line.colour,
            hatch=HATCHES[line.index % len(HATCHES)],
            edgecolor="white",
            label=plain_text(line.label),
        )
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
    axes.set(xlabel="class", ylabel="accuracy, last round", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return bool(panels)


def draw_figures(results: Sequence[Results]) -> dict[str, Figure]:
    """Return every picture, by the name of its file."""
    return {
        "accuracy-rounds": accuracy_figure(results, "rounds"),
        "accuracy-time": accuracy_figure(results, "time"),
        "accuracy-bytes": accuracy_figure(results, "bytes"),
        "time-to-accuracy": time_to_accuracy_figure(results),
        "dropout": dropout_figure(results),
        "straggler": straggler_figure(results),
        "partition": partition_figure(results),
        "classes": classes_figure(results),
    }


def write_figures(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write every picture as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_figures(results).items()
    return [path for name, figure in drawn for path in save_figure(figure, folder / name)]
