"""How our number for a claim of the paper is measured: small functions from the panels of a figure to an answer.

Every measure pairs methods on the same seed. A target accuracy that the runs at hand do not reach is replaced by the
highest of the experiment's targets that FedDD and FedAvg reach on every seed, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from feddd.experiments.results import Results
from feddd.experiments.statistics import PERCENT, Estimate, difference, estimate, saving
from feddd.paper.panels import (
    Panel,
    Panels,
    accuracy,
    accuracy_around,
    class_accuracy,
    reached_by_all,
    seconds_a_round,
    seconds_to,
)

Paper = float | tuple[float, float] | None
"""The paper's number, its range, or nothing where it says something in words only."""


@dataclass(frozen=True)
class Answer:
    """Ours beside the paper's. words: what was measured, or why not    value: a number, or the ends of a range"""

    words: str
    value: float | tuple[float, float] | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0


Measure = Callable[[Panels], Answer]
NOT_RUN = Answer("not run")


def final(preset: str, label: str) -> Measure:
    """Final test accuracy, in percent."""

    def measure(runs: Sequence[Results], rounds: int) -> Estimate:
        return estimate([accuracy(run, label, rounds) for run in runs], PERCENT)

    return _at_the_end(preset, (label,), measure, "%")


def gap(preset: str, other: str, ours: str = "feddd") -> Measure:
    """Final accuracy of ours above the other's, in points."""

    def measure(runs: Sequence[Results], rounds: int) -> Estimate:
        return difference(*([accuracy(run, label, rounds) for run in runs] for label in (ours, other)))

    return _at_the_end(preset, (ours, other), measure, "points")


def early_gap(preset: str, other: str, ours: str, share: float) -> Measure:
    """Return accuracy of ours above the other's around this share of the rounds, in points."""

    def measure(runs: Sequence[Results]) -> Estimate:
        return difference(*([accuracy_around(run, label, share) for run in runs] for label in (ours, other)))

    return _over_seeds(preset, (ours, other), measure, "points")


def of_class(preset: str, label: str, number: int) -> Measure:
    """Final accuracy of one class, in percent."""

    def measure(runs: Sequence[Results], rounds: int) -> Estimate:
        return estimate([class_accuracy(run, label, number, rounds) for run in runs], PERCENT)

    return _at_the_end(preset, (label,), measure, "%")


def round_time(preset: str, other: str, ours: str) -> Measure:
    """Return how much longer ours takes for a round than the other, in percent."""

    def measure(runs: Sequence[Results]) -> Estimate:
        return estimate([100.0 * (seconds_a_round(run, ours) / seconds_a_round(run, other) - 1.0) for run in runs])

    return _over_seeds(preset, (ours, other), measure, "%")


def _over_seeds(
    preset: str, labels: Sequence[str], measure: Callable[[Sequence[Results]], Estimate], unit: str
) -> Measure:
    def answer(panels: Panels) -> Answer:
        runs = _runs(panels, preset, labels)
        return _answer(measure(runs), unit) if runs else _unfinished(panels, preset, labels)

    return answer


def _at_the_end(
    preset: str, labels: Sequence[str], measure: Callable[[Sequence[Results], int], Estimate], unit: str
) -> Measure:
    """Return a measure of final accuracies: over how many rounds they are taken depends on the panel, and is said."""

    def answer(panels: Panels) -> Answer:
        runs = _runs(panels, preset, labels)
        if not runs:
            return _unfinished(panels, preset, labels)
        rounds = panels[preset].final_rounds
        return _answer(measure(runs, rounds), unit, over_rounds(rounds))

    return answer


def over_rounds(rounds: int) -> str:
    """Return what to add to a final accuracy that is not that of the last round alone."""
    return f", mean of the last {rounds} rounds" if rounds > 1 else ""


def _unfinished(panels: Panels, preset: str, labels: Sequence[str]) -> Answer:
    """Return why there is no number: not run, or a strategy that diverged."""
    for label in labels if preset in panels else ():
        if words := panels[preset].divergence(label):
            return Answer(f"{label} {words}", seeds=len(panels[preset].diverged(label)))
    return NOT_RUN


def _runs(panels: Panels, preset: str, labels: Sequence[str]) -> list[Results]:
    return panels[preset].finished(*labels) if preset in panels else []


def _answer(found: Estimate, unit: str, note: str = "") -> Answer:
    return Answer(shown(found, unit) + note, found.mean, found.low, found.high, len(found.values))


def shown(found: Estimate, unit: str) -> str:
    """Return a mean with its interval, or the only value."""
    sign = unit == "points"
    text = f"{tenths(found.mean, sign)} {unit}"
    if found.low is None or found.high is None:
        return f"{text} (one seed)"
    return f"{text} [{tenths(found.low, sign)}, {tenths(found.high, sign)}]"


def tenths(value: float, sign: bool = True) -> str:
    """Write one digit behind the point, a minus sign that is one, and no negative zero."""
    shown = f"{abs(value):.1f}"
    if float(shown) == 0:
        return "0.0"
    return ("−" if value < 0 else "+" if sign else "") + shown


def time_saved(preset: str, other: str, target: float | None) -> Measure:
    """Return how much less time than the other FedDD takes to the target, in percent."""

    def answer(panels: Panels) -> Answer:
        runs = _runs(panels, preset, ("feddd", "fedavg", other))
        if not runs:
            return _unfinished(panels, preset, ("feddd", "fedavg", other))
        found = _saved(panels[preset], runs, other, target)
        return found or Answer("no target is reached by FedDD and FedAvg on every seed")

    return answer


def _saved(panel: Panel, runs: Sequence[Results], other: str, target: float | None) -> Answer | None:
    wanted = [target] if target is not None else []
    used = reached_by_all(runs, ("feddd", "fedavg"), wanted) or reached_by_all(
        runs, ("feddd", "fedavg"), panel.experiment.targets
    )
    if used is None:
        return None
    note = "" if used == target else f" at {100 * used:g} %"
    pairs = [(seconds_to(run, "feddd", used), seconds_to(run, other, used)) for run in runs]
    both = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    never = len(pairs) - len(both)
    if not both:
        return Answer(f"{other} never reaches {100 * used:g} %", seeds=len(runs))
    note += f"; {other} never on {never} of {len(pairs)} seeds" if never else ""
    return _answer(saving(*zip(*both, strict=True)), "%", note)


def never_reaches(preset: str, other: str, target: float) -> Measure:
    """On how many seeds the other method does not reach the target that FedDD and FedAvg reach."""

    def answer(panels: Panels) -> Answer:
        runs = _runs(panels, preset, ("feddd", "fedavg", other))
        if not runs:
            return _unfinished(panels, preset, ("feddd", "fedavg", other))
        used = reached_by_all(runs, ("feddd", "fedavg"), [target]) or reached_by_all(
            runs, ("feddd", "fedavg"), panels[preset].experiment.targets
        )
        if used is None:
            return Answer("no target is reached by FedDD and FedAvg on every seed")
        never = sum(seconds_to(run, other, used) is None for run in runs)
        return Answer(f"never reaches {100 * used:g} % on {never} of {len(runs)} seeds", seeds=len(runs))

    return answer


def over(presets: Sequence[str], make: Callable[[str], Measure]) -> Measure:
    """Return the range of a measure over several experiments, of those that were run."""

    def answer(panels: Panels) -> Answer:
        found = {preset: make(preset)(panels) for preset in presets}
        numbers = {preset: one.value for preset, one in found.items() if isinstance(one.value, float)}
        if not numbers:
            return next((one for one in found.values() if one is not NOT_RUN), NOT_RUN)
        low, high = min(numbers.values()), max(numbers.values())
        run = {preset.removesuffix("-budgets"): one for preset, one in found.items() if one is not NOT_RUN}
        where = "" if len(run) == len(presets) else f" ({len(run)} of {len(presets)} settings run)"
        words = ", ".join(
            f"{name} {tenths(one.value, sign=False)}" if isinstance(one.value, float) else f"{name}: {one.words}"
            for name, one in run.items()
        )
        seeds = min(found[preset].seeds for preset in numbers)
        return Answer(
            f"{tenths(low, sign=False)} to {tenths(high, sign=False)}{where}: {words}", (low, high), seeds=seeds
        )

    return answer


def best_rule(preset: str, ours: str, others: Sequence[str]) -> Measure:
    """Final accuracy of our rule above the best of the others, in points, and the order of all."""

    def answer(panels: Panels) -> Answer:
        runs = _runs(panels, preset, (ours, *others))
        if not runs:
            return _unfinished(panels, preset, (ours, *others))
        rounds = panels[preset].final_rounds
        finals = {label: [accuracy(run, label, rounds) for run in runs] for label in (ours, *others)}
        means = {label: fmean(values) for label, values in finals.items()}
        best = max(others, key=lambda label: means[label])
        order = ", ".join(f"{label} {means[label]:.1f}" for label in sorted(means, key=lambda label: -means[label]))
        return _answer(difference(finals[ours], finals[best]), "points", f"{over_rounds(rounds)}: {order}")

    return answer


def off_by(paper: Paper, ours: float | tuple[float, float] | None) -> str:
    """Ours minus the paper's; for ranges end by end."""
    if paper is None or ours is None:
        return ""
    if isinstance(paper, tuple) and isinstance(ours, tuple):
        return " / ".join(tenths(mine - theirs) for mine, theirs in zip(ours, paper, strict=True))
    if isinstance(paper, tuple) or isinstance(ours, tuple):
        return ""
    return tenths(ours - paper)
