"""The pictures of the paper's figures, one panel per experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from feddd.experiments.figures import draw_accuracy, draw_classes, draw_targets
from feddd.experiments.methods import COMPARED
from feddd.experiments.plotting import look, note, panel_grid
from feddd.paper.catalogue import PaperFigure
from feddd.paper.motivation import LabelShare, loss_by_width
from feddd.paper.panels import Panel, accuracy
from feddd.paper.theorem import Outcome
from feddd.world import models


def draw_panels(figure: PaperFigure, panels: Sequence[Panel]) -> Figure:
    """Return the picture of a figure that is made of experiments."""
    if figure.kind == "exchange":
        return _draw_exchange(panels)
    wide = figure.kind in ("targets", "classes")
    drawn, grid = panel_grid(len(panels), 5.0 if wide else 4.2, 3.4)
    _fill(grid, panels, _DRAW[figure.kind])
    _legend(drawn, grid)
    return drawn


def _draw_exchange(panels: Sequence[Panel]) -> Figure:
    """Return accuracy over time and over bytes, beside each other; logarithmic, since methods differ by orders."""
    drawn, grid = panel_grid(2 * len(panels), 5.6, 3.8, columns=2)
    _fill(grid[0::2], panels, _curves)
    _fill(grid[1::2], panels, _curves_over_bytes)
    for axes in grid[: 2 * len(panels)]:
        axes.set_xscale("log")
        _from_half_of_the_best(axes)
    _legend(drawn, grid)
    return drawn


def _from_half_of_the_best(axes: Axes) -> None:
    """Leave out the first rounds, which all methods pass alike, so that the differences can be seen."""
    points = np.concatenate([np.empty((0, 2)), *(curve.get_xydata() for curve in axes.get_lines())])
    if not len(points):
        return
    best = float(points[:, 1].max())
    axes.set_xlim(left=float(points[points[:, 1] >= best / 2, 0].min()))
    axes.set_ylim(bottom=best / 2)


def _fill(grid: Sequence[Axes], panels: Sequence[Panel], draw: Callable[[Axes, Panel], None]) -> None:
    """Draw each panel into its axes, or say that there is nothing yet."""
    for axes, panel in zip(grid, panels, strict=False):
        if any(run.tables["rounds"].num_rows for run in panel.runs):
            draw(axes, panel)
        else:
            note(axes, "not run yet")
        axes.set_title(panel.experiment.name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)


def _legend(drawn: Figure, grid: Sequence[Axes]) -> None:
    """One legend for all panels, below them."""
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        # An inch takes about twelve letters; a line's sample takes about eight.
        room = int(12 * drawn.get_figwidth() / (8 + max(len(label) for label in handles)))
        columns = min(len(handles), 6, max(1, room))
        drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)


def _curves(axes: Axes, panel: Panel) -> None:
    draw_accuracy(axes, panel.lines, "time")


def _curves_over_bytes(axes: Axes, panel: Panel) -> None:
    draw_accuracy(axes, panel.lines, "bytes")


def _targets(axes: Axes, panel: Panel) -> None:
    draw_targets(axes, panel.lines, panel.experiment.targets)


def _classes(axes: Axes, panel: Panel) -> None:
    draw_classes(axes, panel.lines)


def _budgets(axes: Axes, panel: Panel) -> None:
    """Final accuracy over the share of parameters uploaded, one line per method; FedAvg at 100 %."""
    # The order, and with it the colours, of the figures that compare methods.
    methods: dict[str, dict[float, list[float]]] = {method: {} for method in COMPARED}
    for strategy in panel.experiment.strategy:
        budget = float(strategy.options.get("budget", 1.0))
        runs = panel.finished(strategy.label)
        if runs:
            finals = [accuracy(run, strategy.label, panel.final_rounds) for run in runs]
            methods.setdefault(strategy.name, {})[budget] = finals
    for place, (method, points) in enumerate(methods.items()):
        if not points:
            continue
        x = sorted(points)
        mean = np.array([fmean(points[budget]) for budget in x])
        low, high = (np.array([pick(points[budget]) for budget in x]) for pick in (min, max))
        spread = [mean - low, high - mean]
        axes.errorbar([100 * b for b in x], mean, yerr=spread, capsize=3, label=method, **look(place))
    axes.invert_xaxis()
    axes.set(xlabel="budget: share of parameters uploaded (%)", ylabel="final test accuracy (%)")
    axes.grid(alpha=0.25)


def _widths(axes: Axes, panel: Panel) -> None:
    """Mean training loss of the clients of each sub-model."""
    name = panel.experiment.model.name
    label = panel.experiment.strategy[0].label
    runs = panel.finished(label)
    for width in range(models.widths(name)):
        rounds = np.mean([loss_by_width(run, label, models.widths(name))[width] for run in runs], axis=0)
        axes.plot(
            range(1, len(rounds) + 1),
            rounds,
            markevery=max(1, len(rounds) // 8),
            label=f"sub-model {width + 1}",
            **look(width),
        )
    axes.set(xlabel="round", ylabel="mean training loss")
    axes.grid(alpha=0.25)


_DRAW: Mapping[str, Callable[[Axes, Panel], None]] = {
    "curves": _curves,
    "targets": _targets,
    "classes": _classes,
    "budgets": _budgets,
    "widths": _widths,
}


def draw_label_share(found: Mapping[str, Sequence[LabelShare]]) -> Figure:
    """Return accuracy of a label over its share, one panel per data set, one line per label."""
    drawn, grid = panel_grid(len(found), 4.2, 3.4)
    for axes, (name, points) in zip(grid, found.items(), strict=False):
        for place, label in enumerate(sorted({point.label for point in points})):
            mine = [(point.share, point.accuracy) for point in points if point.label == label]
            axes.plot(*zip(*mine, strict=True), markersize=4, label=f"label {label}", **look(place))
        axes.axvline(0.1, color="0.5", linewidth=0.8)
        axes.set(title=name, xlabel="share of the label in the training data", ylabel="test accuracy of the label")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _legend(drawn, grid)
    return drawn


def draw_learning_rates(rates: Mapping[str, Mapping[float, float]], panels: Sequence[Panel]) -> Figure:
    """FedAvg's validation accuracy over the learning rate, one line per data set; then the panels at the best one."""
    drawn, grid = panel_grid(1 + len(panels), 4.2, 3.4)
    axes, *rest = grid
    for place, (name, points) in enumerate(rates.items()):
        axes.plot(*zip(*sorted(points.items()), strict=True), label=name, **look(place))
    axes.set_xscale("log")
    axes.set(title="FedAvg, Non-IID-b", xlabel="learning rate", ylabel="validation accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.25)
    _fill(rest, panels, _targets)
    _legend(drawn, grid)
    return drawn


def draw_theorem(outcomes: Sequence[Outcome]) -> Figure:
    """Return every bound as a multiple of what was measured, one panel per selection rule; below 1 it is violated."""
    rules = list(dict.fromkeys(outcome.selector for outcome in outcomes))
    drawn, grid = panel_grid(len(rules), 5.6, 3.8)
    for axes, rule in zip(grid, rules, strict=False):
        mine = [outcome for outcome in outcomes if outcome.selector == rule]
        x = np.arange(len(mine))
        for place, key in enumerate(mine[0].bounds):
            bounds = [(one, one.bounds[key]) for one in mine]
            y = [np.nan if bound is None else bound / one.measured for one, bound in bounds]
            shape = look(place) | {"linestyle": "none", "fillstyle": "none", "markersize": 6 + 2 * place}
            axes.plot(x, y, label=f"{key[1]} bound, ε on {key[0]}", **shape)
        axes.axhline(1, color="0.3", linewidth=1)
        axes.axhspan(0.5, 1, color="0.92", zorder=0)
        axes.text(x[-1], 0.52, "violated", ha="right", va="bottom", color="0.3", fontsize=9)
        axes.set_yscale("log")
        axes.set_ylim(0.5, 12)
        axes.set_yticks([0.5, 0.7, 1, 2, 5, 10], ["0.5", "0.7", "1", "2", "5", "10"])
        axes.set_xticks(x, [f"{one.spread:g}\nh {one.broadcast_every}" for one in mine], fontsize=8)
        axes.set(title=f"{rule} selection", xlabel="spread of the clients' targets, broadcast period")
        axes.set_ylabel("bound / measured mean of ‖∇F‖²")
        axes.spines[["top", "right"]].set_visible(False)
    _legend(drawn, grid)
    return drawn
