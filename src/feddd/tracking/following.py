"""Which trackers follow a run, and what they are told; one that fails later on is left behind, not the run."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from feddd.errors import InputError, nearest
from feddd.files import parse_json, read_text, write_atomically
from feddd.tracking.protocol import Setting, Tracked, Tracker
from feddd.world.models import import_folder, import_from, import_object

FOLDER = "tracking"
"""In the folder of a run that is tracked: what its trackers write."""
_NAMES = "trackers.json"

BUILT_IN: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("feddd.tracking.tensorboard_log", "TensorBoard"),
    "mlflow": ("feddd.tracking.mlflow_runs", "MLflow"),
    "wandb": ("feddd.tracking.wandb_runs", "WandB"),
}
"""The trackers that come with the package; each is an extra of its own name."""

log = logging.getLogger("feddd")

Wanted = str | type[Tracker]
"""A tracker by name, by import path, or itself."""


def find_tracker(name: str) -> type[Tracker]:
    """Return what a name stands for; a package that is not installed is named with how to get it."""
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        try:
            found: type[Tracker] = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise InputError(f"--track {name} needs a package: pip install 'feddd[{name}]' ({error})") from error
        return found
    if ":" not in name:
        raise InputError(f"--track: unknown tracker {name!r}; {nearest(name, (*BUILT_IN, 'package.module:Class'))}")
    made: Any = import_object(name)
    return made  # type: ignore[no-any-return]


class Trackers:
    """Those of one run's folder, or of one sweep's."""

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        self._kinds: dict[str, type[Tracker]] = {}
        self._remembered: list[str] = []
        for one in wanted:
            name = one if isinstance(one, str) else f"{one.__module__}:{one.__qualname__}"
            self._kinds[name] = find_tracker(one) if isinstance(one, str) else one
            if isinstance(one, str) or one.__module__ != "__main__":
                self._remembered.append(name)
        self.views: dict[str, str] = {}

    def remember(self, folder: Path) -> None:
        """Let a run that is resumed find its trackers again."""
        if self._remembered:
            (folder / FOLDER).mkdir(exist_ok=True)
            own = {name: import_folder(name) for name in self._remembered if ":" in name}
            places = {name: str(place) for name, place in own.items() if place is not None}
            document = {"trackers": self._remembered, "imports": places}
            write_atomically(folder / FOLDER / _NAMES, json.dumps(document).encode())

    def follow(self, folder: Path, label: str, seed: int, settings: Mapping[str, Any]) -> Following:
        """Return what one strategy's rounds are told to; folder: of the run    settings: its resolved experiment."""
        return Following(self, folder, label, seed, settings)

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def start(self, tracked: Mapping[str, Any], folder: Path) -> dict[str, Tracker]:
        """Make a tracker of every kind; what goes wrong here is wrong input."""
        made: dict[str, Tracker] = {}
        for name, kind in self._kinds.items():
            own = folder / FOLDER / name.replace(":", ".")
            try:
                made[name] = kind(Tracked(**tracked, folder=own))
            except Exception as error:
                for other in made.values():
                    other.close(finished=False)
                raise InputError(f"--track {name}: {error}") from error
            self.views[name] = getattr(made[name], "view", "")
        return made


def remembered(folder: Path) -> list[str]:
    """The trackers that a run was begun with."""
    path = folder / FOLDER / _NAMES
    try:
        document = parse_json(read_text(path)) if path.is_file() else {"trackers": [], "imports": {}}
        for place in document["imports"].values():
            import_from(Path(place))
        return [str(name) for name in document["trackers"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be used: {error!r}; --track says anew who follows the run") from error


class Following:
    """One strategy's rounds on their way to the trackers; used in a `with` around them."""

    def __init__(self, trackers: Trackers, folder: Path, label: str, seed: int, settings: Mapping[str, Any]) -> None:
        self._trackers, self._folder = trackers, folder
        about = {"experiment": settings["name"], "run": folder.absolute().name, "label": label, "seed": seed}
        self._about = {**about, "settings": flat(settings)}
        self._metric = _metric_column(settings)
        self._made: dict[str, Tracker] = {}
        self._sums = {"upload_bytes": 0, "download_bytes": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, tracker in self._made.items():
            try:
                tracker.close(finished=error is None)
            except Exception as failure:
                _warn(name, failure)

    def begin(self, before: Sequence[Mapping[str, Any]]) -> None:
        """Make the trackers; before: the rows of the rounds that were done earlier."""
        for row in before:
            self._add(row)
        self._made = self._trackers.start({**self._about, "after": len(before)}, self._folder)

    def log(self, row: Mapping[str, Any]) -> None:
        """Tell every tracker about a row of the table `rounds`."""
        self._add(row)
        skipped = ("strategy", "seed", "round")
        values = {key: value for key, value in row.items() if value is not None and key not in skipped}
        if "test_metric" in values:
            values[self._metric] = values.pop("test_metric")
        values |= {f"total_{key}": value for key, value in self._sums.items()}
        for name, tracker in list(self._made.items()):
            try:
                tracker.log(row["round"], values)
            except Exception as failure:  # somebody else's server must not end a run of hours
                _warn(name, failure)
                del self._made[name]

    def _add(self, row: Mapping[str, Any]) -> None:
        for key in self._sums:
            self._sums[key] += row[key] or 0


def _metric_column(settings: Mapping[str, Any]) -> str:
    """What the metric is told under: test_accuracy, test_mae; test_metric where its name is that of another column."""
    name = str((settings.get("task") or {}).get("metric", "accuracy")).rpartition(":")[2]
    return "test_metric" if name == "loss" else f"test_{name}"


def _warn(name: str, failure: Exception) -> None:
    log.warning("--track %s failed (%s); the run goes on without it", name, " ".join(str(failure).split())[:300])


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Setting]:
    """Settings by dotted keys; lists as text, what is not set left out."""
    found: dict[str, Setting] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value if isinstance(value, Setting) else str(value)
    return found
