"""What all strategies share: fleet facts by hand, what a server remembers, budgets, and that both calls are pure."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddd.strategies.fedavg import FedAvg
from feddd.strategies.fedcs import FedCS
from feddd.strategies.feddd import FedDD
from feddd.strategies.oort import Oort, Pacer
from feddd.strategies.protocol import (
    Fleet,
    Plan,
    ServerState,
    Strategy,
    Task,
    Upload,
    digest,
    fill_budget,
    full_model_plan,
    known_or_mean,
    start,
)

ALL: list[Strategy] = [
    FedDD(),
    FedDD(rates="uniform"),
    FedAvg(),
    FedAvg(participation=0.5),
    FedCS(),
    FedCS(mode="deadline", deadline_seconds=1e9),
    Oort(),
    Oort(mode="budget"),
]


def fleet_of(
    uplink: Sequence[float],
    downlink: Sequence[float] | None = None,
    *,
    compute: Sequence[float] | None = None,
    bits: Sequence[float] | None = None,
    fixed: float = 0.0,
    always: Sequence[float] | None = None,
    model_bits: float | None = None,
) -> Fleet:
    """A fleet with two layers, "head" (the bits in `always`) and "body" (the rest); 1000 bits a client by default."""
    count = len(uplink)
    sizes = np.array(bits if bits is not None else [1000.0] * count)
    head = np.array(always if always is not None else sizes / 4)
    return Fleet(
        uplink_bits_per_s=np.array(uplink, float),
        downlink_bits_per_s=np.array(downlink if downlink is not None else uplink, float),
        compute_seconds=np.array(compute if compute is not None else [0.0] * count),
        droppable_bits=sizes,
        fixed_bits=np.full(count, fixed),
        layer_bits={"head": head, "body": sizes - head},
        model_bits=float(sizes.max()) if model_bits is None else model_bits,
    )


def state_of(fleet: Fleet, **known: Any) -> ServerState:
    """A server before round `round` + 1; everybody's facts are ones unless given."""
    ones = np.ones(len(fleet))
    facts: dict[str, Any] = {
        "round": 1,
        "masks": tuple(bytes([client]) * 4 for client in range(len(fleet))),
        "losses": ones,
        "oort_statistics": ones,
        "samples": ones,
        "label_coverage": ones,
        "last_round": np.ones(len(fleet), np.int64),
    }
    facts |= {name: np.array(value, float) if isinstance(value, list) else value for name, value in known.items()}
    rest = {name: facts.pop(name) for name in ("round", "memory", "mask_error") if name in facts}
    return dataclasses.replace(start({"w": torch.zeros(2)}, len(fleet)).knowing(**facts), **rest)


def same(a: ServerState, b: ServerState) -> bool:
    """Whether two states hold the same facts."""
    arrays = ("losses", "oort_statistics", "samples", "label_coverage", "last_round")
    return (
        (a.round, a.masks, a.memory) == (b.round, b.masks, b.memory)
        and a.client_memory.keys() == b.client_memory.keys()
        and all(np.array_equal(a.client_memory[name], b.client_memory[name]) for name in a.client_memory)
        and all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in arrays)
        and a.model.keys() == b.model.keys()
        and all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    )


def chosen(plan: Plan) -> list[int]:
    return [task.client for task in plan.tasks]


def uploads_of(clients: Sequence[int], **facts: Any) -> list[Upload]:
    return [Upload(n, mask=bytes([n, 1]), train_loss=1.0, oort_statistic=1.0, samples=10, **facts) for n in clients]


def small_fleet() -> Fleet:
    rng = np.random.default_rng(3)
    return fleet_of(rng.uniform(10, 50, 8).tolist(), rng.uniform(40, 200, 8).tolist(), compute=[0.5] * 8, fixed=64.0)


def test_seconds_of_a_fleet_are_those_worked_out_by_hand() -> None:
    fleet = fleet_of([10.0, 20.0], [40.0, 80.0], compute=[3.0, 5.0], bits=[900.0, 300.0], fixed=100.0)
    assert fleet.seconds_per_bit.tolist() == [1 / 10 + 1 / 40, 1 / 20 + 1 / 80]
    assert fleet.transfer_seconds.tolist() == [1000 / 10 + 1000 / 40, 400 / 20 + 400 / 80]
    assert fleet.full_seconds.tolist() == [128.0, 30.0]
    assert len(fleet) == 2


def test_a_fleet_is_heterogeneous_exactly_when_model_sizes_differ() -> None:
    assert fleet_of([1.0, 2.0], bits=[5.0, 6.0]).heterogeneous
    assert not fleet_of([1.0, 2.0], bits=[6.0, 6.0]).heterogeneous


def test_before_round_one_nothing_is_known_and_nobody_holds_a_mask() -> None:
    state = start({"w": torch.ones(1)}, 3)
    assert state.round == 0
    assert state.masks == (None, None, None)
    assert all(np.isnan(x).all() for x in (state.losses, state.oort_statistics, state.samples, state.label_coverage))
    assert state.last_round.tolist() == [0, 0, 0]


def test_digest_remembers_the_reports_of_those_that_counted_and_nothing_of_the_others() -> None:
    fleet = fleet_of([1.0] * 4)
    before = state_of(fleet, round=4, losses=[1.0, 2.0, 3.0, 4.0], last_round=[4, 4, 4, 2])
    model = {"w": torch.ones(2)}
    reports = [
        Upload(0, mask=b"new", train_loss=0.5, oort_statistic=0.6, samples=7, label_coverage=3.0),
        Upload(2, status="diverged", mask=b"bad", train_loss=9.0, oort_statistic=9.0, samples=9, label_coverage=9.0),
    ]
    after = digest(before, Plan(5, (Task(0), Task(2))), reports, model, memory="kept")
    assert after.round == 5
    assert after.model is model
    assert after.memory == "kept"
    assert after.masks == (b"new", before.masks[1], None, before.masks[3])
    assert after.losses.tolist() == [0.5, 2.0, 3.0, 4.0]
    assert after.oort_statistics.tolist() == [0.6, 1.0, 1.0, 1.0]
    assert after.samples.tolist() == [7.0, 1.0, 1.0, 1.0]
    assert after.label_coverage.tolist() == [3.0, 1.0, 1.0, 1.0]
    assert after.last_round.tolist() == [5, 4, 5, 2]


def test_label_coverage_is_told_once_and_kept_when_later_reports_leave_it_out() -> None:
    state = start({}, 1)
    state = digest(state, Plan(1, (Task(0),)), [Upload(0, samples=1, label_coverage=4.5)], {})
    state = digest(state, Plan(2, (Task(0),)), [Upload(0, samples=1)], {})
    assert state.label_coverage.tolist() == [4.5]


def test_unknown_values_count_as_the_mean_of_the_known_and_as_one_if_none_is() -> None:
    assert known_or_mean(np.array([2.0, np.nan, 4.0])).tolist() == [2.0, 3.0, 4.0]
    assert known_or_mean(np.array([np.nan, np.nan])).tolist() == [1.0, 1.0]


def test_a_client_that_does_not_fit_is_skipped_and_a_later_one_taken() -> None:
    assert fill_budget([3, 0, 1, 2], np.array([50.0, 10.0, 30.0, 40.0]), 85.0) == [3, 1, 2]
    assert fill_budget([0, 1], np.array([50.0, 10.0]), 5.0) == []


def test_a_budget_met_exactly_is_not_missed_by_rounding() -> None:
    assert 0.29 * 100 < 29
    assert len(fill_budget(range(100), np.ones(100), 0.29 * 100)) == 29


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_filling_a_budget_never_exceeds_it_and_leaves_nobody_out_who_would_fit(
    sizes: list[float], budget: float
) -> None:
    bits = np.array(sizes)
    allowance = budget * float(bits.sum())
    taken = fill_budget(range(len(bits)), bits, allowance)
    used = float(bits[taken].sum())
    assert used <= allowance * (1 + 1e-9)
    assert all(used + bits[n] > allowance * (1 - 1e-9) for n in range(len(bits)) if n not in taken)


def test_a_plan_of_full_models_sends_and_wants_everything_from_the_chosen_in_order() -> None:
    plan = full_model_plan(state_of(fleet_of([1.0] * 5), round=6), [4, 1])
    assert plan.round == 7
    assert [(task.client, task.dropout, task.down.mask, task.coverage) for task in plan.tasks] == [
        (1, 0.0, None, False),
        (4, 0.0, None, False),
    ]


@pytest.mark.parametrize("strategy", ALL, ids=repr)
@pytest.mark.parametrize("rounds", [0, 1, 5, 7])
def test_planning_is_pure(strategy: Strategy, rounds: int) -> None:
    fleet = small_fleet()
    state = (
        state_of(fleet, round=rounds, losses=[0.1, 0.5, 0.9, 0.2, 0.7, np.nan, 0.3, 0.4]) if rounds else start({}, 8)
    )
    kept_state, kept_fleet = copy.deepcopy(state), copy.deepcopy(fleet)
    first = strategy.plan(state, fleet, np.random.default_rng(1))
    again = strategy.plan(state, fleet, np.random.default_rng(1))
    assert first == again
    assert first.round == rounds + 1
    assert chosen(first) == sorted(set(chosen(first)))
    assert same(state, kept_state)
    assert repr(fleet) == repr(kept_fleet)


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_absorbing_is_pure(strategy: Strategy) -> None:
    fleet = small_fleet()
    state = state_of(fleet, round=3, memory=Pacer(35.0, (1.0, 2.0)) if isinstance(strategy, Oort) else None)
    plan = strategy.plan(state, fleet, np.random.default_rng(1))
    uploads, model = uploads_of(chosen(plan)), {"w": torch.ones(2)}
    kept = copy.deepcopy((state, uploads, model))
    first = strategy.absorb(state, fleet, plan, uploads, model)
    again = strategy.absorb(state, fleet, plan, uploads, model)
    assert same(first, again)
    assert not same(first, state)
    assert first.round == 4
    assert same(state, kept[0])
    assert repr(uploads) == repr(kept[1])
    assert torch.equal(model["w"], kept[2]["w"])


@pytest.mark.parametrize("strategy", [FedAvg(), FedAvg(0.5), FedCS(), Oort(), Oort(mode="budget")], ids=repr)
def test_baselines_send_full_models_both_ways_in_every_round(strategy: Strategy) -> None:
    fleet = small_fleet()
    state = start({}, len(fleet))
    for number in range(1, 8):
        plan = strategy.plan(state, fleet, np.random.default_rng(number))
        assert plan.tasks
        assert all(task.down.mask is None and task.dropout == 0.0 and not task.coverage for task in plan.tasks)
        state = strategy.absorb(state, fleet, plan, uploads_of(chosen(plan)), {})
