"""Where experiments come from: presets of the package, TOML files, and `--set` on top."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from feddd.errors import InputError, nearest
from feddd.experiments.config import UNNAMED, Experiment, parse_experiment
from feddd.experiments.methods import COMPARED
from feddd.experiments.presets import presets
from feddd.files import parse_toml, read_text
from feddd.world.models import import_from
from feddd.world.sources import is_path_of_data


def load_experiment(
    path_or_name: str | os.PathLike[str], overrides: Iterable[str] = (), base: Mapping[str, Any] | None = None
) -> Experiment:
    """Return an experiment from a TOML file or a preset's name.

    overrides: "dotted.key=value" with the value in TOML syntax    base: values that win over everything (seed, rounds)
    """
    text, where = _find(path_or_name)
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise InputError(f"{where} is not valid TOML: {error}") from error
    document.setdefault("name", where if where in presets() else Path(where).stem)
    _name_strategies(document)
    return _parse(document, list(overrides), dict(base or {}), where)


def _parse(document: dict[str, Any], overrides: list[str], base: dict[str, Any], where: str) -> Experiment:
    """Validate the document with what was set on top; an error names the option that brought it about."""
    steps = [(where, document)]
    for override in overrides:
        changed = copy.deepcopy(steps[-1][1])
        _override(changed, override)
        steps.append((f"--set {override}", changed))
    for key, value in base.items():
        steps.append((f"--{key} {value}", steps[-1][1] | {key: value}))
    found = _attempt(steps[-1][1], where)
    if isinstance(found, Experiment):
        if found.import_paths and where not in presets():
            import_from(Path(where).parent.absolute())
        return found
    # The first step after which this very thing is wrong.
    option = next(name for name, changed in steps if _attempt(changed, where) == found)
    raise InputError(f"{option}: {found}")


def _attempt(document: dict[str, Any], where: str) -> Experiment | str:
    """Give the experiment, or what is wrong with it."""
    document = copy.deepcopy(document)
    _relative_to(document, where)
    try:
        return parse_experiment(document)
    except InputError as error:
        return str(error).removeprefix(f"{UNNAMED}: ")


def _find(path_or_name: str | os.PathLike[str]) -> tuple[str, str]:
    known = presets()
    if isinstance(path_or_name, str) and path_or_name in known:
        return known[path_or_name].toml, path_or_name
    path = Path(path_or_name)
    try:
        return read_text(path, "utf-8-sig"), str(path)  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        hint = nearest(str(path_or_name), known, "`feddd presets` lists the presets")
        raise InputError(f"no preset or file {str(path_or_name)!r}; {hint}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _name_strategies(document: dict[str, Any]) -> None:
    """With no [[strategy]] an experiment compares all four; make them explicit, so that --set can reach them."""
    if "strategy" not in document:
        document["strategy"] = [{"name": name} for name in COMPARED]


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise InputError(f"--set takes key=value, not {override!r}")
    option = f"--set {override}"
    set_key(document, key, toml_value(text.strip(), option), option)


def set_key(document: dict[str, Any], key: str, value: Any, option: str) -> None:
    """Change a dotted key of an experiment's document; option: what errors name."""
    parts = [part.strip() for part in key.split(".")]
    target: dict[str, Any] = document
    if parts[0] == "strategy":
        target, parts = _strategy_table(document, parts, option)
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise InputError(f"{option}: {part} has no keys below it")
    target[parts[-1]] = value


def _strategy_table(document: dict[str, Any], parts: list[str], option: str) -> tuple[dict[str, Any], list[str]]:
    """`strategy.LABEL.key`; labels may contain dots."""
    given = document["strategy"]
    tables = [table for table in given if isinstance(table, dict)] if isinstance(given, list) else []
    by_label = {str(table.get("label", table.get("name"))): table for table in tables}
    label, key = ".".join(parts[1:-1]), parts[-1]
    if label not in by_label:
        raise InputError(f"{option}: no strategy is labelled {label!r}; {nearest(label, by_label)}")
    return by_label[label], [key]


def toml_value(text: str, option: str) -> Any:
    """Return a value in TOML syntax; a bare word is a string. option: what errors name."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        if re.fullmatch(r"[A-Za-z_][\w./:-]*", text):
            return text
        raise InputError(f"{option}: {text!r} is neither a TOML value nor a bare word") from None


def _relative_to(document: dict[str, Any], where: str) -> None:
    """A file or folder is looked for beside the experiment that names it, then in the current folder."""
    if where in presets():
        return
    for section, key, is_path in (("fleet", "file", lambda _: True), ("data", "dataset", is_path_of_data)):
        table = document.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str) and is_path(table[key]):
            beside, here = Path(where).parent.absolute() / table[key], Path(table[key]).absolute()
            table[key] = str(here if here.exists() and not beside.exists() else beside)
