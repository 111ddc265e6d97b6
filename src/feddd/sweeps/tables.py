"""The outcome of a sweep as rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feddd.experiments.metrics import Metric
from feddd.experiments.views import byte_unit, human, time_unit
from feddd.sweeps.results import SweepResults, plain_value, short_names
from feddd.sweeps.series import goal_words, goals_of

ANY = "–"
"""Where a setting makes no difference."""


def terminal_table(
    results: SweepResults, goals_shown: int = 2, *, clock: bool = True
) -> tuple[str, list[str], list[list[str]]]:
    """A title, the columns' names, and a row for each strategy and setting.

    goals_shown: how many targets have a column, the hardest that were reached    clock: whether the simulated time has
    """
    grid, names = results.grid, short_names([axis.key for axis in results.grid.axes])
    goals = goals_of(results)[-goals_shown:] if goals_shown else []
    seeds = f"{len(grid.seeds)} seeds" if len(grid.seeds) > 1 else f"seed {grid.seeds[0]}"
    spread = ", mean ± half of the 95 % interval" if len(grid.seeds) > 1 else ""
    time = ["simulated"] if clock else []
    targets = [f"to {goal_words(results, goal)}" for goal in goals]
    head = ["strategy", *names.values(), results.metric.name, *time, "bytes", *targets]
    rows = []
    for row in results.summary["rows"]:
        times = {one["target"]: one for one in row["time_to_target"]}
        settings = [setting_text(results, row, key) for key in names]
        final = metric_text(row["final_metric"], Metric(**row["metric"]))
        numbers = [final, *([seconds(row["clock_seconds"])] if clock else []), _bytes(row)]
        mark = "" if row["finished"] else " (diverged)" if results.finished else " (unfinished)"
        rows.append([row["strategy"] + mark, *settings, *numbers, *(_time(times[goal], grid.seeds) for goal in goals)])
    return f"{grid.base.name}: {grid.base.rounds} rounds, {seeds}{spread}", head, rows


def setting_text(results: SweepResults, row: Mapping[str, Any], key: str) -> str:
    """A row's value of a key; a dash where the key makes no difference to it."""
    axis = next(axis for axis in results.grid.axes if axis.key == key)
    value = row["settings"][key]
    if isinstance(value, list) and len(value) == len(axis.values) > 1 and value != axis.values[0]:
        return ANY
    return plain_value(value)


def metric_text(found: Mapping[str, Any] | None, metric: Metric) -> str:
    """78.2 ± 1.3 % of an accuracy, 3.142 ± 0.21 of another metric."""
    if found is None:
        return "–"
    shown = metric.show(found["mean"])
    if found["low"] is None:
        return shown
    half = (found["high"] - found["low"]) / 2
    return shown.replace(" %", f" ± {100 * half:.1f} %") if metric.percent else f"{shown} ± {half:.2g}"


def seconds(found: Mapping[str, Any] | None) -> str:
    """12.3 ± 0.4 min."""
    return "–" if found is None else _amount(found, time_unit(found["mean"]))


def _amount(found: Mapping[str, Any], unit: tuple[float, str]) -> str:
    if found["low"] is None:
        return human(found["mean"], unit)
    number, _, name = human(found["mean"], unit).rpartition(" ")
    digits = len(number.partition(".")[2])
    return f"{number} ± {(found['high'] - found['low']) / 2 / unit[0]:,.{digits}f} {name}"


def _bytes(row: Mapping[str, Any]) -> str:
    up, down = row["upload_bytes"], row["download_bytes"]
    if not up or not down:
        return "–"
    total = up["mean"] + down["mean"]
    return human(total, byte_unit(total))


def _time(one: Mapping[str, Any], seeds: tuple[int, ...]) -> str:
    if not one["reached"]:
        return "never"
    part = "" if one["reached"] == len(seeds) else f" ({one['reached']} of {len(seeds)})"
    return seconds(one["seconds"]) + part
