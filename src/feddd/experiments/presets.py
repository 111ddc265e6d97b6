"""The experiments that come with the package, composed from the worlds, partitions and strategies of presets.toml."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from feddd.experiments.config import Experiment
from feddd.files import parse_toml

Table = dict[str, Any]
_ORDER = {key: place for place, key in enumerate(Experiment.model_fields)}  # in which an experiment is written


@dataclass(frozen=True)
class Preset:
    """An experiment of the package, and its place in the table of contents.

    family: what it varies    heading: what it is listed under    stem: WORLD-PARTITION    about: one sentence
    """

    name: str
    family: str
    heading: str
    stem: str
    about: str
    document: Table

    @property
    def ending(self) -> str:
        """Return what the name adds to its stem, such as "budgets"; empty if the name does not begin with it."""
        return self.name.removeprefix(f"{self.stem}-") if self.name.startswith(f"{self.stem}-") else ""

    @functools.cached_property
    def toml(self) -> str:
        """Return the experiment written out in full, as a file that `feddd run` takes."""
        tables = {key: value for key, value in self.document.items() if isinstance(value, dict)}
        blocks = [f"# {self.about}\n{_lines(_without(self.document, *tables, 'strategy'))}"]
        blocks += [f"[{key}]\n{_lines(table)}" for key, table in tables.items()]
        for strategy in self.document["strategy"]:
            why = f"# {strategy['why']}\n" if "why" in strategy else ""
            blocks.append(f"{why}[[strategy]]\n{_lines(_without(strategy, 'why'))}")
        return "\n".join(blocks)


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return every preset by name, in the order of the table of contents."""
    found = [
        _compose(family, world, partition)
        for family, facts in _book()["family"].items()
        for world, partitions in facts["on"].items()
        for partition in partitions
    ]
    return {preset.name: preset for preset in found}


def partitions() -> dict[str, str]:
    """Return what the partitions in the names of presets mean."""
    named = {name: partition["about"] for name, partition in _book()["partition"].items()}
    return {name: about for name, about in named.items() if any(f"-{name}" in preset for preset in presets())}


@functools.cache
def _book() -> Table:
    return parse_toml((resources.files("feddd.experiments") / "presets.toml").read_text("utf-8"))


def _compose(family_name: str, world_name: str, partition_name: str) -> Preset:
    """Lay the keys of a family and a partition over those of a world."""
    book, stem = _book(), f"{world_name}-{partition_name}"
    family, world, partition = book["family"][family_name], _world(world_name), book["partition"][partition_name]
    name = family.get("name", f"{stem}-{family_name}").format(world=world_name, partition=partition_name)
    more = family.get("more", {})
    lists = [*family["strategies"], *more.get(world_name, ()), *more.get(stem, ())]
    rows = [row for one in lists for row in book["strategies"][one]]
    document = _laid_over(
        _without(world, "like", "heading", "about", "set"),
        _without(family, "name", "title", "about", "strategies", "more", "on"),
        {"data": {"partition": partition_name, **_without(partition, "about")}},
        {"name": name, "strategy": [_changed(row, world.get("set", {})) for row in rows]},
    )
    return Preset(
        name,
        family=family["title"],
        heading=world["heading"] if name.startswith(world_name) else family["title"],
        stem=stem,
        about=f"{world['about']}, {partition['about']}: {family['about']}.",
        # A key that no experiment has goes last, and whoever loads the preset hears of it.
        document={key: document[key] for key in sorted(document, key=lambda key: _ORDER.get(key, len(_ORDER)))},
    )


def _world(name: str) -> Table:
    world: Table = _book()["world"][name]
    return _laid_over(_world(world["like"]), world) if "like" in world else world


def _changed(strategy: Table, changes: Table) -> Table:
    """Change a strategy as its world says, for all of its name and then for its label."""
    of_name, of_label = (changes.get(strategy.get(key, ""), {}) for key in ("name", "label"))
    return {**strategy, **of_name, **of_label}


def _laid_over(*layers: Table) -> Table:
    """Join tables, and the tables in them; where two give a value, the later one counts."""
    joined: Table = {}
    for layer in layers:
        for key, value in layer.items():
            joined[key] = joined.get(key, {}) | value if isinstance(value, dict) else value
    return joined


def _without(table: Table, *keys: str) -> Table:
    return {key: value for key, value in table.items() if key not in keys}


def _lines(table: Table) -> str:
    return "".join(f"{key} = {_written(value)}\n" for key, value in table.items())


def _written(value: Any) -> str:
    """Write a value in TOML, a list on one line: for words, numbers and lists of them that is the same as in JSON."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_written, value))}]"
    return json.dumps(value, ensure_ascii=False)
