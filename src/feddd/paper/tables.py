"""The tables of a figure: rows of cells, the first row their heads, and the page they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from feddd.experiments.results import Results, reference_label
from feddd.experiments.statistics import PERCENT, estimate, saving
from feddd.experiments.views import human_bytes, human_seconds
from feddd.paper.catalogue import PaperFigure
from feddd.paper.measures import over_rounds, shown
from feddd.paper.motivation import SHARES, LabelShare, loss_by_width
from feddd.paper.panels import Panel, accuracy, reached_by_all, seconds_to
from feddd.paper.theorem import Outcome
from feddd.world import models

Rows = list[list[str]]


@dataclass(frozen=True)
class Row:
    """A claim with its answer, as printed and kept."""

    claim: str
    paper: str
    ours: str
    difference: str
    seeds: int


@dataclass(frozen=True)
class Drawn:
    """A figure with everything that was written about it."""

    figure: PaperFigure
    command: str
    notes: list[str]
    tables: list[tuple[str, Rows]]
    claims: list[Row]
    files: list[Path]


def panel_table(panel: Panel) -> Rows:
    """Per strategy: final accuracy with its seeds, bytes, and to each target the time and what it saves.

    What is saved is of FedAvg's time, or of the first strategy's where there is no FedAvg.
    """
    experiment = panel.experiment
    sections = {"strategy": [section.model_dump() for section in experiment.strategy]}
    reference = reference_label(sections) or experiment.strategy[0].label
    last = panel.final_rounds
    head = [
        "strategy",
        f"final accuracy (%){over_rounds(last)}",
        "bytes",
        *(f"time to {100 * target:g} %" for target in experiment.targets),
    ]
    rows = [head]
    for section in experiment.strategy:
        runs = panel.finished(section.label)
        if not runs:
            rows.append([section.label, panel.divergence(section.label) or "not run", *[""] * (len(head) - 2)])
            continue
        finals = [accuracy(run, section.label, last) for run in runs]
        each = f" ({', '.join(f'{value:.1f}' for value in finals)})" if len(finals) > 1 else ""
        each += f"; {words}" if (words := panel.divergence(section.label)) else ""
        amount = human_bytes(fmean(_bytes(run, section.label) for run in runs))
        times = [_time(panel, section.label, reference, target) for target in experiment.targets]
        rows.append([section.label, f"{fmean(finals):.1f}{each}", amount, *times])
    return rows


def exchange_table(panel: Panel) -> Rows:
    """Per strategy: final accuracy with its interval, bytes, and what it takes to the highest targets of FedAvg."""
    experiment = panel.experiment
    reference = reference_label({"strategy": [section.model_dump() for section in experiment.strategy]})
    runs = panel.finished(reference) if reference else []
    targets = [goal for goal in sorted(experiment.targets) if reached_by_all(runs, [reference or ""], [goal])][-2:]
    columns = [f"{what} to {100 * goal:g} %" for goal in targets for what in ("time", "bytes")]
    last = panel.final_rounds
    rows = [["strategy", f"final accuracy{over_rounds(last)}", "bytes", *columns, "seeds"]]
    for section in experiment.strategy:
        label, runs = section.label, panel.finished(section.label)
        if not runs:
            rows.append([label, panel.divergence(label) or "not run", *[""] * (len(rows[0]) - 2)])
            continue
        final = shown(estimate([accuracy(run, label, last) for run in runs], PERCENT), "%")
        final += f"; {words}" if (words := panel.divergence(label)) else ""
        total = human_bytes(fmean(_bytes(run, label) for run in runs))
        spent = [
            text for goal in targets for text in (_time(panel, label, reference, goal), _bytes_to(panel, label, goal))
        ]
        rows.append([label, final, total, *spent, str(len(runs))])
    return rows


def _bytes_to(panel: Panel, label: str, target: float) -> str:
    """Return the bytes both ways until the target is first reached, the mean over the seeds that reach it."""
    spent = []
    for run in panel.finished(label):
        rows = run.rows("rounds", strategy=label)
        first = next((n for n, row in enumerate(rows, 1) if (row["test_accuracy"] or 0.0) >= target), None)
        if first is not None:
            spent.append(float(sum(row["upload_bytes"] + row["download_bytes"] for row in rows[:first])))
    return human_bytes(fmean(spent)) if spent else "never"


def _bytes(run: Results, label: str) -> float:
    rows = run.rows("rounds", strategy=label)
    return float(sum(row["upload_bytes"] + row["download_bytes"] for row in rows))


def _time(panel: Panel, label: str, reference: str | None, target: float) -> str:
    """Return the mean time to a target over the seeds that reach it, and the saving against the same seeds' FedAvg."""
    runs = panel.finished(label)
    times = [seconds_to(run, label, target) for run in runs]
    reached = [seconds for seconds in times if seconds is not None]
    if not reached:
        return "never"
    text = human_seconds(fmean(reached))
    if len(reached) < len(times):
        text += f" ({len(reached)} of {len(times)} seeds)"
    if reference is None or label == reference:
        return text
    pairs = [
        (mine, theirs)
        for run, mine in zip(runs, times, strict=True)
        if mine is not None and run in panel.finished(reference) and (theirs := seconds_to(run, reference, target))
    ]
    if not pairs:
        return f"{text} ({reference}: never)"
    found = saving(*zip(*pairs, strict=True))
    if found.low is None or found.high is None:
        return f"{text}, {_percent(-found.mean)} %"
    return f"{text}, {_percent(-found.mean)} % [{_percent(-found.high)}, {_percent(-found.low)}]"


def _percent(value: float) -> str:
    return f"{value:+.0f}".replace("-", "−")


def loss_table(panel: Panel) -> Rows:
    """Return the mean training loss of each sub-model's clients in some rounds."""
    label = panel.experiment.strategy[0].label
    runs = panel.finished(label)
    count = models.widths(panel.experiment.model.name)
    if not runs:
        return [["sub-model"], *([str(width + 1)] for width in range(count))]
    losses = [loss_by_width(run, label, count) for run in runs]
    last = panel.experiment.rounds
    rounds = sorted({max(1, round(last * share)) for share in (0.05, 0.1, 0.25, 0.5, 1.0)})
    return [
        ["sub-model", *(f"round {number}" for number in rounds)],
        *(
            [str(width + 1), *(f"{fmean(run[width][number - 1] for run in losses):.3f}" for number in rounds)]
            for width in range(count)
        ),
    ]


def label_share_table(found: Mapping[str, Sequence[LabelShare]]) -> Rows:
    """Return the mean accuracy over the labels, per share."""
    return [
        ["share of the label", *found],
        *(
            [
                f"{100 * share:g} %",
                *(
                    f"{100 * fmean(one.accuracy for one in points if one.share == share):.1f} %"
                    for points in found.values()
                ),
            ]
            for share in SHARES
        ),
    ]


def learning_rate_table(rates: Mapping[str, Mapping[float, float]]) -> Rows:
    """Validation accuracy per data set and rate."""
    known = sorted({rate for points in rates.values() for rate in points})
    return [
        ["data set", *(f"{rate:g}" for rate in known)],
        *(
            [name, *(f"{100 * points[rate]:.1f} %" if rate in points else "" for rate in known)]
            for name, points in rates.items()
        ),
    ]


def theorem_table(outcomes: Sequence[Outcome]) -> Rows:
    """Return what was measured, both ε, and the bounds."""
    keys = list(outcomes[0].bounds)
    head = ["selection", "spread", "h", "mean ‖∇F‖²", "ε on weights", "ε on gradients"]
    return [
        [*head, *(f"{form} bound, ε on {error}" for error, form in keys)],
        *(
            [
                one.selector,
                f"{one.spread:g}",
                str(one.broadcast_every),
                f"{one.measured:.4g}",
                f"{one.weight_error:.3g}",
                f"{one.gradient_error:.3g}",
                *(_bound(one, one.bounds[key]) for key in keys),
            ]
            for one in outcomes
        ),
    ]


def _bound(one: Outcome, bound: float | None) -> str:
    if bound is None:
        return "says nothing"
    return f"{bound:.4g}, {'holds' if one.measured <= bound else 'violated'}"


def markdown(drawn: Drawn) -> str:
    """Return a block for a page: command, picture, tables, and the paper's numbers beside ours."""
    parts = [f"    {drawn.command}", " ".join(drawn.notes), f"![{drawn.figure.title}]({drawn.figure.name}.png)"]
    for title, rows in drawn.tables:
        parts += [f"**{title}**"] if title else []
        parts.append(as_markdown(rows))
    if drawn.claims:
        head = ["the paper says", "paper", "ours", "ours − paper", "seeds"]
        body = [[row.claim, row.paper, row.ours, row.difference, str(row.seeds or "")] for row in drawn.claims]
        parts.append(as_markdown([head, *body]))
    return "\n\n".join(parts) + "\n"


def as_markdown(rows: Rows) -> str:
    """Return a table in Markdown; what a cell says is text, whatever it looks like."""
    head, *body = (
        [" ".join(cell.replace("|", "\\|").replace("<", "&lt;").splitlines()) for cell in row] for row in rows
    )
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
