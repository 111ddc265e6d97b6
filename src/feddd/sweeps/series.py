"""The outcome of a sweep over one of its keys: a line for each strategy and each of the other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feddd.experiments.views import byte_unit, time_unit
from feddd.sweeps.grid import Axis, show
from feddd.sweeps.results import SweepResults, settings_words


@dataclass(frozen=True)
class Measure:
    """Something to draw over a key: its key in the summary's rows, and how large its unit is.

    target: for a time to a target, which    share: whether it is shown in percent
    amount: whether it begins at zero, as seconds and bytes do
    """

    name: str
    title: str
    key: str
    scale: float = 1.0
    target: float | None = None
    share: bool = False
    amount: bool = True


@dataclass(frozen=True)
class Series:
    """Means over the seeds with their interval, None where unknown; flat: the key makes no difference here."""

    label: str
    index: int
    flat: bool
    x: tuple[Any, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def goals_of(results: SweepResults) -> list[float]:
    """The targets that some row reached, the hardest last."""
    found = {time["target"] for row in results.summary["rows"] for time in row["time_to_target"] if time["reached"]}
    return results.metric.hardest_last(found)


def goal_words(results: SweepResults, goal: float) -> str:
    """80%, or the metric's name and the number: mae 3.5."""
    shown = results.metric.show_target(goal).replace(" ", "")
    return shown if results.metric.percent else f"{results.metric.name} {shown}"


def measures(results: SweepResults) -> list[Measure]:
    """What can be drawn over a key."""
    rows, metric = results.summary["rows"], results.metric
    title = f"final test {metric.name}"
    if not any(one.higher_is_better for one in results.metrics):
        title += ", lower is better"
    found = [Measure(f"final {metric.name}", title, "final_metric", share=metric.percent, amount=False)]
    longest = max((row["clock_seconds"]["mean"] for row in rows if row["clock_seconds"]), default=0.0)
    scale, unit = time_unit(longest)
    for goal in reversed(goals_of(results)):
        words = f"time to {goal_words(results, goal)}"
        found.append(Measure(words, f"{words} ({unit})", "seconds", scale, goal))
    found.append(Measure("simulated time", f"simulated time, all rounds ({unit})", "clock_seconds", scale))
    most = max((row["upload_bytes"]["mean"] for row in rows if row["upload_bytes"]), default=0.0)
    amount, name = byte_unit(most)
    found.append(Measure("uploaded", f"uploaded, all rounds ({name})", "upload_bytes", amount))
    return found


def series(results: SweepResults, axis: Axis, measure: Measure) -> list[Series]:
    """One line for each strategy and each combination of the other settings, over the values of one key."""
    others = [other.key for other in results.grid.axes if other.key != axis.key]
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results.summary["rows"]:
        settings = {key: _as_tuple(results, row, key) for key in others}
        # What makes no difference to the strategy does not split its line.
        telling = {key: values for key, values in settings.items() if len(values) < len(_axis(results, key).values)}
        line = groups.setdefault((row["strategy"], settings_words(results.grid, telling)), {})
        for value in _as_tuple(results, row, axis.key):
            line[show(value)] = row
    places = sorted(axis.values) if is_numeric(axis.values) else axis.values
    found = []
    for index, ((strategy, words), line) in enumerate(groups.items()):
        rows = [line.get(show(value)) for value in places]
        flat = len(axis.values) > 1 and None not in rows and len({id(row) for row in rows}) == 1
        values = [_value(row, measure) for row in rows]
        mean, low, high = (tuple(value[part] for value in values) for part in range(3))
        label = f"{strategy}, {words}" if words else strategy
        found.append(Series(label, index, flat, tuple(places), mean, low, high))
    return found


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether a key's values are numbers, so that they lie on an axis."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _axis(results: SweepResults, key: str) -> Axis:
    return next(axis for axis in results.grid.axes if axis.key == key)


def _as_tuple(results: SweepResults, row: Any, key: str) -> Sequence[Any]:
    """The values of a key that a row of the summary stands for; a single one may be a list itself."""
    value = row["settings"][key]
    single = any(show(value) == show(one) for one in _axis(results, key).values)
    return (value,) if single else tuple(value)


def _value(row: Any, measure: Measure) -> tuple[float | None, float | None, float | None]:
    """Mean, low and high in the measure's unit."""
    if row is None:
        return None, None, None
    found = row.get(measure.key)
    if measure.target is not None:
        time = next(one for one in row["time_to_target"] if one["target"] == measure.target)
        # A mean over the seeds that reached it would be of the quicker ones only.
        found = time[measure.key] if time["reached"] == len(row["cells"]) else None
    if found is None:
        return None, None, None
    mean, low, high = (found[key] for key in ("mean", "low", "high"))
    return mean / measure.scale, *(None if end is None else end / measure.scale for end in (low, high))
