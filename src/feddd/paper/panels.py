"""A panel of a figure: one experiment with its runs, one per seed, and the numbers that claims are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feddd.experiments.config import Experiment
from feddd.experiments.results import Results, time_to_accuracy
from feddd.experiments.views import Line, lines, rounds_done
from feddd.paper.cells import Store


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
        """One line per strategy, whether it was run or not."""
        return lines(self.runs)

    def finished(self, *labels: str) -> list[Results]:
        """The seeds for which all these strategies were run to their end."""
        rounds = self.experiment.rounds
        return [run for run in self.runs if all(rounds_done(run, label) >= rounds for label in labels)]

    def diverged(self, label: str) -> list[int]:
        """The rounds in which every client of a strategy diverged, of the seeds where that happened."""
        done = [rounds_done(run, label) for run in self.runs]
        return [rounds + 1 for rounds in done if 0 < rounds < self.experiment.rounds]

    def divergence(self, label: str) -> str:
        """That in words; nothing where it did not happen."""
        rounds = self.diverged(label)
        return f"diverged in round {', '.join(map(str, rounds))}" if rounds else ""


def read_panel(store: Store, need: Need) -> Panel:
    """What the store has of an experiment."""
    return Panel(need.experiment, tuple(store.combine(need.experiment, seed) for seed in need.seeds))


def accuracy(run: Results, label: str) -> float:
    """Test accuracy after the last round, in percent."""
    return 100.0 * float(run.rows("rounds", strategy=label)[-1]["test_accuracy"])


def accuracy_at(run: Results, label: str, share: float) -> float:
    """Test accuracy in percent at this share of the rounds, in the last round tested by then."""
    rows = run.rows("rounds", strategy=label)
    tested = [
        row["test_accuracy"] for row in rows[: max(1, round(share * len(rows)))] if row["test_accuracy"] is not None
    ]
    return 100.0 * float(tested[-1]) if tested else float("nan")


def class_accuracy(run: Results, label: str, number: int) -> float:
    """Accuracy of one class after the last round, in percent."""
    rows = run.rows("classes", strategy=label, label=number)
    return 100.0 * float(rows[-1]["accuracy"])


def seconds_to(run: Results, label: str, target: float) -> float | None:
    """Simulated seconds to a target accuracy; None for never."""
    return time_to_accuracy(run.rows("rounds", strategy=label), target)


def seconds_a_round(run: Results, label: str) -> float:
    """Simulated seconds of a round, on average."""
    rows = run.rows("rounds", strategy=label)
    return float(rows[-1]["clock_seconds"]) / len(rows)


def reached_by_all(runs: Sequence[Results], labels: Sequence[str], targets: Sequence[float]) -> float | None:
    """The highest of the targets that all these strategies reach in all runs."""
    for target in sorted(targets, reverse=True):
        if runs and all(seconds_to(run, label, target) is not None for run in runs for label in labels):
            return target
    return None


Panels = Mapping[str, Panel]
"""By the name of their experiment."""
