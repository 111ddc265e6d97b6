"""The metric of a run, as tables, words and pictures speak of it: its name, its unit, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric by its name; accuracies are written in percent, everything else as it is."""

    name: str = "accuracy"
    higher_is_better: bool = True

    @property
    def percent(self) -> bool:
        """Return whether values are shares, written in percent."""
        return self.name == "accuracy"

    def show(self, value: float) -> str:
        """Return a value in words: 88.0 %, or 3.142."""
        return f"{100 * value:.1f} %" if self.percent else f"{value:.4g}"

    def show_target(self, value: float) -> str:
        """Return a target in words: 88 %, or 3.5."""
        return f"{100 * value:g} %" if self.percent else f"{value:g}"

    def reached(self, value: float, target: float) -> bool:
        """Return whether a value is as good as a target."""
        return value >= target if self.higher_is_better else value <= target

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values; None of none."""
        return (max if self.higher_is_better else min)(values, default=None)

    def hardest_last(self, targets: Iterable[float]) -> list[float]:
        """Return targets from the one that is reached first to the one that is reached last."""
        return sorted(targets, reverse=not self.higher_is_better)

    def worst_tenth(self, values: Sequence[float]) -> float | None:
        """Return the mean over the worst tenth of clients, one client at least."""
        worst_first = sorted(values, reverse=not self.higher_is_better)
        return fmean(worst_first[: math.ceil(len(values) / 10)]) if values else None

    def tested(self, row: Mapping[str, Any]) -> float | None:
        """Return the metric in a row of the table of rounds; tables from before had accuracies only."""
        value = row.get("test_metric")
        return row["test_accuracy"] if value is None and self.percent else value


ACCURACY = Metric()


def metric_of(config: Mapping[str, Any]) -> Metric:
    """Return the metric of a resolved config; a function of the user's is called by its name alone."""
    task = config.get("task") or {}
    name = str(task.get("metric", "accuracy"))
    return Metric(name.rpartition(":")[2], bool(task.get("higher_is_better", True)))


def common_metric(configs: Iterable[Mapping[str, Any]]) -> Metric:
    """Return the metric of all of these runs; where they differ, one that is called just that."""
    found = list(dict.fromkeys(metric_of(config) for config in configs))
    return found[0] if len(found) == 1 else Metric("metric", found[0].higher_is_better) if found else ACCURACY
