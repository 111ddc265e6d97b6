"""The page about a sweep: what differs, the outcome over each swept key, and the pictures that every run has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from feddd.experiments.metrics import Metric
from feddd.experiments.report import Addition, write_report
from feddd.experiments.views import COLOURS, human_bytes, human_seconds
from feddd.sweeps.folders import INDEX
from feddd.sweeps.results import SweepResults, plain_value, short_names
from feddd.sweeps.series import Series, goal_words, goals_of, is_numeric, measures, series
from feddd.sweeps.tables import setting_text


def write_sweep_report(results: SweepResults, path: Path, refresh_seconds: int | None = None) -> Path:
    """Write the page; an old one stays whole until the new one is complete."""
    addition = Addition(
        title=results.grid.base.name, html=_section(results), data=_data(results), details=_details(results)
    )
    return write_report(results.runs, path, refresh_seconds=refresh_seconds, addition=addition)


def sentences(results: SweepResults) -> list[str]:
    """What differs here, in plain words."""
    grid = results.grid
    seeds = ", ".join(map(str, grid.seeds))
    said = [f"{len(grid.seeds)} seeds: {seeds}." if len(grid.seeds) > 1 else f"One seed: {seeds}."]
    for axis in grid.axes:
        said.append(f"{axis.key}: {', '.join(map(plain_value, axis.values))}.")
    if len(grid.axes) > 1:
        said.append(f"Every combination, {len(grid.points)} in all.")
    said += [f"{metric.name}: lower is better." for metric in results.metrics if not metric.higher_is_better]
    rows = [row for world in results.worlds for row in world.rows]
    for axis in grid.axes:
        same = [row.strategy for row in rows if len(row.settings[axis.key]) == len(axis.values) > 1]
        labels = list(dict.fromkeys(same))
        if labels:
            shown = "is shown" if len(labels) == 1 else "are shown"
            said.append(f"{_listed(labels)} {shown} once for all values of {axis.key}: it makes no difference there.")
    return said


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _section(results: SweepResults) -> str:
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(results))
    charts = ""
    if results.grid.axes:
        charts = (
            '<div class="controls">'
            '<label>over <select id="sweep-over"></select></label>'
            '<label>show <select id="sweep-show"></select></label></div>'
            '<div class="chart" id="sweep"></div>'
            "<p>Mean over the seeds; whiskers: Student’s 95 % interval. Lines without markers: the key makes no "
            "difference to them. The time to a target is drawn where every seed reached it.</p>"
        )
    return f'<section id="differs"><h2>What differs</h2><ul>{words}</ul>{_table(results)}{charts}</section>'


def _table(results: SweepResults) -> str:
    """A row per strategy and setting: mean and interval over the seeds."""
    keys = [axis.key for axis in results.grid.axes]
    names = short_names(keys)
    goals = goals_of(results)[-2:]
    targets = [f"to {goal_words(results, goal)}" for goal in goals]
    head = ["strategy", *(names[key] for key in keys), f"final {results.metric.name}", "bytes", *targets]
    body = []
    for row in results.summary["rows"]:
        cells = [escape(row["strategy"]), *(escape(setting_text(results, row, key)) for key in keys)]
        cells.append(_estimate(row["final_metric"], Metric(**row["metric"]).show))
        cells.append(_estimate(_total(row), human_bytes))
        times = {one["target"]: one for one in row["time_to_target"]}
        cells += [_time(times[goal], len(results.grid.seeds), row["finished"]) for goal in goals]
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _total(row: dict[str, Any]) -> dict[str, Any] | None:
    up, down = row["upload_bytes"], row["download_bytes"]
    return {"mean": up["mean"] + down["mean"], "low": None, "high": None} if up and down else None


def _time(one: dict[str, Any], seeds: int, finished: bool) -> str:
    if not one["reached"]:
        return f'<span class="never">{"never" if finished else "not yet"}</span>'
    part = f"<small>{one['reached']} of {seeds} seeds</small>" if one["reached"] < seeds else ""
    return _estimate(one["seconds"], human_seconds) + part


def _estimate(found: dict[str, Any] | None, show: Any) -> str:
    if found is None:
        return "–"
    interval = (
        "" if found["low"] is None else f"<small>{escape(show(found['low']))} – {escape(show(found['high']))}</small>"
    )
    return escape(show(found["mean"])) + interval


def _data(results: SweepResults) -> dict[str, Any]:
    """What the interactive picture draws: for every key and every measure its series."""
    return {
        "keys": [
            {
                "label": axis.key,
                "numeric": is_numeric(axis.values),
                "measures": [
                    {
                        "label": measure.name,
                        "title": measure.title,
                        "percent": measure.share,
                        "amount": measure.amount,
                        "series": [_drawn(one) for one in series(results, axis, measure)],
                    }
                    for measure in measures(results)
                ],
            }
            for axis in results.grid.axes
        ]
    }


def _drawn(one: Series) -> dict[str, Any]:
    return {
        "label": one.label,
        "colour": COLOURS[one.index % len(COLOURS)],
        "index": one.index,
        "flat": one.flat,
        "x": list(one.x) if is_numeric(one.x) else [plain_value(value) for value in one.x],
        **{name: [_short(value) for value in getattr(one, name)] for name in ("mean", "low", "high")},
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _details(results: SweepResults) -> str:
    texts = {
        f"{INDEX} of {results.path.name}": (results.path / INDEX).read_text(encoding="utf-8"),
        "Environment": json.dumps(results.runs[0].environment, indent=2, sort_keys=True),
    }
    return "".join(
        f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
        for title, text in texts.items()
    )
