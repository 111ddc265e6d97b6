"""What a sweep runs: every combination of the values of some keys, on every seed, each strategy's run once."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from feddd.errors import InputError
from feddd.experiments.cells import Cell, cells
from feddd.experiments.config import UNNAMED, Experiment, parse_experiment
from feddd.experiments.loading import set_key, toml_value
from feddd.experiments.problem import DataSection
from feddd.world.objectives import LOSSES, METRICS
from feddd.world.sources import content_digest, is_own, is_path_of_data

MOST_RUNS = 10_000
"""More combinations and seeds are a slip of the keyboard."""
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True)
class Axis:
    """A dotted key of an experiment, as `--set` takes it, and the values that it is given."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    """One combination: a value for every axis, and the experiment that has them."""

    settings: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Grid:
    """A sweep: an experiment, the axes along which it differs, and its seeds. Without axes it differs in the seed.

    contents: digests of the data of one's own that it is run on, by `source_of`
    """

    base: Experiment
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    points: tuple[Point, ...]
    contents: Mapping[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        """All runs of one strategy on one seed; those that are the same are listed again."""
        # Seed by seed and combination by combination: what is there after a while can be compared.
        return [
            cell for seed in self.seeds for point in self.points for cell in self.cells_of(point.experiment, [seed])
        ]

    def cells_of(self, experiment: Experiment, seeds: Iterable[int]) -> list[Cell]:
        """Every strategy of one of its experiments on these seeds."""
        return cells(experiment, seeds, self.contents)


def make_grid(
    base: Experiment, axes: Sequence[Axis], seeds: Iterable[int], contents: Mapping[str, str] | None = None
) -> Grid:
    """Work out every combination; one that is no experiment is refused before anything is run.

    contents: of data of one's own as it was; left out, its files are read
    """
    numbers = tuple(seeds)
    if not numbers:
        raise InputError("a sweep needs at least one seed")
    for axis in axes:
        _check_axis(axis, axes)
    if len(numbers) * math.prod(len(axis.values) for axis in axes) > MOST_RUNS:
        raise InputError(f"--sweep and --seeds ask for more than {MOST_RUNS} runs")
    document = document_of(base)
    points = []
    for values in itertools.product(*(axis.values for axis in axes)):
        settings = dict(zip((axis.key for axis in axes), values, strict=True))
        points.append(Point(settings, _changed(document, settings)))
    if contents is None:
        sections = {source_of(data): data for data in (point.experiment.data for point in points)}
        paths = [name for name, data in sections.items() if is_path_of_data(data.dataset)]
        contents = {name: content_digest(name) for name in paths}
    return Grid(base, tuple(axes), numbers, tuple(points), contents)


def source_of(data: DataSection) -> str:
    """What data of one's own is called: its path, or its function with the arguments."""
    words = f" {json.dumps(data.arguments, sort_keys=True, default=str)}" if data.arguments else ""
    return data.dataset + words


def own_contents(grid: Grid) -> dict[str, str]:
    """Digests of all data of one's own as it is now; functions are called for it."""
    sections = {source_of(data): data for data in (point.experiment.data for point in grid.points)}
    return {
        name: content_digest(data.dataset, data.arguments) for name, data in sections.items() if is_own(data.dataset)
    }


def _check_axis(axis: Axis, axes: Sequence[Axis]) -> None:
    if axis.key in ("seed", "name"):
        hint = "--seeds N runs N seeds" if axis.key == "seed" else "a name changes no number"
        raise InputError(f"--sweep {axis.key}: it cannot be swept; {hint}")
    if not axis.key or not all(axis.key.split(".")):
        raise InputError(f"--sweep takes a dotted key, not {axis.key!r:.200}")
    if not axis.values:
        raise InputError(f"--sweep {axis.key}: no value is given")
    shown = [show(value) for value in axis.values]
    twice = next((value for value in shown if shown.count(value) > 1), None)
    if twice is not None:
        raise InputError(f"--sweep {axis.key}: {twice} is given twice")
    if sum(other.key == axis.key for other in axes) > 1:
        raise InputError(f"--sweep {axis.key} is given twice; all its values go into one: {axis.key}=A,B")


def _changed(document: Mapping[str, Any], settings: Mapping[str, Any]) -> Experiment:
    changed: dict[str, Any] = tomllib.loads(tomli_w.dumps(document))
    for key, value in settings.items():
        set_key(changed, key, value, f"--sweep {key}={show(value)}")
    try:
        return parse_experiment(changed)
    except InputError as error:
        words = " ".join(f"--sweep {key}={show(value)}" for key, value in settings.items())
        raise InputError(f"{words}: {str(error).removeprefix(f'{UNNAMED}: ')}") from error


def document_of(experiment: Experiment) -> dict[str, Any]:
    """The experiment as it was written, without the defaults that another value of a key may rule out."""
    given = experiment.model_dump(exclude_unset=True, exclude_none=True)
    if experiment.task is not None:
        given["task"] = _bare(given["task"])
    whole = experiment.model_dump(include={"name", "strategy"}, exclude_none=True)
    return tomllib.loads(tomli_w.dumps(whole | given))


def _bare(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task without what follows from its loss or its metric."""
    metric, loss = task["metric"], task.get("loss", "cross-entropy")
    follows = {"higher_is_better": metric in METRICS, "metric": LOSSES.get(loss) == metric}
    return {key: value for key, value in task.items() if not follows.get(key)}


def parse_axis(text: str) -> Axis:
    """Read key=A,B,C: values in TOML syntax, bare words are strings, a comma inside brackets or quotes separates none.

    `fleet.uplink_bits_per_s=[1e4,5e4],[1e5,5e5]` are two values.
    """
    key, equals, values = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise InputError(f"--sweep takes key=value,value,…, not {text!r}")
    parts = [part.strip() for part in _split(values)]
    if not all(parts):
        raise InputError(f"--sweep {text}: a value is missing")
    return Axis(key.strip(), tuple(toml_value(part, f"--sweep {text}") for part in parts))


def _split(text: str) -> list[str]:
    """Cut at the commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += _BRACKETS.get(letter, 0)
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + "}"
    return str(value)
