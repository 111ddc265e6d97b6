"""Theorem 2's bound and the mask-induced error of Assumption 3, measured."""

from __future__ import annotations

from typing import Literal

import torch

from feddd.core.units import Params, Units


def mask_error(masked: Params, full: Params, units: Units) -> float:
    """ε for one round: ‖masked mean − full mean‖² / ‖full mean‖² over all parameters (Assumption 3).

    masked: the average over those who sent an element    full: over all who have it, weighted the same
    """
    difference = norm = 0.0
    for slot in units.slots:
        if not slot.buffer:
            mean = full[slot.name].double()
            difference += float(torch.linalg.vector_norm(masked[slot.name].double() - mean)) ** 2
            norm += float(torch.linalg.vector_norm(mean)) ** 2
    if norm == 0.0:
        raise ValueError("the mask error is relative to the full mean, which is zero")
    return difference / norm


Form = Literal["printed", "corrected"]
"""Theorem 2 as printed, or with the factor (L/2)(1 + η²L²) that Lemma 1 loses on its gradient term."""


def largest_learning_rate(smoothness: float, epsilon: float) -> float:
    """η must stay below 2 / (L + Lε + 4(ε + 1)ε) for Theorem 2 as printed to hold."""
    return 2.0 / (smoothness + smoothness * epsilon + 4.0 * (epsilon + 1.0) * epsilon)


def descent(learning_rate: float, smoothness: float, epsilon: float, form: Form = "printed") -> float:
    """Return the bound's denominator, −2(A + B) of the proof; Theorem 2 says something only while it is positive.

    A = −η + (L/2)η² + (L/2)εη²    B = 2(ε + 1)εη², corrected: times (L/2)(1 + η²L²)
    """
    eta, big_l, eps = learning_rate, smoothness, epsilon
    lost = 1.0 if form == "printed" else big_l / 2 * (1 + eta**2 * big_l**2)
    return 2 * eta - big_l * eta**2 - big_l * eps * eta**2 - 4 * (eps + 1) * eps * eta**2 * lost


def gradient_bound(
    *,
    initial_gap: float,
    rounds: int,
    broadcast_every: int,
    learning_rate: float,
    smoothness: float,
    epsilon: float,
    variance: float,
    form: Form = "printed",
) -> float:
    """Theorem 2: a bound on the mean of E‖∇F(W^t)‖² over T = Kh rounds.

    initial_gap: F(W⁰) − F(W*)    smoothness: L    epsilon: ε    variance: (1/N) Σ σ_n²
    """
    below = descent(learning_rate, smoothness, epsilon, form)
    if not (learning_rate > 0.0 and below > 0.0):
        limit = f" below {largest_learning_rate(smoothness, epsilon):.3g}" if form == "printed" else ""
        raise ValueError(f"Theorem 2 needs a smaller positive learning rate{limit}, not {learning_rate}")
    if rounds < 1 or broadcast_every < 1 or rounds % broadcast_every:
        raise ValueError(f"Theorem 2 counts whole periods: {rounds} rounds are no multiple of {broadcast_every}")
    eta, big_l, eps, h = learning_rate, smoothness, epsilon, broadcast_every
    noise = big_l * eps * eta**2 * variance
    stale = 2 * eps + 2 * eps * eta**2 * big_l**2 + 2 * eta**2 * big_l**2 + 3
    return (2 * initial_gap / rounds + noise * (h - 1) * stale / h + noise / h) / below
