"""From the name of a figure to its picture, its tables and the paper's numbers beside ours."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from feddd.errors import InputError
from feddd.experiments.cells import Cell, Store, cells
from feddd.experiments.plotting import save_figure
from feddd.experiments.report import write_report
from feddd.files import write_atomically
from feddd.paper import theorem
from feddd.paper.catalogue import PaperFigure
from feddd.paper.claims import CLAIMS
from feddd.paper.drawing import draw_label_share, draw_learning_rates, draw_panels, draw_theorem
from feddd.paper.measures import Answer
from feddd.paper.motivation import LabelShare, label_share
from feddd.paper.panels import Need, Panel, read_panel
from feddd.paper.scales import WORLDS, Scale, world_of
from feddd.paper.tables import (
    Drawn,
    Row,
    exchange_table,
    label_share_table,
    learning_rate_table,
    loss_table,
    markdown,
    panel_table,
    theorem_table,
)

# Labels, samples and epochs of the label-share figure; rounds of the theorem's.
_LABEL_SHARE = {"smoke": ((0,), 60, 1), "small": ((0, 3, 6), 2000, 10), "full": (tuple(range(10)), 6000, 10)}
_THEOREM_ROUNDS = {"smoke": 10, "small": 100, "full": 500}


@dataclass(frozen=True)
class Request:
    """What to reproduce, and where.

    only: keep the experiments whose name begins with one of these words    seeds: so many of the scale's, not all
    report: write an interactive page beside every picture
    """

    figures: Sequence[PaperFigure]
    scale: Scale
    folder: Path
    only: Sequence[str] = ()
    seeds: int | None = None
    report: bool = False
    data_dir: Path | None = None

    @property
    def store(self) -> Store:
        """Return the cells, shared by all scales and figures."""
        return Store(self.folder / "cells")

    def needs(self) -> dict[str, list[Need]]:
        """Return the experiments of each figure; figures of which `only` leaves nothing are dropped."""
        found = {figure.name: figure.needs(self.scale, self.only, self.seeds) for figure in self.figures}
        kept = {name: needs for name, needs in found.items() if needs or (name == "theorem" and not self.only)}
        if not kept:
            raise InputError(f"none of these figures has an experiment whose name begins with {' or '.join(self.only)}")
        return kept

    def progress(self) -> list[dict[str, Any]]:
        """Return every figure with how many of its cells are kept."""
        rows = []
        for figure in self.figures:
            wanted = {cell.folder: cell for cell in dataclasses.replace(self, figures=[figure]).cells()}
            kept = sum(self.store.has(cell) for cell in wanted.values())
            about = {"figure": figure.name, "number": figure.number, "title": figure.title}
            rows.append(about | {"presets": list(figure.presets), "cells": len(wanted), "kept": kept})
        return rows

    def cells(self) -> list[Cell]:
        """Return every cell the figures need, as often as they need it."""
        figures = {figure.name: figure for figure in self.figures}
        wanted = [need for name, needs in self.needs().items() if figures[name].kind != "label-share" for need in needs]
        return list(chain.from_iterable(cells(need.experiment, need.seeds) for need in wanted))


def draw(request: Request) -> list[Drawn]:
    """Draw every figure from the cells there are, and write picture, tables and comparison beside each other."""
    needs = request.needs()
    folder = request.folder / request.scale.name
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(request, one, needs[one.name], folder) for one in request.figures if one.name in needs]


def _draw(request: Request, figure: PaperFigure, needs: Sequence[Need], folder: Path) -> Drawn:
    panels: dict[str, Panel] = {}
    if figure.kind == "theorem":
        outcomes = theorem.outcomes(_THEOREM_ROUNDS[request.scale.name])
        picture, tables = draw_theorem(outcomes), [("", theorem_table(outcomes))]
    elif figure.kind == "label-share":
        found = {need.experiment.name: _label_share(request, need) for need in needs}
        picture, tables = draw_label_share(found), [("", label_share_table(found))]
    else:
        panels = {need.experiment.name: read_panel(request.store, need) for need in needs}
        picture, tables = _from_panels(figure, panels)
    answered = [(claim, *claim.answer(panels)) for claim in CLAIMS if claim.figure == figure.name]
    rows = [
        Row(claim.says, claim.paper, answer.words, off, answer.seeds)
        for claim, answer, off in answered
        if not request.only or answer.words != "not run"
    ]
    files = save_figure(picture, folder / figure.name)
    written = Drawn(figure, _command(request, figure), _notes(request, figure, needs), tables, rows, files)
    texts = {
        "md": markdown(written),
        "json": json.dumps(_document(written, answered), indent=2, allow_nan=False) + "\n",
    }
    for suffix, text in texts.items():
        path = folder / f"{figure.name}.{suffix}"
        write_atomically(path, text.encode())
        files.append(path)
    runs = [run for panel in panels.values() for run in panel.runs if run.tables["rounds"].num_rows]
    if request.report and runs:
        files.append(write_report(runs, folder / f"{figure.name}.html"))
    return written


def _from_panels(figure: PaperFigure, panels: Mapping[str, Panel]) -> tuple[Figure, list[tuple[str, list[list[str]]]]]:
    if figure.kind == "widths":
        return draw_panels(figure, list(panels.values())), [(name, loss_table(one)) for name, one in panels.items()]
    if figure.kind != "learning-rates":
        table = exchange_table if figure.kind == "exchange" else panel_table
        return draw_panels(figure, list(panels.values())), [(name, table(one)) for name, one in panels.items()]
    sweep = {name: panel for name, panel in panels.items() if "-rate-" in name}
    best = {name: panel for name, panel in panels.items() if name not in sweep}
    rates: dict[str, dict[float, float]] = {}
    for panel in sweep.values():
        for run in panel.finished("fedavg"):
            accuracy = run.rows("rounds", strategy="fedavg")[-1]["test_accuracy"]
            rates.setdefault(panel.experiment.data.dataset, {})[panel.experiment.training.learning_rate] = accuracy
    tables = [("FedAvg's validation accuracy", learning_rate_table(rates))] if rates else []
    tables += [(name, panel_table(panel)) for name, panel in best.items()]
    return draw_learning_rates(rates, list(best.values())), tables


def _label_share(request: Request, need: Need) -> list[LabelShare]:
    """Measured once and kept, like a cell."""
    labels, samples, epochs = _LABEL_SHARE[request.scale.name]
    path = request.folder / "label-share" / f"{request.scale.name}-{need.experiment.name}.json"
    if path.is_file():
        return [LabelShare(**point) for point in json.loads(path.read_text(encoding="utf-8"))]
    whole = need.experiment.model_copy(update={"data": need.experiment.data.model_copy(update={"train_limit": None})})
    found = label_share(whole, labels, samples, epochs, request.data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps([dataclasses.asdict(point) for point in found]).encode())
    return found


def _command(request: Request, figure: PaperFigure) -> str:
    only = "".join(f" --only {shlex.quote(word)}" for word in request.only)
    seeds = "" if request.seeds is None else f" --seeds {request.seeds}"
    return f"feddd reproduce {figure.name} --scale {request.scale.name}{only}{seeds}"


def _notes(request: Request, figure: PaperFigure, needs: Sequence[Need]) -> list[str]:
    """Return the settings that a reader must know: what the scale changes, or what was done besides experiments."""
    head = f"Scale {request.scale.name}."
    if figure.kind == "theorem":
        problem = theorem.make_problem(0.0)
        size = f"{len(problem.targets)} clients, {len(problem.start)} units of {len(problem.inputs)} weights"
        rounds = f"{_THEOREM_ROUNDS[request.scale.name]} rounds at dropout {theorem.DROPOUT:g}"
        return [head, f"{size}, L = {problem.smoothness:.2f}, η = {theorem.STEP:g}/L, {rounds}."]
    if figure.kind == "label-share":
        labels, samples, epochs = _LABEL_SHARE[request.scale.name]
        which = ", ".join(str(label) for label in labels)
        return [head, f"Labels {which}; {samples:,} training samples, {epochs} epochs, one seed."]
    worlds = dict.fromkeys(world_of(need.experiment) for need in needs)
    together: dict[str, list[str]] = {}
    for world in (world for world in WORLDS if world in worlds and world in request.scale.words):
        together.setdefault(request.scale.words[world], []).append(WORLDS[world])
    said = [f"{' and '.join(which)}: {words}." for words, which in together.items()]
    return [head, *said]


def _document(drawn: Drawn, answered: Sequence[tuple[Any, Answer, str]]) -> dict[str, Any]:
    claims = [
        {"claim": claim.says, "paper": claim.paper, "ours": dataclasses.asdict(answer), "difference": off}
        for claim, answer, off in answered
    ]
    return {
        "figure": drawn.figure.name,
        "title": drawn.figure.title,
        "command": drawn.command,
        "notes": drawn.notes,
        "tables": [{"title": title, "rows": rows} for title, rows in drawn.tables],
        "claims": claims,
    }
