"""A panel of a figure: one experiment with its runs, one per seed, and the numbers that claims are about."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from feddd.experiments.cells import Store
from feddd.experiments.config import Experiment
from feddd.experiments.results import Results, time_to_target
from feddd.experiments.views import Line, lines, rounds_done

WINDOW = 5
"""Rounds that an accuracy is averaged over where curves jump, and where it is read on the way."""
JUMP = 1.0
"""A curve jumps if its changes from round to round differ by this many points (their standard deviation)."""
JUDGED = 10
"""The changes, at the end of a run, that this is judged by."""


@dataclass(frozen=True)
class Need:
    """An experiment that a figure needs, at its scale, and on which seeds."""

    experiment: Experiment
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Panel:
    """An experiment and its runs; strategies that were not run yet have no rows."""

    experiment: Experiment
    runs: tuple[Results, ...]

    @property
    def lines(self) -> list[Line]:
        """Return one line per strategy, whether it was run or not."""
        return lines(self.runs)

    def finished(self, *labels: str) -> list[Results]:
        """Return the seeds for which all these strategies were run to their end."""
        rounds = self.experiment.rounds
        return [run for run in self.runs if all(rounds_done(run, label) >= rounds for label in labels)]

    @functools.cached_property
    def final_rounds(self) -> int:
        """How many rounds a final accuracy is the mean of: for all strategies several if the curve of one jumps."""
        for section in self.experiment.strategy:
            found = [jump for run in self.finished(section.label) if (jump := _jump(run, section.label)) is not None]
            if found and fmean(found) > JUMP:
                return WINDOW
        return 1

    def diverged(self, label: str) -> list[int]:
        """Return the rounds in which every client of a strategy diverged, of the seeds where that happened."""
        done = [rounds_done(run, label) for run in self.runs]
        return [rounds + 1 for rounds in done if 0 < rounds < self.experiment.rounds]

    def divergence(self, label: str) -> str:
        """Say in which rounds a strategy diverged; "" if it did not."""
        rounds = self.diverged(label)
        return f"diverged in round {', '.join(map(str, rounds))}" if rounds else ""


def read_panel(store: Store, need: Need) -> Panel:
    """Return what the store has of an experiment."""
    return Panel(need.experiment, tuple(store.combine(need.experiment, seed) for seed in need.seeds))


def _tested(run: Results, label: str) -> list[tuple[int, float]]:
    """Return the rounds that were tested, with the accuracy in percent."""
    rows = run.rows("rounds", strategy=label)
    return [(row["round"], 100.0 * row["test_accuracy"]) for row in rows if row["test_accuracy"] is not None]


def _jump(run: Results, label: str) -> float | None:
    """How unlike the last changes of the accuracy are to each other, in points; None for a run that is too short."""
    last = [accuracy for _, accuracy in _tested(run, label)][-JUDGED - 1 :]
    if len(last) <= JUDGED:
        return None
    return stdev(after - before for before, after in pairwise(last))


def accuracy(run: Results, label: str, rounds: int = 1) -> float:
    """Test accuracy in percent after the last round, or the mean of the last tested ones."""
    return fmean(value for _, value in _tested(run, label)[-rounds:])


def accuracy_around(run: Results, label: str, share: float) -> float:
    """Test accuracy in percent at this share of the rounds: the mean of the tested rounds nearest to it."""
    tested = _tested(run, label)
    middle = share * tested[-1][0]
    nearest = sorted(tested, key=lambda each: abs(each[0] - middle))[:WINDOW]
    return fmean(value for _, value in nearest)


def class_accuracy(run: Results, label: str, number: int, rounds: int = 1) -> float:
    """Return accuracy of one class in percent after the last round, or the mean of the last tested ones."""
    rows = run.rows("classes", strategy=label, label=number)
    return 100.0 * fmean(row["accuracy"] for row in rows[-rounds:])


def seconds_to(run: Results, label: str, target: float) -> float | None:
    """Simulated seconds to a target accuracy; None for never."""
    return time_to_target(run.rows("rounds", strategy=label), target)


def seconds_a_round(run: Results, label: str) -> float:
    """Simulated seconds of a round, on average."""
    rows = run.rows("rounds", strategy=label)
    return float(rows[-1]["clock_seconds"]) / len(rows)


def reached_by_all(runs: Sequence[Results], labels: Sequence[str], targets: Sequence[float]) -> float | None:
    """Return the highest of the targets that all these strategies reach in all runs."""
    for target in sorted(targets, reverse=True):
        if runs and all(seconds_to(run, label, target) is not None for run in runs for label in labels):
            return target
    return None


Panels = Mapping[str, Panel]
"""By the name of their experiment."""
