"""FedCS: the quickest clients that fit the budget, or that meet the deadline."""

from typing import Any

import numpy as np
import pytest

from feddd.strategies.fedcs import FedCS
from feddd.strategies.protocol import Fleet
from test_protocol import chosen, fleet_of, state_of

RNG = np.random.default_rng(0)


def picked(strategy: FedCS, fleet: Fleet) -> list[int]:
    return chosen(strategy.plan(state_of(fleet), fleet, RNG))


def test_the_budget_takes_the_quickest_by_download_and_upload() -> None:
    # 1000 bits: 100 + 50 s, 200 + 10 s, 20 + 100 s, 50 + 50 s, 500 + 5 s
    fleet = fleet_of([10.0, 5.0, 50.0, 20.0, 2.0], [20.0, 100.0, 10.0, 20.0, 200.0])
    assert picked(FedCS(budget=0.4), fleet) == [2, 3]
    assert picked(FedCS(budget=0.6), fleet) == [0, 2, 3]


def test_the_budget_mode_does_not_look_at_computing_time() -> None:
    fleet = fleet_of([30.0, 20.0, 10.0], compute=[1000.0, 0.0, 0.0])
    assert picked(FedCS(budget=0.34), fleet) == [0]


def test_a_model_that_does_not_fit_is_skipped_for_the_next_quickest() -> None:
    # A Σ U = 0.5 · 2400 = 1200: client 0 (800) fits, client 1 (600) does not any more, client 2 (400) does.
    fleet = fleet_of([400.0, 100.0, 20.0, 10.0], bits=[800.0, 600.0, 400.0, 600.0])
    assert np.argsort(fleet.transfer_seconds).tolist() == [0, 1, 2, 3]
    assert picked(FedCS(budget=0.5), fleet) == [0, 2]


def test_full_budget_takes_everybody() -> None:
    assert picked(FedCS(budget=1.0), fleet_of([3.0, 1.0, 2.0])) == [0, 1, 2]


def test_a_budget_below_every_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget 0\.2 is less than any client's model"):
        picked(FedCS(budget=0.2), fleet_of([1.0, 1.0]))


def test_the_deadline_takes_whoever_downloads_computes_and_uploads_in_time() -> None:
    # full-model seconds: 100 + 50 + 0, 50 + 50 + 60, 20 + 10 + 5
    fleet = fleet_of([10.0, 20.0, 50.0], [20.0, 20.0, 100.0], compute=[0.0, 60.0, 5.0])
    assert fleet.full_seconds.tolist() == [150.0, 160.0, 35.0]
    assert picked(FedCS(mode="deadline", deadline_seconds=150.0), fleet) == [0, 2]
    assert picked(FedCS(mode="deadline", deadline_seconds=35.0), fleet) == [2]


def test_the_deadline_knows_no_budget() -> None:
    assert picked(FedCS(budget=0.1, mode="deadline", deadline_seconds=1e6), fleet_of([1.0] * 5)) == [0, 1, 2, 3, 4]


def test_a_deadline_that_nobody_meets_is_refused_with_the_quickest_time() -> None:
    with pytest.raises(
        ValueError, match=r"no client finishes within deadline_seconds = 10; the quickest needs 35\.0 s"
    ):
        picked(FedCS(mode="deadline", deadline_seconds=10.0), fleet_of([50.0], [100.0], compute=[5.0]))


def test_the_choice_needs_no_generator_and_stays_the_same_every_round() -> None:
    fleet = fleet_of([3.0, 1.0, 2.0, 4.0])
    rounds = [FedCS(0.5).plan(state_of(fleet, round=t), fleet, np.random.default_rng(t)) for t in range(1, 6)]
    assert [chosen(plan) for plan in rounds] == [[0, 3]] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget must lie above 0"),
        ({"budget": 1.2}, "budget must lie above 0"),
        ({"mode": "fastest"}, "mode must be one of budget, deadline"),
        ({"mode": "deadline"}, "needs a positive deadline_seconds"),
        ({"mode": "deadline", "deadline_seconds": -1.0}, "needs a positive deadline_seconds"),
        ({"mode": "deadline", "deadline_seconds": float("inf")}, "needs a positive deadline_seconds"),
        ({"deadline_seconds": 5.0}, 'deadline_seconds belongs to mode "deadline"'),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedCS(**options)
