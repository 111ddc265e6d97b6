"""One self-contained page about one or several runs: words, tables and interactive pictures; no network needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from feddd.errors import InputError
from feddd.experiments.metrics import common_metric
from feddd.experiments.report_data import page_data
from feddd.experiments.results import Results, summarise
from feddd.experiments.views import (
    Line,
    Reach,
    curve,
    experiments,
    human_bytes,
    human_seconds,
    lines,
    metric_of_all,
    not_counted,
    reach,
    rounds_done,
    targets,
)
from feddd.files import write_atomically

_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class Addition:
    """What the page about a sweep has of its own: title, a section, what its picture draws, how to repeat it (HTML)."""

    title: str
    html: str
    data: Mapping[str, Any]
    details: str


def write_report(
    results: Sequence[Results], path: Path, *, refresh_seconds: int | None = None, addition: Addition | None = None
) -> Path:
    """Write the page about these runs; an old page stays whole until the new one is complete.

    refresh_seconds: an open page loads itself again after so long, for a run that goes on
    """
    if not results:
        raise InputError("a report needs at least one run")
    page = render(results, refresh_seconds, addition)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode())
    return path


def render(results: Sequence[Results], refresh_seconds: int | None = None, addition: Addition | None = None) -> str:
    """Return the page as text; the same tables give the same text."""
    from plotly.offline import get_plotlyjs

    shown = lines(results)
    data = page_data(results) | {"sweep": addition.data if addition else None}
    parts = {
        "refresh": f'<meta http-equiv="refresh" content="{refresh_seconds}">\n' if refresh_seconds else "",
        "metric": escape(metric_of_all(results).name),
        "title": escape(addition.title if addition else ", ".join(name for name, _ in experiments(results))),
        "facts": "".join(f"<li>{escape(fact)}</li>" for fact in facts(results)),
        "unfinished": _unfinished(results),
        "words": "".join(f"<p>{_together(escape(sentence))}</p>" for sentence in sentences(results)),
        "summary": _summary_table(shown),
        "targets": _target_table(shown, targets(results)),
        "not_counted": _not_counted_table(shown),
        "sweep": addition.html if addition else "",
        "details": addition.details if addition else "".join(_details(run) for run in results),
        # In a script element only "<" could end the data early.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    # One pass: what is filled in is never searched for places to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _together(text: str) -> str:
    """Return a number does not lose its sign at the end of a line."""
    return text.replace(" ×", "&nbsp;×").replace(" %", "&nbsp;%")


def facts(results: Sequence[Results]) -> list[str]:
    """Return what was run, in a few words each."""
    found: dict[str, None] = {}
    for _, runs in experiments(results):
        config = runs[0].config
        data, fleet, model = (config.get(key, {}) for key in ("data", "fleet", "model"))
        seeds = ", ".join(str(run.config["seed"]) for run in runs)
        words = [
            " ".join(str(data[key]).rstrip("/").rpartition("/")[2] for key in ("dataset", "partition") if key in data),
            str(model.get("name", "")),
            f"{fleet['clients']} clients" if "clients" in fleet else "",
            f"{config['rounds']} rounds",
            f"seed {seeds}" if len(runs) == 1 else f"seeds {seeds}",
        ]
        found.update(dict.fromkeys(word for word in words if word))
    return list(found)


def sentences(results: Sequence[Results]) -> list[str]:
    """Return the outcome in plain words: for every experiment the comparison with FedAvg, then the final accuracies."""
    said = []
    groups = experiments(results)
    shown = lines(results)
    for name, runs in groups:
        mine = [line for line in shown if line.runs[0] is runs[0]]
        goals = runs[0].metric.hardest_last(float(target) for target in runs[0].config["targets"])
        prefix = f"{name}: " if len(groups) > 1 else ""
        said.append(prefix + " ".join(part for part in (_comparison(mine, goals), _accuracies(mine)) if part))
    return said


def _comparison(shown: Sequence[Line], goals: Sequence[float]) -> str:
    """Return the highest target that FedAvg and another strategy reached in every run, and what it cost the others."""
    reference = next((line for line in shown if line.strategy == line.reference), None)
    if reference is None:
        return "There is no FedAvg in this experiment to compare with."
    others = [line for line in shown if line is not reference]
    for goal in reversed(goals):
        reached = {line.label: reach(line, goal) for line in others}
        first = sorted(
            (label for label, one in reached.items() if len(one.time_ratios) == one.runs),
            key=lambda label: fmean(reached[label].time_ratios),
        )
        if first:
            rest = [line for line in others if line.label not in first]
            target = _goal(reference, goal)
            parts = [_cost(label, reached[label], target, reference.label, label == first[0]) for label in first]
            parts += [f"{line.label} {_shortfall(line, reached[line.label])}" for line in rest]
            return "; ".join(parts) + "."
        if any(one.seconds for one in reached.values()) and not reach(reference, goal).seconds:
            best = min(
                (label for label in reached if reached[label].seconds), key=lambda at: fmean(reached[at].seconds)
            )
            time = human_seconds(fmean(reached[best].seconds))
            return f"{best} reached {_goal(reference, goal)} in {time}, {reference.label} {_never(reference)}."
    name = reference.metric.name
    return f"No target {name} was reached by both {reference.label} and another strategy." if others and goals else ""


def _goal(line: Line, goal: float) -> str:
    """Return a target as a sentence has it; an accuracy needs no name beside its percent."""
    return (
        line.metric.show_target(goal) if line.metric.percent else f"{line.metric.name} {line.metric.show_target(goal)}"
    )


def _cost(label: str, one: Reach, goal: str, reference: str, leads: bool) -> str:
    time, amount = fmean(one.time_ratios), fmean(one.byte_ratios)
    if leads:
        return f"{label} reached {goal} in {time:.2f} × {reference}'s time, with {amount:.2f} × the bytes"
    return f"{label} in {time:.2f} × the time, with {amount:.2f} × the bytes"


def _shortfall(line: Line, one: Reach) -> str:
    return f"reached it in {len(one.seconds)} of {one.runs} runs" if one.seconds else f"{_never(line)} reached it"


def _never(line: Line) -> str:
    return "never" if line.finished else "has not yet"


def _accuracies(shown: Sequence[Line]) -> str:
    last = [(line.label, found.mean[-1]) for line in shown if (found := curve(line)).mean]
    if not last:
        return "No model was tested yet."
    metric = shown[0].metric
    head = f"Final test {metric.name}" if all(line.finished for line in shown) else f"Test {metric.name} so far"
    return f"{head}: " + ", ".join(f"{label} {metric.show(value)}" for label, value in last) + "."


def _unfinished(results: Sequence[Results]) -> str:
    items = []
    for run in results:
        total = run.config["rounds"]
        done = {label: rounds_done(run, label) for label in run.labels}
        short = [f"{label} {number} of {total} rounds" for label, number in done.items() if number < total]
        if short or not run.summary:
            what = ", ".join(short) if short else "all rounds are there, the summary is not"
            items.append("<li>" + escape(f"{run.path.name} (seed {run.config['seed']}): {what}") + "</li>")
    if not items:
        return ""
    head = "<strong>Unfinished.</strong> This is what there is so far."
    return f'<aside class="unfinished">{head}<ul>{"".join(items)}</ul></aside>'


def _summary_table(shown: Sequence[Line]) -> str:
    metric = common_metric(line.runs[0].config for line in shown)
    columns: tuple[tuple[str, str, Any], ...] = (
        ("rounds", "rounds", "{:g}".format),
        (f"final {metric.name}", "final_metric", metric.show),
        (f"best {metric.name}", "best_metric", metric.show),
        ("simulated time", "clock_seconds", human_seconds),
        ("uploaded", "upload_bytes", human_bytes),
        ("downloaded", "download_bytes", human_bytes),
    )
    if any(run.tables["client_metrics"].num_rows for line in shown for run in line.runs):
        columns = (*columns, (f"{metric.name} of the worst tenth of clients", "worst_tenth_of_clients", metric.show))
    summaries = {id(run): summarise(run)["strategies"] for line in shown for run in line.runs}
    rows = []
    for line in shown:
        mine = [summaries[id(run)][line.strategy] for run in line.runs]
        mark = "" if line.finished else ' <em class="mark">unfinished</em>'
        rows.append([_key(line) + mark, *(_spread([one.get(key) for one in mine], show) for _, key, show in columns)])
    return _table(("strategy", *(name for name, _, _ in columns)), rows)


def _target_table(shown: Sequence[Line], goals: Sequence[float]) -> str:
    rows = [[_key(line), *(_reach_cell(line, reach(line, goal)) for goal in goals)] for line in shown]
    metric = common_metric(line.runs[0].config for line in shown)
    return _table(("strategy", *(metric.show_target(goal) for goal in goals)), rows)


def _reach_cell(line: Line, one: Reach) -> str:
    if not one.seconds:
        return f'<span class="never">{"never" if line.finished else "not yet"}</span>'
    notes = [f"{fmean(one.time_ratios):.2f} × FedAvg"] if one.time_ratios else []
    if len(one.seconds) < one.runs:
        notes.append(f"{len(one.seconds)} of {one.runs} runs")
    return _spread(one.seconds, human_seconds) + "".join(f"<small>{note}</small>" for note in notes)


def _not_counted_table(shown: Sequence[Line]) -> str:
    rows = [
        [_key(line), escape(reason), f"{count:,}"]
        for line in shown
        for reason, count in sorted(not_counted(line).items())
    ]
    if not rows:
        return ""
    return (
        '<section id="not-counted"><h2>Clients that did not count</h2>'
        "<p>How often a client was addressed in a round and its work was not used, by reason.</p>"
        f"{_table(('strategy', 'reason', 'times'), rows)}</section>"
    )


def _spread(values: Iterable[float | None], show: Any) -> str:
    """Return the mean of what is known, and from–to where runs differ."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    low, high = show(min(known)), show(max(known))
    return escape(show(fmean(known))) + (f"<small>{escape(low)} – {escape(high)}</small>" if low != high else "")


def _key(line: Line) -> str:
    return f'<span class="key" style="background:{line.colour}"></span>{escape(line.label)}'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _details(run: Results) -> str:
    name = escape(f"{run.path.name}, seed {run.config['seed']}")
    texts = {
        "Resolved config": tomli_w.dumps(dict(run.config)),
        "Environment": json.dumps(run.environment, indent=2, sort_keys=True),
    }
    return "".join(
        f"<details><summary>{title} of {name}</summary><pre>{escape(text)}</pre></details>"
        for title, text in texts.items()
    )
