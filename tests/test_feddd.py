"""FedDD's rounds: what goes down, what is dropped, and that the rates are the linear programme's."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import feddd
from feddd.core.units import Units, units
from feddd.strategies.feddd import FedDD, contribution
from feddd.strategies.protocol import Fleet, ServerState, Upload, start
from feddd.wire.exchange import chain
from feddd.wire.select import Select
from feddd.world import models
from test_protocol import chosen, fleet_of, state_of

RNG = np.random.default_rng(0)


def rates(strategy: FedDD, state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
    return np.array([task.dropout for task in strategy.plan(state, fleet, RNG).tasks])


def varied(clients: int = 6, seed: int = 0, **options: Any) -> tuple[Fleet, ServerState]:
    """Links, devices and reports that all differ."""
    rng = np.random.default_rng(seed)
    fleet = fleet_of(
        rng.uniform(10, 50, clients).tolist(),
        rng.uniform(40, 200, clients).tolist(),
        compute=rng.uniform(0, 20, clients).tolist(),
        fixed=40.0,
        **options,
    )
    state = state_of(
        fleet,
        losses=rng.uniform(0.1, 2.0, clients),
        samples=rng.integers(10, 500, clients).astype(float),
        label_coverage=rng.uniform(1, 10, clients),
    )
    return fleet, state


def downloads(strategy: FedDD, rounds: int, clients: int = 3) -> list[tuple[bytes | None, ...]]:
    """What each round sends down, if client n answers round t with the mask (n, t)."""
    fleet, state = fleet_of([1.0] * clients), start({}, clients)
    sent = []
    for number in range(1, rounds + 1):
        plan = strategy.plan(state, fleet, RNG)
        assert plan.round == number
        assert chosen(plan) == list(range(clients))
        sent.append(tuple(task.down.mask for task in plan.tasks))
        answers = [Upload(n, mask=bytes([n, number]), train_loss=1.0, samples=1, label_coverage=1.0) for n in range(3)]
        state = strategy.absorb(state, fleet, plan, answers, {})
    return sent


def test_round_one_uploads_and_downloads_everything() -> None:
    fleet, _ = varied()
    tasks = FedDD().plan(start({}, len(fleet)), fleet, RNG).tasks
    assert [task.client for task in tasks] == list(range(6))
    assert all(task.dropout == 0.0 and task.down.mask is None for task in tasks)


def test_full_models_go_down_in_round_one_and_after_every_broadcast_else_the_own_last_mask() -> None:
    sent = downloads(FedDD(broadcast_every=5), 12)
    for number, masks in enumerate(sent, 1):
        full = number in (1, 6, 11)
        assert masks == ((None,) * 3 if full else tuple(bytes([n, number - 1]) for n in range(3)))


def test_the_mask_of_round_two_is_the_full_upload_of_round_one() -> None:
    model = models.build("mlp", (1, 4, 4), 3)
    table = units(model)
    params = model.state_dict()
    fleet = fleet_of([1.0])
    task = FedDD().plan(start(params, 1), fleet, RNG).tasks[0]
    mask = feddd.select(params, params, task.dropout, units=table)
    assert all(bool(kept.all()) for kept in mask.values())


def test_broadcasting_every_round_always_sends_full_models_and_never_only_the_first() -> None:
    assert downloads(FedDD(broadcast_every=1), 4) == [(None,) * 3] * 4
    never = downloads(FedDD(broadcast_every=0), 4)
    assert never[0] == (None,) * 3
    assert all(None not in masks for masks in never[1:])


def test_a_client_whose_upload_did_not_count_gets_the_full_model_next() -> None:
    fleet = fleet_of([1.0] * 3)
    state = state_of(fleet, round=2)
    plan = FedDD().plan(state, fleet, RNG)
    answers = [
        Upload(0, mask=b"zero", train_loss=1.0, samples=1, label_coverage=1.0),
        Upload(1, status="late", mask=b"one"),
        Upload(2, mask=b"two", train_loss=1.0, samples=1, label_coverage=1.0),
    ]
    state = FedDD().absorb(state, fleet, plan, answers, {})
    assert [task.down.mask for task in FedDD().plan(state, fleet, RNG).tasks] == [b"zero", None, b"two"]


def test_contribution_is_the_papers_product_worked_out_by_hand() -> None:
    fleet = fleet_of([1.0] * 3, bits=[1000.0, 500.0, 250.0], model_bits=1000.0)
    state = state_of(fleet, samples=[10.0, 30.0, 60.0], label_coverage=[3.0, 10.0, 2.0], losses=[2.0, 0.5, 1.0])
    expected = [0.1 * 3 * 1.0 * 2.0, 0.3 * 10 * 0.5 * 0.5, 0.6 * 2 * 0.25 * 1.0]
    assert contribution(state, fleet).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("penalty", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("bits", [None, [1000.0, 600.0, 600.0, 500.0, 1000.0, 500.0]])
def test_rates_are_those_of_allocate_with_a_penalty_relative_to_the_full_round(
    penalty: float, bits: list[float] | None
) -> None:
    fleet, state = varied(bits=bits)
    seconds_per_bit = [
        1 / up + 1 / down for up, down in zip(fleet.uplink_bits_per_s, fleet.downlink_bits_per_s, strict=True)
    ]
    constant = [t + 40.0 * s for t, s in zip(fleet.compute_seconds, seconds_per_bit, strict=True)]
    full = [c + u * s for c, u, s in zip(constant, fleet.droppable_bits, seconds_per_bit, strict=True)]
    total = sum(state.samples)
    re = [
        m / total * c * u / 1000.0 * loss
        for m, c, u, loss in zip(state.samples, state.label_coverage, fleet.droppable_bits, state.losses, strict=True)
    ]
    expected = feddd.allocate(
        fleet.droppable_bits, seconds_per_bit, constant, re, budget=0.6, max_dropout=0.8, penalty=penalty * max(full)
    )
    assert rates(FedDD(penalty=penalty), state, fleet).tolist() == pytest.approx(expected.dropout.tolist(), abs=1e-9)


def test_a_penalty_moves_the_rates_and_favours_those_who_contribute() -> None:
    fleet, state = varied()
    timely, caring = (rates(FedDD(penalty=penalty), state, fleet) for penalty in (0.0, 1.0))
    lost = contribution(state, fleet)
    assert not np.allclose(timely, caring)
    assert lost @ caring < lost @ timely


@settings(max_examples=25)
@given(st.integers(0, 1000), st.sampled_from([0.1, 8.0, 60.0]))
def test_the_same_fleet_in_other_units_of_time_gets_the_same_rates(seed: int, scale: float) -> None:
    fleet, state = varied(seed=seed)
    slower = fleet_of(
        (fleet.uplink_bits_per_s / scale).tolist(),
        (fleet.downlink_bits_per_s / scale).tolist(),
        compute=(fleet.compute_seconds * scale).tolist(),
        fixed=40.0,
    )
    np.testing.assert_allclose(rates(FedDD(), state, fleet), rates(FedDD(), state, slower), atol=1e-7)


@settings(max_examples=25)
@given(st.integers(0, 1000), st.floats(0.2, 1.0), st.floats(0.0, 3.0))
def test_rates_meet_the_budget_within_bounds(seed: int, budget: float, penalty: float) -> None:
    fleet, state = varied(seed=seed, bits=[1000.0, 600.0, 600.0, 500.0, 1000.0, 500.0])
    dropped = rates(FedDD(budget=budget, max_dropout=0.8, penalty=penalty), state, fleet)
    assert (dropped >= 0).all()
    assert (dropped <= 0.8 + 1e-12).all()
    kept = float(fleet.droppable_bits @ (1 - dropped))
    assert kept == pytest.approx(budget * fleet.droppable_bits.sum())


def test_uniform_rates_are_one_minus_the_budget_for_everybody_but_not_in_round_one() -> None:
    fleet, state = varied()
    strategy = FedDD(budget=0.7, rates="uniform")
    assert rates(strategy, state, fleet).tolist() == pytest.approx([0.3] * 6)
    assert rates(strategy, start({}, 6), fleet).tolist() == [0.0] * 6


def test_a_budget_of_a_fifth_with_four_fifths_at_most_leaves_one_rate_for_everybody() -> None:
    fleet, state = varied()
    assert rates(FedDD(budget=0.2, max_dropout=0.8), state, fleet).tolist() == pytest.approx([0.8] * 6)


def test_layers_always_sent_are_constant_seconds_and_outside_the_budget() -> None:
    # Client 0: 600 of 1000 bits always go; client 1: 200 of 800. Only 400 and 600 bits are left to drop.
    options: dict[str, Any] = {"bits": [1000.0, 800.0], "always": [600.0, 200.0], "fixed": 40.0}
    fleet = fleet_of([10.0, 20.0], [40.0, 40.0], compute=[1.0, 30.0], **options)
    state = state_of(fleet, losses=[1.0, 2.0])
    strategy = FedDD(budget=0.6, always_send=("head",), penalty=0.3)
    per_bit = [1 / 10 + 1 / 40, 1 / 20 + 1 / 40]
    constant = [1.0 + 640 * per_bit[0], 30.0 + 240 * per_bit[1]]
    full = max(1.0 + 1040 * per_bit[0], 30.0 + 840 * per_bit[1])
    re = [0.5 * 1.0 * 1.0, 0.5 * 0.8 * 2.0]
    expected = feddd.allocate([400, 600], per_bit, constant, re, budget=0.6, max_dropout=0.8, penalty=0.3 * full)
    dropped = rates(strategy, state, fleet)
    assert dropped.tolist() == pytest.approx(expected.dropout.tolist())
    assert 400 * dropped[0] + 600 * dropped[1] == pytest.approx(0.4 * 1000)
    chains = [task.up for task in strategy.plan(state, fleet, RNG).tasks]
    assert chains == [chain(Select(rate, "importance", ("head",))) for rate in dropped.tolist()]


def test_clients_that_never_reported_count_as_the_mean_of_the_others() -> None:
    fleet, state = varied()
    silent = state_of(
        fleet,
        losses=np.array([np.nan, *state.losses[1:]]),
        samples=np.array([np.nan, *state.samples[1:]]),
        label_coverage=np.array([np.nan, *state.label_coverage[1:]]),
    )
    filled = state_of(
        fleet,
        losses=np.array([state.losses[1:].mean(), *state.losses[1:]]),
        samples=np.array([state.samples[1:].mean(), *state.samples[1:]]),
        label_coverage=np.array([state.label_coverage[1:].mean(), *state.label_coverage[1:]]),
    )
    strategy = FedDD(penalty=1.0)
    assert rates(strategy, silent, fleet).tolist() == pytest.approx(rates(strategy, filled, fleet).tolist())
    assert rates(strategy, silent, fleet).tolist() != pytest.approx(rates(strategy, state, fleet).tolist())


def test_coverage_is_told_once_before_round_two_and_only_where_models_differ_and_importance_asks() -> None:
    mixed, alike = fleet_of([1.0, 2.0], bits=[1000.0, 500.0]), fleet_of([1.0, 2.0])

    def told(strategy: FedDD, fleet: Fleet) -> list[int]:
        plans = [strategy.plan(state_of(fleet, round=number - 1), fleet, RNG) for number in range(1, 9)]
        assert all(len({task.coverage for task in plan.tasks}) == 1 for plan in plans)
        return [plan.round for plan in plans if plan.tasks[0].coverage]

    assert told(FedDD(), mixed) == [2]
    assert told(FedDD(), alike) == []
    assert told(FedDD(selector="delta"), mixed) == []


def test_the_selector_reaches_every_client() -> None:
    fleet, state = varied()
    chains = [task.up for task in FedDD(selector="ordered").plan(state, fleet, RNG).tasks]
    assert {type(stage) for line in chains for stage in line.stages} == {Select}
    assert {line.stages[0].score for line in chains} == {"ordered"}


def tables(name: str, shape: tuple[int, int, int]) -> list[Units]:
    with torch.device("meta"):
        return [units(models.build(name, shape, 10, width)) for width in range(models.widths(name))]


@pytest.mark.parametrize(
    ("name", "shape", "tolerance"),
    [
        ("mlp", (1, 28, 28), 0.01),
        ("cnn1", (1, 28, 28), 0.02),
        ("cnn2", (3, 32, 32), 0.01),
        ("heterogeneous-a", (3, 32, 32), 0.01),
        ("heterogeneous-b", (3, 32, 32), 0.01),
    ],
)
def test_whole_units_meet_the_budget_within_one_or_two_percent(
    name: str, shape: tuple[int, int, int], tolerance: float
) -> None:
    local = tables(name, shape)
    of = [local[n % len(local)] for n in range(100)]
    for seed in range(5):
        rng = np.random.default_rng(seed)
        fleet = fleet_of(
            rng.uniform(1e4, 5e4, 100).tolist(),
            rng.uniform(4e4, 2e5, 100).tolist(),
            compute=rng.uniform(0, 600, 100).tolist(),
            bits=[32.0 * table.droppable_elements for table in of],
        )
        state = state_of(fleet, losses=rng.uniform(0.1, 2, 100), samples=rng.uniform(50, 900, 100))
        sent = 0
        for table, dropout in zip(of, rates(FedDD(), state, fleet), strict=True):
            for layer in table.layers:
                sent += layer.unit_elements * max(1, int(layer.units * (1 - dropout) + 0.5 + 1e-9))
        assert 32.0 * sent / fleet.droppable_bits.sum() == pytest.approx(0.6, rel=tolerance)


def test_an_unknown_layer_is_refused_with_the_known_ones_and_so_is_sending_all() -> None:
    fleet, state = varied()
    with pytest.raises(ValueError, match="no layer 'tail'; its layers are head, body"):
        FedDD(always_send=("tail",)).plan(state, fleet, RNG)
    with pytest.raises(ValueError, match="nothing is left to drop"):
        FedDD(always_send=("head", "body")).plan(state, fleet, RNG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.1}, r"budget 0\.1 is infeasible: with max_dropout 0\.8 it must lie between 0\.2 and 1"),
        ({"budget": 1.1}, "infeasible"),
        ({"max_dropout": 1.5}, "max_dropout must lie between 0 and 1"),
        ({"penalty": -0.1}, "penalty must be finite and at least 0"),
        ({"penalty": float("inf")}, "penalty must be finite and at least 0"),
        ({"broadcast_every": -1}, "broadcast_every must be at least 0"),
        ({"selector": "best"}, "selector must be one of importance, magnitude"),
        ({"rates": "equal"}, "rates must be one of differential, uniform"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedDD(**options)


def test_a_budget_that_only_rounding_makes_infeasible_is_accepted() -> None:
    assert 1 - 0.7 > 0.3
    fleet, state = varied()
    assert rates(FedDD(budget=0.3, max_dropout=0.7), state, fleet).tolist() == pytest.approx([0.7] * 6)


def test_the_broadcast_period_changes_where_the_schedule_says() -> None:
    strategy = FedDD(broadcast_every=4, broadcast_later=((6, 2), (9, 1)))
    full = [number for number, masks in enumerate(downloads(strategy, 12), 1) if masks == (None,) * 3]
    # Broadcast after rounds 4 (h = 4), 6 and 8 (h = 2), 9, 10 and 11 (h = 1); the next round starts from it.
    assert full == [1, 5, 7, 9, 10, 11, 12]


@pytest.mark.parametrize("later", [((1, 2),), ((5, 2), (5, 1)), ((6, 2), (5, 1)), ((5, -1),)])
def test_schedules_that_make_no_sense_are_refused(later: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="broadcast_later"):
        FedDD(broadcast_later=later)
