"""Theorem 2's bound recomputed from the paper, and the mask error by hand."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import feddd
from feddd.core.convergence import descent, gradient_bound, largest_learning_rate, mask_error
from feddd.core.units import units

FACTS: dict[str, Any] = {
    "initial_gap": 2.0,
    "rounds": 100,
    "broadcast_every": 5,
    "learning_rate": 0.1,
    "smoothness": 1.5,
    "epsilon": 0.3,
    "variance": 0.7,
}


def printed_bound(gap: Fraction, k: int, h: int, eta: Fraction, l: Fraction, eps: Fraction, var: Fraction) -> Fraction:  # noqa: E741
    """The three fractions of Theorem 2 as they stand, in exact arithmetic; T = Kh."""
    below = 2 * eta - l * eta**2 - l * eps * eta**2 - 4 * (eps + 1) * eps * eta**2
    one = 2 * gap / (k * h * below)
    two = l * eps * eta**2 * var * (h - 1) * (2 * eps + 2 * eps * eta**2 * l**2 + 2 * eta**2 * l**2 + 3) / (h * below)
    three = l * eps * eta**2 * var / (h * below)
    return one + two + three


def hundredths(low: int, high: int) -> st.SearchStrategy[Fraction]:
    return st.integers(low, high).map(lambda n: Fraction(n, 100))


@settings(max_examples=60, deadline=None)
@given(
    gap=hundredths(1, 500),
    k=st.integers(1, 40),
    h=st.integers(1, 20),
    share=hundredths(1, 99),
    smoothness=hundredths(1, 400),
    epsilon=hundredths(0, 100),
    variance=hundredths(0, 300),
)
def test_the_bound_is_the_printed_formula(
    gap: Fraction, k: int, h: int, share: Fraction, smoothness: Fraction, epsilon: Fraction, variance: Fraction
) -> None:
    limit = 2 / (smoothness + smoothness * epsilon + 4 * (epsilon + 1) * epsilon)
    eta = share * limit
    bound = gradient_bound(
        initial_gap=float(gap),
        rounds=k * h,
        broadcast_every=h,
        learning_rate=float(eta),
        smoothness=float(smoothness),
        epsilon=float(epsilon),
        variance=float(variance),
    )
    assert bound == pytest.approx(float(printed_bound(gap, k, h, eta, smoothness, epsilon, variance)), rel=1e-9)
    assert largest_learning_rate(float(smoothness), float(epsilon)) == pytest.approx(float(limit))


def test_a_broadcast_every_round_leaves_the_papers_residual_error() -> None:
    bound = gradient_bound(**FACTS | {"broadcast_every": 1})
    below = 2 * 0.1 - 1.5 * 0.01 - 1.5 * 0.3 * 0.01 - 4 * 1.3 * 0.3 * 0.01
    assert bound - 2 * 2.0 / (100 * below) == pytest.approx(1.5 * 0.3 * 0.01 * 0.7 / below)


def test_without_mask_error_only_the_first_term_is_left() -> None:
    # 2·2 / (100·(0.2 − 1.5·0.01)), whatever the period and the variance
    for period, variance in ((1, 0.0), (5, 0.7), (20, 9.0)):
        facts = FACTS | {"epsilon": 0.0, "broadcast_every": period, "variance": variance}
        assert gradient_bound(**facts) == pytest.approx(4.0 / 18.5)


def test_a_longer_period_a_larger_error_and_more_variance_loosen_the_bound() -> None:
    for name, values in {"broadcast_every": [1, 2, 5, 10], "epsilon": [0.0, 0.2, 0.5], "variance": [0.1, 1]}.items():
        bounds = [gradient_bound(**FACTS | {name: value}) for value in values]
        assert bounds == sorted(bounds)
        assert len(set(bounds)) == len(bounds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning rate"),
        ({"learning_rate": -0.1}, "learning rate"),
        ({"learning_rate": 2 / (1.5 + 1.5 * 0.3 + 4 * 1.3 * 0.3)}, "learning rate below 0.57"),
        ({"rounds": 101}, "multiple"),
        ({"rounds": 0}, "multiple"),
        ({"broadcast_every": 0}, "multiple"),
    ],
)
def test_facts_the_theorem_does_not_cover_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradient_bound(**FACTS | change)


def test_the_mask_error_worked_out_on_paper() -> None:
    full = {"l.weight": torch.tensor([[3.0], [4.0]]), "gain": torch.tensor(5.0)}
    masked = {"l.weight": torch.tensor([[3.0], [6.0]]), "gain": torch.tensor(4.0)}
    assert mask_error(masked, full, units(full)) == pytest.approx((4 + 1) / (9 + 16 + 25))
    assert mask_error(full, full, units(full)) == 0.0


def test_statistics_and_counters_do_not_enter_the_mask_error() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    full = model.state_dict()
    masked = full | {"1.running_mean": torch.tensor([5.0, 5.0]), "1.num_batches_tracked": torch.tensor(7)}
    assert mask_error(masked, full, units(model)) == 0.0


def test_masks_and_means_of_two_clients_give_the_error_of_assumption_3() -> None:
    # Two clients of equal weight hold (1, 3) and (3, 5); the second keeps its 5 back: means (2, 4) and (2, 3).
    start = {"l.weight": torch.zeros(2, 1)}
    masked, full = feddd.Aggregator(start), feddd.Aggregator(start)
    for values, sent in (([1.0, 3.0], [True, True]), ([3.0, 5.0], [True, False])):
        tensor = {"l.weight": torch.tensor(values)[:, None]}
        masked.add(tensor, {"l": torch.tensor(sent)}, 10)
        full.add(tensor, {"l": torch.tensor([True, True])}, 10)
    assert mask_error(masked.result(), full.result(), units(start)) == pytest.approx(1 / 20)


def test_a_mean_of_zero_has_no_relative_error() -> None:
    zero = {"l.weight": torch.zeros(2, 1)}
    with pytest.raises(ValueError, match="zero"):
        mask_error(zero, zero, units(zero))


def test_the_corrected_bound_puts_the_lost_factor_back() -> None:
    # B = (L/2)(1 + η²L²) · 2(ε + 1)εη²; the noise terms stay as they are.
    factor = 1.5 / 2 * (1 + 0.1**2 * 1.5**2)
    below = 2 * 0.1 - 1.5 * 0.01 - 1.5 * 0.3 * 0.01 - 4 * 1.3 * 0.3 * 0.01 * factor
    printed = 2 * 0.1 - 1.5 * 0.01 - 1.5 * 0.3 * 0.01 - 4 * 1.3 * 0.3 * 0.01
    assert descent(0.1, 1.5, 0.3, "corrected") == pytest.approx(below)
    assert gradient_bound(**FACTS, form="corrected") == pytest.approx(gradient_bound(**FACTS) * printed / below)


def test_the_corrected_bound_refuses_rates_that_it_does_not_cover() -> None:
    assert descent(0.55, 4.0, 1.0, "corrected") < 0
    with pytest.raises(ValueError, match=r"smaller positive learning rate, not 0\.55"):
        gradient_bound(**FACTS | {"learning_rate": 0.55, "smoothness": 4.0, "epsilon": 1.0}, form="corrected")
