"""A sweep's folder: an index that says what is run, and below it every cell once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from feddd.errors import InputError
from feddd.experiments.config import parse_experiment
from feddd.experiments.folders import environment, new_folder, write_environment
from feddd.experiments.resuming import import_folders
from feddd.files import parse_toml, read_text, write_atomically
from feddd.sweeps.grid import Axis, Grid, Point, document_of, make_grid, own_contents
from feddd.world.models import import_from
from feddd.world.sources import is_path_of_data

INDEX = "sweep.toml"
CELLS = "cells"
FLEETS = "fleets"
_HEAD = "# What is compared here. Every strategy on every seed lies in cells/ once, a run's folder of its own.\n"


@dataclass(frozen=True)
class Index:
    """What sweep.toml says; before: rounds that the sweep had, before it got more of them."""

    grid: Grid
    before: tuple[int, ...] = ()
    imports: Mapping[str, str] = field(default_factory=dict)


def is_sweep(folder: Path) -> bool:
    """Whether a folder was left by a sweep."""
    return (folder / INDEX).is_file()


def create(grid: Grid, out: str | os.PathLike[str] | None) -> Path:
    """A new folder with its index, and copies of the fleets' files, so that it can be moved."""
    folder = new_folder(grid.base, out)
    grid = _elsewhere(grid, lambda name: _copied(Path(name), folder))
    write_environment(folder, environment(grid.seeds[0]))
    imports: dict[str, str] = {}
    for point in grid.points:
        imports |= import_folders(point.experiment)
    write_index(folder, Index(grid, imports=imports))
    return folder


def _copied(path: Path, folder: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    name = Path(FLEETS) / hashlib.sha256(content).hexdigest()[:8] / path.name
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / name, content)
    return str(name)


def write_index(folder: Path, index: Index) -> None:
    """Replace the index."""
    inside = f"{folder.absolute()}{os.sep}"
    grid = _elsewhere(index.grid, lambda name: name.removeprefix(inside))
    document = {
        "seeds": list(grid.seeds),
        "rounds_before": list(index.before),
        "axis": [{"key": axis.key, "values": list(axis.values)} for axis in grid.axes],
        "imports": dict(index.imports),
        "contents": dict(grid.contents),
        "experiment": document_of(grid.base),
    }
    write_atomically(folder / INDEX, (_HEAD + tomli_w.dumps(document)).encode())


def read_index(folder: Path) -> Index:
    """What a sweep's folder says that it holds."""
    path = folder / INDEX
    if not path.is_file():
        raise InputError(f"{folder} is not a sweep's folder: it has no {INDEX}")
    try:
        document = parse_toml(read_text(path, "utf-8-sig"))
        axes = [Axis(str(axis["key"]), tuple(axis["values"])) for axis in document.get("axis", ())]
        seeds, before = (_numbers(document[key]) for key in ("seeds", "rounds_before"))
        imports = {str(key): str(value) for key, value in document.get("imports", {}).items()}
        contents = {str(key): str(value) for key, value in document.get("contents", {}).items()}
        given = dict(document["experiment"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = "no " if isinstance(error, KeyError) else ""
        raise InputError(f"{path} is damaged: {missing}{error}") from error
    grid = make_grid(parse_experiment(given, str(path)), axes, seeds, contents)
    unknown = next((name for name in map(_path_of_data, grid.points) if name and name not in contents), None)
    if unknown is not None:  # an index may come from a stranger: no file elsewhere is read for it
        raise InputError(f"{path} does not say what the data set {unknown!r:.200} held")
    return Index(_elsewhere(grid, lambda name: _inside(folder, name)), before, imports)


def _inside(folder: Path, name: str) -> str:
    """Where a fleet's file lies; an index may come from a stranger, and no file elsewhere is read for it."""
    parts = Path(name).parts
    if len(parts) != 3 or parts[0] != FLEETS or ".." in parts or not (folder / name).is_file():
        raise InputError(f"{folder / INDEX} names a fleet's file that is not in its folder: {name!r:.200}")
    return str(folder.absolute() / name)


def _path_of_data(point: Point) -> str | None:
    name = point.experiment.data.dataset
    return name if is_path_of_data(name) else None


def check_contents(folder: Path, index: Index) -> None:
    """Refuse to go on with data that is not what it was."""
    found, before = own_contents(index.grid), index.grid.contents
    changed = next((name for name in found if before.get(name, found[name]) != found[name]), None)
    if changed is not None:
        raise InputError(f"{folder} cannot be resumed: the data set {changed!r:.200} changed")


def find_imports(index: Index) -> None:
    """Let the code be found that a sweep was begun with."""
    for place in index.imports.values():
        import_from(Path(place))


def _elsewhere(grid: Grid, place: Callable[[str], str]) -> Grid:
    """The grid with its fleets' files in other places."""
    fleet = grid.base.fleet
    moved = {} if fleet.file is None else {"fleet": fleet.model_copy(update={"file": place(fleet.file)})}
    axes = [
        Axis(axis.key, tuple(place(str(value)) for value in axis.values)) if axis.key == "fleet.file" else axis
        for axis in grid.axes
    ]
    if not moved and axes == list(grid.axes):
        return grid
    return make_grid(grid.base.model_copy(update=moved), axes, grid.seeds, grid.contents)


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are not whole numbers")
    return tuple(values)
