"""What all pictures have in common: strokes, panels, legends, and how they become files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from feddd.errors import InputError, nearest
from feddd.experiments.views import COLOURS, Line

# Lines, markers and hatches differ as well as colours, so that a print in black and white can be read.
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (8, 2, 2, 2, 2, 2)))
_MARKERS = "osD^vPX"
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a picture as PNG and SVG beside each other; the same picture gives the same bytes."""
    written = []
    with mpl.rc_context({"svg.hashsalt": "feddd", "hatch.linewidth": 0.6}):
        for suffix, metadata in (("png", {}), ("svg", {"Date": None})):
            target = path.with_name(f"{path.name}.{suffix}")
            figure.savefig(target, dpi=150, metadata=metadata)
            written.append(target)
    return written


def check_format(path: Path) -> None:
    """Refuse a file whose name ends in no format that pictures can be written in."""
    known = FigureCanvasBase.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise InputError(f"{path}: pictures cannot be written as {ending!r}; {nearest(ending, sorted(known))}")


def plain_axes(figure: Figure) -> Axes:
    """Return the only axes of a figure, without a frame on top and right."""
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def panel_grid(count: int, width: float, height: float, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, each of this size in inches."""
    columns = columns or min(max(count, 1), 1 if width > 6 else 3 if count in (3, 5, 6, 9) else 2)
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in grid[max(count, 1) :]:
        spare.set_axis_off()
    return figure, grid


def stroke(line: Line, count: int) -> dict[str, Any]:
    """Return how a line of so many points is drawn."""
    # Markers start at different points, so that lines on top of each other can be told apart.
    every = max(1, count // 8)
    return look(line.index) | {"markevery": (line.index % every, every), "markersize": 5, "linewidth": 1.7}


def look(place: int) -> dict[str, Any]:
    """Colour, dashes and marker of the line at this place."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": _DASHES[place % len(_DASHES)],
        "marker": _MARKERS[place % len(_MARKERS)],
    }


def legend_or_note(axes: Axes, drawn: bool, otherwise: str) -> None:
    """A legend below the axes; words in its place if nothing was drawn."""
    if drawn:
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    else:
        note(axes, otherwise)


def note(axes: Axes, text: str) -> None:
    """Words in place of a picture."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.4")
    axes.set_axis_off()


def upright(axes: Axes, x: float, text: str, colour: str) -> None:
    """A text that stands on the base line."""
    # In axes' height, so that it stands on the base line whatever the bars' scale.
    axes.text(x, 0.02, text, transform=axes.get_xaxis_transform(), rotation=90, ha="center", va="bottom", color=colour)


def line_title(line: Line) -> str:
    """Return a line's label, and its seed where it has several runs."""
    return plain_text(line.label) + (f", seed {line.runs[0].config['seed']}" if len(line.runs) > 1 else "")


def whole_numbers(axes: Axes) -> None:
    """Ticks at whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def plain_text(label: str) -> str:
    """Return a label as it is: no formula between dollars, and not hidden from legends by a leading underscore."""
    escaped = label.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped
