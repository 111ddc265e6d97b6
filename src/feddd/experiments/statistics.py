"""Numbers over seeds: methods are paired on the same seed, and a mean comes with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
PERCENT = (0.0, 100.0)
POINTS = (-100.0, 100.0)
"""The bounds of an accuracy, and of a difference of two."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and Student's 95 % interval for it; no interval from one seed."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]


def estimate(values: Sequence[float], bounds: tuple[float, float] | None = None) -> Estimate:
    """Return the mean of one value per seed, with its interval, which ends where the values cannot go further.

    bounds: the least and the greatest that a value can be
    """
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, tuple(values))
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2)) * stdev(values) / math.sqrt(len(values))
    least, greatest = bounds or (-math.inf, math.inf)
    return Estimate(mean, max(mean - half, least), min(mean + half, greatest), tuple(values))


def saving(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return how much less time, in percent: one minus the geometric mean of the ratios, paired by seed.

    The interval is Student's on the logarithm of the ratios.
    """
    ratios = [mine / other for mine, other in zip(ours, others, strict=True)]
    logs = estimate([math.log(ratio) for ratio in ratios])
    low, high = (None if bound is None else 100.0 * (1.0 - math.exp(bound)) for bound in (logs.high, logs.low))
    return Estimate(100.0 * (1.0 - math.exp(logs.mean)), low, high, tuple(100.0 * (1.0 - ratio) for ratio in ratios))


def difference(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """Ours minus theirs, two accuracies in percent, paired by seed."""
    return estimate([mine - other for mine, other in zip(ours, others, strict=True)], POINTS)
