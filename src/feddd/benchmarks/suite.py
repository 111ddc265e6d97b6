"""All benchmarks by name, and their results as JSON, a table in Markdown and a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from feddd.benchmarks import checkpointing, parts, recurrent, rounds, scale
from feddd.benchmarks.measuring import Figure, Settings
from feddd.errors import InputError, nearest
from feddd.files import write_atomically
from feddd.simulation.worker_process import default_workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

Benchmark = Callable[[Settings], Iterator[Figure]]

BENCHMARKS: Mapping[str, Benchmark] = {
    "engine": rounds.engine,
    "networks": rounds.networks,
    "recurrent": recurrent.recurrent,
    "overhead": rounds.overhead,
    "profile": rounds.profile,
    "workers": rounds.workers,
    "busy": rounds.busy,
    "ray": rounds.ray,
    "allocation": parts.allocation,
    "throughput": parts.throughput,
    "clients": scale.clients,
    "memory": scale.memory,
    "startup": scale.startup,
    "checkpoints": checkpointing.checkpoints,
}


def run_suite(names: Sequence[str], settings: Settings, begin: Callable[[str], None]) -> Iterator[Figure]:
    """The figures of the named benchmarks (all if none is named), one by one; `begin` is told what comes next."""
    for name in names:
        if name not in BENCHMARKS:
            raise InputError(f"unknown benchmark {name!r}; {nearest(name, BENCHMARKS)}")
    for name in settings.peers or {}:
        if name not in rounds.PEERS:
            raise InputError(f"unknown peer {name!r}; {nearest(name, rounds.PEERS)}")
    for name in names or BENCHMARKS:
        begin(name)
        yield from BENCHMARKS[name](settings)


def number(value: float) -> str:
    """Write three digits; no exponent where people do not expect one."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def asked(figure: Figure) -> str:
    """Return what was asked for, in words."""
    return "" if figure.asked is None else f"{figure.limit} {number(figure.asked)} {figure.unit}"


def verdict(figure: Figure) -> str:
    """Reached or missed, empty where nothing was asked."""
    return {None: "", True: "yes", False: "no"}[figure.reached]


def write_results(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """bench.json, bench.md and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processor": _processor(), "cores": default_workers(), "torch": torch.__version__}
    document = {"machine": machine, "figures": [figure.to_dict() for figure in figures]}
    paths = [folder / f"bench.{kind}" for kind in ("json", "md", "png")]
    write_atomically(paths[0], (json.dumps(document, indent=2) + "\n").encode())
    write_atomically(paths[1], markdown(figures).encode())
    picture(figures).savefig(paths[2], dpi=150)
    return paths


def markdown(figures: Sequence[Figure]) -> str:
    """Return a table for documents."""
    lines = ["| what | measured | asked | reached | |", "|---|---|---|---|---|"]
    for figure in figures:
        measured = f"{number(figure.measured)} {figure.unit}"
        lines.append(f"| {figure.what} | {measured} | {asked(figure)} | {verdict(figure)} | {figure.detail} |")
    return "\n".join(lines) + "\n"


def picture(figures: Sequence[Figure]) -> Picture:
    """Return how far every figure lies on the good side of what was asked; 1 is just reached."""
    from matplotlib.figure import Figure as Picture

    shown = [figure for figure in figures if figure.asked]
    drawn = Picture(figsize=(9.0, 0.9 + 0.36 * max(len(shown), 1)), layout="constrained")
    axes = drawn.add_subplot()
    for place, figure in enumerate(shown):
        assert figure.asked is not None
        share = figure.measured / figure.asked if figure.limit == "at least" else figure.asked / figure.measured
        colour, hatch = ("#0072B2", "") if figure.reached else ("#D55E00", "//")
        axes.barh(place, share - 1, left=1, height=0.62, color=colour, hatch=hatch, edgecolor="white")
        text = f"{number(figure.measured)} {figure.unit}  ({asked(figure)})"
        axes.annotate(text, (max(share, 1), place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.7), high * 12)
    axes.set_xticks([1, 2, 5, 10, 100], ["as asked", "2 ×", "5 ×", "10 ×", "100 ×"])
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)), [figure.what for figure in shown], fontsize=8)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.set_xlabel("better than asked by")
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
