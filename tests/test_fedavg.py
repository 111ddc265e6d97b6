"""FedAvg: everybody, or a random share of the clients."""

import numpy as np
import pytest

from feddd.strategies.fedavg import FedAvg
from test_protocol import chosen, fleet_of, state_of


def test_full_participation_takes_everybody_whatever_the_generator() -> None:
    fleet = fleet_of([1.0] * 7)
    for seed in range(3):
        assert chosen(FedAvg().plan(state_of(fleet), fleet, np.random.default_rng(seed))) == list(range(7))


@pytest.mark.parametrize(("share", "clients", "expected"), [(0.6, 10, 6), (0.25, 10, 3), (0.24, 10, 2), (0.01, 10, 1)])
def test_participation_is_a_share_of_the_clients_halves_up_and_at_least_one(
    share: float, clients: int, expected: int
) -> None:
    fleet = fleet_of([1.0] * clients)
    for seed in range(5):
        drawn = chosen(FedAvg(share).plan(state_of(fleet), fleet, np.random.default_rng(seed)))
        assert len(drawn) == expected
        assert len(set(drawn)) == expected


def test_every_client_is_drawn_equally_often_however_fast_it_is() -> None:
    fleet = fleet_of([1.0, 10.0, 100.0, 1000.0])
    rng = np.random.default_rng(0)
    draws = [chosen(FedAvg(0.5).plan(state_of(fleet), fleet, rng)) for _ in range(600)]
    counts = np.bincount(np.concatenate(draws), minlength=4)
    np.testing.assert_allclose(counts / 600, 0.5, atol=0.08)


def test_the_draw_follows_the_rounds_generator() -> None:
    fleet = fleet_of([1.0] * 40)
    first, again, other = (
        chosen(FedAvg(0.5).plan(state_of(fleet), fleet, np.random.default_rng(seed))) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("participation", [0.0, -0.1, 1.1, float("nan")])
def test_a_participation_outside_0_to_1_is_refused(participation: float) -> None:
    with pytest.raises(ValueError, match="participation must lie above 0 and at most at 1"):
        FedAvg(participation)
