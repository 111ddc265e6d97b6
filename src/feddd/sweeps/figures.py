"""The pictures of a sweep as files: each outcome over each swept key, lines over numbers and bars over the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from feddd.experiments.plotting import HATCHES, legend_or_note, look, plain_axes, plain_text, save_figure
from feddd.files import portable_name
from feddd.sweeps.grid import Axis
from feddd.sweeps.results import SweepResults, plain_value, short_names
from feddd.sweeps.series import Measure, Series, is_numeric, measures, series


def sweep_figure(results: SweepResults, axis: Axis, measure: Measure) -> Figure:
    """One outcome over the values of one key: mean over the seeds, whiskers are its 95 % interval."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = plain_axes(figure)
    shown = [one for one in series(results, axis, measure) if any(mean is not None for mean in one.mean)]
    (_draw_lines if is_numeric(axis.values) else _draw_bars)(axes, shown)
    axes.set_xlabel(plain_text(axis.key))
    axes.set_ylabel(plain_text(measure.title))
    if measure.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif measure.amount:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25, axis="y")
    legend_or_note(axes, bool(shown), "nothing is known about it yet")
    return figure


def _draw_lines(axes: Axes, shown: Sequence[Series]) -> None:
    for one in shown:
        x, mean = np.array(one.x, dtype=float), _array(one.mean)
        style = look(one.index) | ({"marker": ""} if one.flat else {})
        axes.plot(x, mean, label=plain_text(one.label), linewidth=1.2 if one.flat else 1.7, **style)
        if not one.flat:
            axes.errorbar(x, mean, _whiskers(one), fmt="none", color=style["color"], elinewidth=1, capsize=3)


def _draw_bars(axes: Axes, shown: Sequence[Series]) -> None:
    width = 0.84 / max(1, len(shown))
    for place, one in enumerate(shown):
        x = np.arange(len(one.x)) + (place - (len(shown) - 1) / 2) * width
        axes.bar(
            x,
            np.nan_to_num(_array(one.mean)),
            width * 0.92,
            yerr=np.nan_to_num(_whiskers(one)),
            error_kw={"elinewidth": 1, "ecolor": "0.2"},
            color=look(one.index)["color"],
            hatch=HATCHES[one.index % len(HATCHES)],
            edgecolor="white",
            label=plain_text(one.label),
        )
    if shown:
        axes.set_xticks(range(len(shown[0].x)), [plain_text(plain_value(value)) for value in shown[0].x])


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _whiskers(one: Series) -> NDArray[np.float64]:
    """How far the interval goes down and up from the mean [2, values]; nothing where there is none."""
    mean = _array(one.mean)
    ends: NDArray[np.float64] = np.nan_to_num(np.stack([mean - _array(one.low), _array(one.high) - mean]))
    return ends


def write_sweep_figures(results: SweepResults, folder: Path) -> list[Path]:
    """Write every picture as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    names = short_names([axis.key for axis in results.grid.axes])
    for axis in results.grid.axes:
        for measure in measures(results):
            name = f"sweep-{names[axis.key]}-{measure.name}".replace(" ", "-").replace("%", "")
            written += save_figure(sweep_figure(results, axis, measure), folder / portable_name(name))
    return written
