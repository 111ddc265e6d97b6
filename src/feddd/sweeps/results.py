"""What a sweep's folder says: its rows, each a strategy with the settings that make a difference to it, over all seeds.

Cells that are the same for several settings make one row. Settings that change the data, the fleet or the training make
different worlds; strategies are compared inside a world, on the same seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddd.experiments.cells import Cell, Store, joined
from feddd.experiments.metrics import Metric, common_metric, metric_of
from feddd.experiments.results import SCHEMAS, Results, load_results, summarise
from feddd.experiments.statistics import estimate
from feddd.sweeps.folders import CELLS, Index, read_index
from feddd.sweeps.grid import Grid, Point, show


@dataclass(frozen=True)
class Row:
    """One strategy in one world: its label here, and what it stands for.

    settings: for every axis the values that this row has    cells: one per seed
    """

    label: str
    strategy: str
    settings: Mapping[str, tuple[Any, ...]]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class World:
    """Strategies that can be compared: same data, fleet and training; settings: what the world has of its own."""

    name: str
    settings: Mapping[str, Any]
    experiment: Any
    rows: tuple[Row, ...]

    @property
    def metric(self) -> Metric:
        """What the global models are tested by here."""
        return metric_of(self.experiment.model_dump(include={"task"}))


@dataclass(frozen=True)
class SweepResults:
    """A sweep's folder, read."""

    path: Path
    index: Index

    @property
    def grid(self) -> Grid:
        """What is compared."""
        return self.index.grid

    @property
    def finished(self) -> bool:
        """Whether all cells are there; one whose training diverged has fewer rounds than were asked for."""
        return not Store(self.path / CELLS).missing(self.grid.cells)

    @functools.cached_property
    def worlds(self) -> tuple[World, ...]:
        """The rows, by what can be compared."""
        groups: dict[tuple[str, int], list[Point]] = {}
        seed = self.grid.seeds[0]
        for point in self.grid.points:
            cell = self.grid.cells_of(point.experiment, [seed])[0]
            groups.setdefault((cell.world_key, point.experiment.rounds), []).append(point)
        return tuple(_world(self.grid, points, len(groups)) for points in groups.values())

    @functools.cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What models are tested by; several where that is what was swept."""
        return tuple(dict.fromkeys(world.metric for world in self.worlds))

    @functools.cached_property
    def metric(self) -> Metric:
        """What all models are tested by; called just a metric where that differs."""
        return common_metric(world.experiment.model_dump(include={"task"}) for world in self.worlds)

    @functools.cached_property
    def runs(self) -> tuple[Results, ...]:
        """Every world on every seed as one run, whose strategies are the world's rows: what reports are made of."""
        return tuple(self._run(world, at) for world in self.worlds for at in range(len(self.grid.seeds)))

    def _run(self, world: World, at: int) -> Results:
        store = Store(self.path / CELLS)
        found = {row.label: self._cell(row.cells[at]) for row in world.rows if store.has(row.cells[at])}
        chosen = [row.cells[at].experiment.strategy[0].model_dump(mode="json", exclude_none=True) for row in world.rows]
        sections = [section | {"label": row.label} for section, row in zip(chosen, world.rows, strict=True)]
        goals = world.metric.hardest_last({goal for point in self.grid.points for goal in point.experiment.targets})
        config = world.experiment.model_dump(mode="json", exclude={"strategy"}, exclude_none=True)
        config |= {"name": world.name, "seed": self.grid.seeds[at], "targets": goals, "strategy": sections}
        tables = {name: joined(name, found) for name in SCHEMAS}
        environment = next((run.environment for run in found.values()), {})
        run = Results(Path(f"{world.name}-seed-{self.grid.seeds[at]}"), config, environment, {}, tables)
        return dataclasses.replace(run, summary=summarise(run) if len(found) == len(world.rows) else {})

    def _cell(self, cell: Cell) -> Results:
        return load_results(self.path / CELLS / cell.folder)

    def cell_names(self) -> dict[str, str]:
        """What each cell is called, by its folder."""
        several = len(self.worlds) > 1
        return {
            cell.folder: f"{row.label}{f' ({world.name})' if several else ''}, seed {cell.experiment.seed}"
            for world in self.worlds
            for row in world.rows
            for cell in row.cells
        }

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """What was swept, and for every row mean and 95 % interval over the seeds of what a run's summary says."""
        axes = {axis.key: list(axis.values) for axis in self.grid.axes}
        about = {"name": self.grid.base.name, "seeds": list(self.grid.seeds), "sweep": axes}
        about["metric"] = dataclasses.asdict(self.metric)
        return {**about, "rows": [self._sum_up(world, row) for world in self.worlds for row in world.rows]}

    def _sum_up(self, world: World, row: Row) -> dict[str, Any]:
        runs = [run for run in self.runs if run.config["name"] == world.name]
        mine = [summarise(run)["strategies"][row.label] for run in runs]
        asked, metric = row.cells[0].experiment.rounds, world.metric
        times = {key: [_times(row) for row in zip(*(one[key] for one in mine), strict=True)] for key in _TIMES}
        known = [key for key in mine[0] if key not in ("rounds", *_TIMES)]
        return {
            "strategy": row.strategy,
            "settings": {key: values[0] if len(values) == 1 else list(values) for key, values in row.settings.items()},
            "label": row.label,
            "world": world.name,
            "rounds": [one["rounds"] for one in mine],
            "finished": all(one["rounds"] >= asked for one in mine),
            "metric": dataclasses.asdict(metric),
            **{key: _over_seeds(key, [one.get(key) for one in mine], metric) for key in known},
            **times,
            "cells": [f"{CELLS}/{cell.folder}" for cell in row.cells],
        }


_TIMES = ("time_to_target", "time_to_accuracy")
_MEASURED = re.compile("seconds|bytes|ratio")
_BOUNDS = {
    "accuracy": (0.0, 1.0),
    "perplexity": (1.0, math.inf),
    "mae": (0.0, math.inf),
    "r2": (-math.inf, 1.0),
}
"""What values a metric can have; of one's own metric it is not known."""


def _times(times: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One target over all seeds; the mean is over those that reached it."""
    reached = sum(one["seconds"] is not None for one in times)
    over = {key: _over_seeds(key, [one[key] for one in times], None) for key in ("seconds", "ratio_to_fedavg")}
    return {"target": times[0]["target"], "reached": reached, **over}


def _over_seeds(key: str, values: Sequence[float | None], metric: Metric | None) -> dict[str, Any] | None:
    """Mean and Student's 95 % interval of what is known; None where nothing is.

    key, metric: say what values there can be
    """
    known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not known:
        return None
    bounds = (0.0, math.inf) if _MEASURED.search(key) else _BOUNDS.get(metric.name) if metric else None
    found = estimate([float(value) for value in known], bounds)
    return {"mean": found.mean, "low": found.low, "high": found.high, "values": list(values)}


def load_sweep(path: str | os.PathLike[str]) -> SweepResults:
    """Read the folder that a sweep left behind (one still going on shows what there is so far)."""
    folder = Path(path)
    return SweepResults(folder, read_index(folder))


def _world(grid: Grid, points: Sequence[Point], count: int) -> World:
    """The strategies of some points, each once; count: of worlds."""
    own = {axis.key: points[0].settings[axis.key] for axis in grid.axes if len(_values(points, axis.key)) == 1}
    words = settings_words(grid, {key: (value,) for key, value in own.items()})
    name = words if count > 1 and words else grid.base.name
    groups: dict[tuple[int, str, tuple[str, ...]], list[tuple[Point, tuple[Cell, ...]]]] = {}
    for point in points:
        for place, section in enumerate(point.experiment.strategy):
            one = point.experiment.model_copy(update={"strategy": (section,)})
            mine = tuple(grid.cells_of(one, grid.seeds))
            key = (place, section.label, tuple(cell.folder for cell in mine))
            groups.setdefault(key, []).append((point, mine))
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    rows = [_row(grid, points, label, [p for p, _ in group], group[0][1]) for (_, label, _), group in ordered]
    return World(name, own, points[0].experiment, tuple(rows))


def _row(grid: Grid, world: Sequence[Point], label: str, points: Sequence[Point], mine: tuple[Cell, ...]) -> Row:
    settings = {axis.key: _values(points, axis.key) for axis in grid.axes}
    # What is the same for the whole world, or makes no difference to this strategy, does not name it.
    telling = {key: values for key, values in settings.items() if len(values) < len(_values(world, key))}
    whole = math.prod(len(values) for values in settings.values()) == len(points)
    if whole:
        words = settings_words(grid, telling)
    else:
        each = ({key: (point.settings[key],) for key in settings} for point in points)
        words = " or ".join(settings_words(grid, one) for one in each)
    return Row(f"{label}, {words}" if words else label, label, settings, mine)


def _values(points: Sequence[Point], key: str) -> tuple[Any, ...]:
    """The different values of a key, in order."""
    found: dict[str, Any] = {}
    for point in points:
        found.setdefault(show(point.settings[key]), point.settings[key])
    return tuple(found.values())


def settings_words(grid: Grid, settings: Mapping[str, Sequence[Any]]) -> str:
    """Settings in a few words: budget=0.2, partition=iid/dirichlet."""
    names = short_names([axis.key for axis in grid.axes])
    return ", ".join(f"{names[key]}={'/'.join(map(plain_value, values))}" for key, values in settings.items())


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or the whole of it where two have the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def plain_value(value: Any) -> str:
    """A value for people: of a file its name."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else show(value)
