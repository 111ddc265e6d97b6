"""Oort: a test per term of the published rule, and the FedDD paper's plainer wording."""

import math
from collections import Counter
from itertools import permutations
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddd.strategies.oort import Oort, Pacer, clip, exploit, exploration, pace, scale
from feddd.strategies.protocol import Fleet, Plan, ServerState, Task, Upload, start
from test_protocol import chosen, fleet_of, state_of, uploads_of

NO_PENALTY = Oort(straggler_penalty=0.0)


def picked(strategy: Oort, state: ServerState, fleet: Fleet, seed: int = 0) -> list[int]:
    return chosen(strategy.plan(state, fleet, np.random.default_rng(seed)))


def tried(fleet: Fleet, clients: int, **facts: Any) -> ServerState:
    """A state in which only the first so many clients were ever tried."""
    known = np.where(np.arange(len(fleet)) < clients, 1.0, np.nan)
    return state_of(
        fleet, oort_statistics=known, samples=known, last_round=np.nan_to_num(known), **{"round": 1} | facts
    )


def test_statistical_utility_is_samples_times_root_mean_squared_loss() -> None:
    # Samples × statistic: 10 · 1, 5 · 6, 40 · 0.5; the 95th percentile of (10, 20, 30) is 29.
    fleet = fleet_of([1.0] * 3)
    state = state_of(fleet, round=0, samples=[10.0, 5.0, 40.0], oort_statistics=[1.0, 6.0, 0.5])
    assert NO_PENALTY.utility(state, fleet).tolist() == pytest.approx([0.0, 1.0, (20 - 10) / (29 - 10)])


def test_outliers_are_cut_at_the_95th_percentile_before_scaling() -> None:
    values = np.array([*np.arange(20.0), 1e6])
    assert clip(values).tolist() == [*range(20), 19.0]
    assert scale(clip(values))[10] == pytest.approx(10 / 19)


def test_scaling_maps_the_least_to_0_and_the_most_to_1_and_equals_to_ones() -> None:
    assert scale(np.array([3.0, 7.0, 5.0])).tolist() == [0.0, 1.0, 0.5]
    assert scale(np.array([4.0, 4.0])).tolist() == [1.0, 1.0]


def test_clip_and_scale_look_at_explored_clients_only() -> None:
    fleet = fleet_of([1.0] * 4)
    state = state_of(fleet, round=0, samples=[1.0, 3.0, 2.0, np.nan], oort_statistics=[1.0, 1.0, 1.0, np.nan])
    utility = NO_PENALTY.utility(state, fleet)
    assert utility[:3].tolist() == pytest.approx([0.0, 1.0, 1 / 1.9])
    assert math.isnan(utility[3])


def test_clients_not_seen_lately_get_a_bonus_of_root_a_tenth_log_t_by_their_last_round() -> None:
    fleet = fleet_of([1.0] * 3)
    state = state_of(fleet, round=9, last_round=[1, 4, 9])  # planning round t = 10
    expected = [1.0 + math.sqrt(0.1 * math.log(10) / last) for last in (1, 4, 9)]
    assert NO_PENALTY.utility(state, fleet).tolist() == pytest.approx(expected)


def test_only_clients_slower_than_the_30th_percentile_are_penalised_and_quadratically() -> None:
    # Full-model seconds 1 … 11: the 30th percentile is the fourth, T = 4.
    fleet = fleet_of([1e12] * 11, compute=[float(t) for t in range(1, 12)])
    state = state_of(fleet, round=0)
    expected = [1.0 if t <= 4 else (4 / t) ** 2 for t in range(1, 12)]
    assert Oort().utility(state, fleet).tolist() == pytest.approx(expected)
    assert Oort(straggler_penalty=1.0).utility(state, fleet)[7] == pytest.approx(4 / 8)


def test_a_pacer_further_on_prefers_longer_rounds() -> None:
    fleet = fleet_of([1e12] * 11, compute=[float(t) for t in range(1, 12)])
    state = state_of(fleet, round=0, memory=Pacer(percentile=60.0))
    assert Oort().utility(state, fleet)[[6, 9]].tolist() == pytest.approx([1.0, (7 / 10) ** 2])


def percentiles(gains: list[float]) -> list[float]:
    """The pacer's percentile after every round."""
    pacer, seen = Pacer(), []
    for number, gain in enumerate(gains, 1):
        pacer = pace(pacer, number, gain)
        seen.append(pacer.percentile)
    return seen


def test_the_pacer_starts_at_the_30th_percentile_and_never_moves_while_utility_does_not_fall() -> None:
    assert Pacer().percentile == 30.0
    assert set(percentiles([1.0] * 100)) == {30.0}
    assert set(percentiles([float(t) for t in range(100)])) == {30.0}


def test_the_pacer_adds_5_percentiles_every_20_rounds_in_which_less_was_gained_than_before() -> None:
    # Windows of 20: 3, 2, 2, 1. The second and the fourth gained less than the one before; the third did not.
    seen = percentiles([3.0] * 20 + [2.0] * 20 + [2.0] * 20 + [1.0] * 20)
    assert seen[:39] == [30.0] * 39
    assert seen[39:79] == [35.0] * 40
    assert seen[79] == 40.0


def test_the_pacer_compares_whole_windows_and_stops_at_the_longest_round() -> None:
    assert percentiles([0.0] * 19 + [21.0] + [1.0] * 20)[-1] == 35.0
    assert percentiles([0.0] * 19 + [19.0] + [1.0] * 20)[-1] == 30.0
    assert percentiles([float(-t) for t in range(20 * 40)])[-1] == 100.0


def test_the_utility_gained_is_that_of_the_uploads_that_counted() -> None:
    fleet = fleet_of([1.0] * 3)
    uploads = [
        Upload(0, samples=10, oort_statistic=2.0),
        Upload(1, samples=3, oort_statistic=0.5),
        Upload(2, status="diverged", samples=100, oort_statistic=5.0),
    ]
    after = Oort().absorb(start({}, 3), fleet, Plan(1, (Task(0), Task(1), Task(2))), uploads, {})
    assert after.memory == Pacer(30.0, (21.5,))
    assert after.oort_statistics[:2].tolist() == [2.0, 0.5]


def test_a_run_moves_the_pacer_through_absorb() -> None:
    fleet = fleet_of([1.0])
    state = start({}, 1)
    for number in range(1, 41):
        upload = Upload(0, samples=1, oort_statistic=100.0 - number)
        state = Oort().absorb(state, fleet, Plan(number, (Task(0),)), [upload], {})
    assert isinstance(state.memory, Pacer)
    assert state.memory.percentile == 35.0


def test_exploration_starts_at_nine_tenths_decays_by_2_percent_and_stays_at_a_fifth() -> None:
    assert exploration(1) == 0.9
    assert exploration(2) == pytest.approx(0.9 * 0.98)
    assert exploration(11) == pytest.approx(0.9 * 0.98**10)
    assert exploration(75) == pytest.approx(0.9 * 0.98**74)  # 0.2018, the last round above the floor
    assert exploration(76) == exploration(500) == 0.2


@pytest.mark.parametrize(("number", "untried"), [(2, 52), (76, 12)])
def test_exploration_fills_its_share_with_clients_never_tried(number: int, untried: int) -> None:
    fleet = fleet_of([1.0] * 150, bits=[1.0] * 150)
    state = tried(fleet, 75, round=number - 1)
    clients = picked(Oort(budget=0.4), state, fleet)  # 60 places
    assert len(clients) == 60
    assert sum(client >= 75 for client in clients) == untried  # ⌊0.882 · 60⌋ and ⌊0.2 · 60⌋


def test_the_first_round_is_all_exploration() -> None:
    fleet = fleet_of([1.0] * 10)
    draws = [picked(Oort(), start({}, 10), fleet, seed) for seed in range(40)]
    assert {len(clients) for clients in draws} == {6}
    assert set().union(*draws) == set(range(10))


def test_once_all_were_tried_the_places_of_exploration_go_to_exploitation() -> None:
    fleet = fleet_of([1.0] * 10)
    state = state_of(fleet, round=1, samples=[float(n) for n in range(10, 20)])
    utility = Oort().utility(state, fleet)
    pool = set(np.flatnonzero(utility >= 0.95 * sorted(utility)[-6]))
    draws = [picked(Oort(), state, fleet, seed) for seed in range(20)]
    assert all(len(clients) == 6 and set(clients) <= pool for clients in draws)


def test_the_last_untried_clients_leave_the_rest_of_the_places_to_sampling() -> None:
    # Two untried, so four of six places are for the eight explored; all look the same, so each is drawn half the time.
    fleet = fleet_of([1.0] * 10)
    draws = [picked(Oort(), tried(fleet, 8), fleet, seed) for seed in range(300)]
    assert all(len(clients) == 6 and {8, 9} <= set(clients) for clients in draws)
    counts = Counter(client for clients in draws for client in clients)
    assert [counts[n] / 300 for n in range(8)] == pytest.approx([0.5] * 8, abs=0.12)


def test_exploration_takes_faster_clients_more_often() -> None:
    # One place, two untried clients that need 10 and 30 seconds: 1/10 to 1/30, so three draws in four.
    fleet = fleet_of([1e12] * 2, compute=[10.0, 30.0])
    draws = [picked(Oort(budget=0.5), start({}, 2), fleet, seed) for seed in range(600)]
    assert {len(clients) for clients in draws} == {1}
    assert sum(clients == [0] for clients in draws) / 600 == pytest.approx(0.75, abs=0.06)


def test_exploitation_samples_in_proportion_to_utility_above_95_percent_of_the_cut_off() -> None:
    # Two places: the cut-off is the second best, 2.0, and 95 % of it 1.9. Client 3 is out, 2 is in.
    clients, utility, bits = np.array([0, 1, 2, 3]), np.array([6.0, 2.0, 1.92, 1.88]), np.ones(4)
    rng = np.random.default_rng(5)
    draws = Counter(frozenset(exploit(clients, utility, bits, 2.0, rng)) for _ in range(1500))
    expected: Counter[frozenset[int]] = Counter()
    for first, second in permutations((0, 1, 2), 2):
        total = utility[:3].sum()
        share = utility[first] / total * utility[second] / (total - utility[first])
        expected[frozenset((first, second))] += share
    assert set(draws) == set(expected)
    for pair, share in expected.items():
        assert draws[pair] / 1500 == pytest.approx(share, abs=0.04)


def test_a_gap_that_fits_nobody_of_the_pool_goes_down_the_ranking() -> None:
    clients, utility = np.array([0, 1, 2]), np.array([3.0, 2.9, 1.0])
    bits = np.array([6.0, 6.0, 4.0])
    draws = {frozenset(exploit(clients, utility, bits, 10.0, np.random.default_rng(seed))) for seed in range(20)}
    assert draws <= {frozenset((0, 2)), frozenset((1, 2))}
    assert frozenset((0, 2)) in draws


def test_exploitation_without_room_or_clients_takes_nobody() -> None:
    rng = np.random.default_rng(0)
    assert exploit(np.array([0, 1]), np.ones(2), np.array([5.0, 5.0]), 4.0, rng) == []
    assert exploit(np.array([], np.int64), np.array([]), np.array([5.0]), 50.0, rng) == []


def test_nobody_is_blacklisted_however_often_it_took_part() -> None:
    fleet = fleet_of([1.0] * 3)
    state, counts = start({}, 3), np.zeros(3)
    for number in range(1, 61):
        plan = Oort(budget=0.67).plan(state, fleet, np.random.default_rng(number))
        counts[chosen(plan)] += 1
        uploads = [Upload(n, samples=[9, 1, 1][n], oort_statistic=1.0) for n in chosen(plan)]
        state = Oort().absorb(state, fleet, plan, uploads, {})
    assert counts[0] >= 55


def test_a_client_whose_only_upload_did_not_count_is_tried_again() -> None:
    fleet = fleet_of([1.0] * 4)
    state = start({}, 4)
    plan = Oort(budget=1.0).plan(state, fleet, np.random.default_rng(0))
    uploads = [*uploads_of([0, 1, 2]), Upload(3, status="diverged")]
    state = Oort(budget=1.0).absorb(state, fleet, plan, uploads, {})
    assert picked(Oort(budget=1.0), state, fleet) == [0, 1, 2, 3]
    assert any(3 in picked(Oort(budget=0.5), state, fleet, seed) for seed in range(5))


@settings(max_examples=60)
@given(st.data())
def test_the_parameter_budget_is_filled_and_never_exceeded_with_unequal_models(data: st.DataObject) -> None:
    clients = data.draw(st.integers(2, 15))
    sizes = data.draw(st.lists(st.sampled_from([3.0, 4.0, 7.0, 10.0]), min_size=clients, max_size=clients))
    known = data.draw(st.integers(0, clients))
    number = data.draw(st.integers(2, 120))
    mode: Literal["published", "budget"] = data.draw(st.sampled_from(["published", "budget"]))
    fleet = fleet_of([1.0] * clients, bits=sizes, compute=[float(n) for n in range(clients)])
    strategy = Oort(budget=data.draw(st.floats(0.55, 1.0)), mode=mode)
    bits = np.array(sizes)
    allowance = strategy.budget * bits.sum()
    taken = picked(strategy, tried(fleet, known, round=number - 1), fleet, number)
    used = bits[taken].sum()
    assert used <= allowance * (1 + 1e-9)
    assert all(used + bits[n] > allowance * (1 - 1e-9) for n in range(clients) if n not in taken)


def test_budget_mode_leaves_out_the_clients_with_the_lowest_utility() -> None:
    fleet = fleet_of([1.0] * 5)
    state = state_of(fleet, samples=[1.0, 2.0, 30.0, 4.0, 5.0], oort_statistics=[9.0, 1.0, 1.0, 1.0, 1.0])
    # Utilities 9, 2, 30, 4, 5; nothing is clipped and nothing stale.
    assert picked(Oort(0.6, mode="budget"), state, fleet) == [0, 2, 4]
    assert picked(Oort(0.2, mode="budget"), state, fleet) == [2]


def test_budget_mode_does_not_explore() -> None:
    fleet = fleet_of([1.0] * 6)
    state = state_of(
        fleet,
        round=2,
        samples=[10.0, 2.0, 8.0, np.nan, 9.0, np.nan],
        oort_statistics=[1.0, 1.0, 1.0, np.nan, 1.0, np.nan],
        last_round=[1, 1, 1, 0, 1, 0],
    )
    # The untried count as the mean, 29/4: below 10, 9 and 8, and above 2.
    assert {tuple(picked(Oort(0.5, mode="budget"), state, fleet, seed)) for seed in range(10)} == {(0, 2, 4)}


def test_budget_mode_counts_slowness_in_the_utility() -> None:
    # T is the 30th percentile of (10, 40) seconds, 19: the slow one is worth 30 · (19/40)² = 6.8 against 10.
    fleet = fleet_of([1e12] * 2, compute=[10.0, 40.0])
    state = state_of(fleet, samples=[10.0, 30.0])
    assert picked(Oort(0.5, mode="budget"), state, fleet) == [0]
    assert picked(Oort(0.5, mode="budget", straggler_penalty=0.0), state, fleet) == [1]


def test_a_budget_below_every_model_is_refused() -> None:
    fleet = fleet_of([1.0] * 2)
    for strategy in (Oort(0.3), Oort(0.3, mode="budget")):
        with pytest.raises(ValueError, match=r"budget 0\.3 is less than any client's model"):
            picked(strategy, state_of(fleet), fleet)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget must lie above 0"),
        ({"mode": "greedy"}, "mode must be one of published, budget"),
        ({"straggler_penalty": -1.0}, "straggler_penalty must be finite and at least 0"),
        ({"straggler_penalty": float("nan")}, "straggler_penalty must be finite and at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Oort(**options)
