"""The linear programme: against HiGHS, worked examples, which of several optima is taken, and what is refused."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

import feddd

Floats = NDArray[np.float64]
TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


class Fleet(NamedTuple):
    bits: Floats
    seconds_per_bit: Floats
    compute: Floats
    contribution: Floats
    budget: float
    max_dropout: float
    penalty: float

    def allocate(self, **changes: Any) -> feddd.Allocation:
        fleet = self._replace(**{name: value for name, value in changes.items() if name in self._fields})
        options = {"solver": changes["solver"]} if "solver" in changes else {}
        return feddd.allocate(
            *fleet[:4], budget=fleet.budget, max_dropout=fleet.max_dropout, penalty=fleet.penalty, **options
        )

    def finish(self, dropout: Floats) -> float:
        return max(
            float(t + u * (1 - d) * s)
            for u, s, t, d in zip(self.bits, self.seconds_per_bit, self.compute, dropout, strict=True)
        )


def least(fleet: Fleet, weight_of_time: float, weight_of_loss: float, longest: float = math.inf) -> float:
    """min weight_of_time · T + weight_of_loss · Σ re D by HiGHS, with sizes and seconds scaled to about one."""
    n = len(fleet.bits)
    seconds = fleet.bits * fleet.seconds_per_bit
    unit = float((fleet.compute + seconds).max())
    share = fleet.bits / fleet.bits.sum()
    solution = linprog(
        np.append(weight_of_loss * fleet.contribution / unit, weight_of_time),
        A_ub=sparse.hstack([sparse.diags(-seconds / unit), -np.ones((n, 1))]).tocsr(),
        b_ub=-(fleet.compute + seconds) / unit,
        A_eq=sparse.csr_matrix(np.append(share, 0.0)[None]),
        b_eq=[min(1 - fleet.budget, fleet.max_dropout)],
        bounds=[(0, fleet.max_dropout)] * n + [(None, longest / unit)],
        method="highs",
        options=TIGHT,
    )
    assert solution.status == 0, solution.message
    return float(solution.fun) * unit


def random_fleet(rng: np.random.Generator) -> Fleet:
    """One client or many; equal or unequal sizes, links and contributions; budgets at and between both ends."""
    n = int(rng.choice([1, 2, 3, 10, 40]))
    bits = rng.choice([1e4, 2e5, 2.7e6, 1e8], n) if rng.random() < 0.5 else np.full(n, 2_739_648.0)
    links = 1 / rng.uniform(1e4, 5e4, n) + 1 / rng.uniform(4e4, 2e5, n)
    compute = rng.choice([0.0, 1.0, 100.0]) * rng.uniform(0, 5, n)
    contribution = rng.random(n) * rng.choice([0.0, 1e-3, 1.0], n)
    kind = rng.integers(6)
    if kind == 0:
        links[:] = links[0]
    elif kind == 1:
        contribution[:] = contribution[0]
    elif kind == 2:
        contribution = bits / bits.sum()
    elif kind == 3:
        types = rng.integers(0, 2, n)
        links, contribution, bits = links[types % n], contribution[types % n], bits[types % n]
    max_dropout = float(rng.choice([0.05, 0.5, 0.7, 0.8, 1.0]))
    budget = float(rng.choice([1 - max_dropout, 1.0, 1 - max_dropout * rng.random()]))
    penalty = float(rng.choice([0.0, 1e-3, 1.0, 30.0, 1e4]))
    return Fleet(bits, links, compute, contribution, budget, max_dropout, penalty)


def assert_optimal(fleet: Fleet) -> None:
    result = fleet.allocate()
    dropout = result.dropout
    assert dropout.shape == fleet.bits.shape
    assert (dropout >= 0).all()
    assert (dropout <= fleet.max_dropout).all()
    total = fleet.bits.sum()
    assert math.fsum(fleet.bits * (1 - dropout)) == pytest.approx(fleet.budget * total, rel=1e-9, abs=1e-9 * total)
    assert result.round_seconds == pytest.approx(fleet.finish(dropout), rel=1e-12)
    lost = math.fsum(fleet.contribution * dropout)
    assert result.objective == pytest.approx(result.round_seconds + fleet.penalty * lost, rel=1e-12)
    assert result.objective == pytest.approx(least(fleet, 1.0, fleet.penalty), rel=1e-9)


def test_the_objective_equals_that_of_highs_on_random_fleets() -> None:
    rng = np.random.default_rng(7)
    for _ in range(150):
        assert_optimal(random_fleet(rng))


@pytest.mark.slow
def test_the_objective_equals_that_of_highs_on_a_thousand_random_fleets() -> None:
    rng = np.random.default_rng(8)
    for _ in range(1000):
        assert_optimal(random_fleet(rng))


@settings(max_examples=40, deadline=None)
@given(
    clients=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6
    ),
    budget=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_small_whole_numbers_with_many_ties_are_solved_like_highs(
    clients: list[tuple[int, int, int, int]], budget: float, penalty: float
) -> None:
    columns = np.array(clients, dtype=float).T
    assert_optimal(Fleet(*columns, budget=budget, max_dropout=0.75, penalty=penalty))


def test_the_reference_solver_gives_the_same_objective() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        fleet = random_fleet(rng)
        exact, reference = fleet.allocate(), fleet.allocate(solver="highs")
        assert reference.objective == pytest.approx(exact.objective, rel=1e-6)
        assert reference.round_seconds == pytest.approx(fleet.finish(reference.dropout), rel=1e-12)


def two_clients(penalty: float) -> Fleet:
    """One bit each, 1 and 3 seconds a bit; only the slow one contributes. D₁ + D₂ = 1."""
    return Fleet(np.ones(2), np.array([1.0, 3.0]), np.zeros(2), np.array([0.0, 1.0]), 0.5, 0.8, penalty)


def test_time_alone_lets_both_clients_finish_together() -> None:
    # 1 − D₁ = 3(1 − D₂) and D₁ + D₂ = 1 → D₂ = 3/4
    result = two_clients(0.0).allocate()
    assert result.dropout.tolist() == pytest.approx([0.25, 0.75])
    assert result.round_seconds == pytest.approx(0.75)
    assert result.objective == pytest.approx(0.75)


def test_a_contribution_is_spared_only_when_its_penalty_outweighs_the_seconds() -> None:
    # Moving x from D₂ to D₁ costs 3x seconds and saves δx.
    kept = two_clients(2.0).allocate()
    assert kept.dropout.tolist() == pytest.approx([0.25, 0.75])
    assert kept.objective == pytest.approx(0.75 + 2 * 0.75)
    moved = two_clients(4.0).allocate()
    assert moved.dropout.tolist() == pytest.approx([0.8, 0.2])
    assert moved.round_seconds == pytest.approx(2.4)
    assert moved.objective == pytest.approx(2.4 + 4 * 0.2)


@pytest.mark.parametrize("fast_link", [1.0, 0.1])
def test_where_seconds_and_contribution_weigh_the_same_the_contribution_is_kept(fast_link: float) -> None:
    # δ = 3: moving x costs 3x and saves 3x, so every point up to D₁ = 0.8 is optimal; T + 3 D₂ = 3(1 − D₂) + 3 D₂ = 3
    result = two_clients(3.0).allocate(seconds_per_bit=np.array([fast_link, 3.0]))
    assert result.objective == pytest.approx(3.0)
    assert result.dropout.tolist() == pytest.approx([0.8, 0.2])


def three_clients(contribution: list[float]) -> Fleet:
    """Two bits each, two of six are dropped; the third computes 10 s, so it must drop all it may: 0.9 · 2 bits."""
    links, compute = np.array([1.0, 2.0, 1.0]), np.array([0.0, 0.0, 10.0])
    return Fleet(np.full(3, 2.0), links, compute, np.array(contribution), 2 / 3, 0.9, 0.0)


def test_what_remains_is_dropped_where_it_contributes_least() -> None:
    result = three_clients([1.0, 3.0, 5.0]).allocate()
    assert result.dropout.tolist() == pytest.approx([0.1, 0.0, 0.9])
    assert result.round_seconds == pytest.approx(10.2)


def test_equal_contributions_share_what_remains() -> None:
    assert three_clients([1.0, 1.0, 5.0]).allocate().dropout.tolist() == pytest.approx([0.05, 0.05, 0.9])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1e4])
def test_budgets_at_both_ends_leave_no_choice(penalty: float) -> None:
    fleet = random_fleet(np.random.default_rng(1))._replace(max_dropout=0.8, penalty=penalty)
    assert fleet.allocate(budget=1.0).dropout == pytest.approx(0.0)
    assert fleet.allocate(budget=0.2).dropout == pytest.approx(0.8)
    assert fleet.allocate(budget=0.3, max_dropout=0.7).dropout == pytest.approx(0.7)
    assert fleet.allocate(budget=1.0, max_dropout=0.0).dropout == pytest.approx(0.0)
    assert fleet.allocate(budget=0.0, max_dropout=1.0).dropout == pytest.approx(1.0)


def test_a_single_client_drops_what_the_budget_says() -> None:
    for penalty in (0.0, 100.0):
        result = feddd.allocate([10.0], [0.5], [2.0], [1.0], budget=0.6, max_dropout=0.8, penalty=penalty)
        assert result.dropout.tolist() == pytest.approx([0.4])
        assert result.round_seconds == pytest.approx(5.0)


def test_the_same_fleet_in_bits_or_bytes_gives_the_same_rates() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        fleet = random_fleet(rng)
        for unit in (8.0, 1000.0):
            other = fleet.allocate(bits=fleet.bits / unit, seconds_per_bit=fleet.seconds_per_bit * unit)
            assert other.objective == pytest.approx(fleet.allocate().objective, rel=1e-12)
            assert other.dropout == pytest.approx(fleet.allocate().dropout, abs=1e-9)


def test_contributions_that_differ_only_by_rounding_are_equal() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        bits = rng.choice([1.0, 0.8, 0.6, 0.4, 0.2], 10) * 2_739_648
        fleet = Fleet(
            bits, 1 / rng.uniform(1e4, 5e4, 10), rng.uniform(0, 5, 10), 0.3 * bits / bits.sum(), 0.6, 0.8, 0.0
        )
        for unit in (3.0, 1000.0):
            other = fleet.allocate(bits=bits / unit, seconds_per_bit=fleet.seconds_per_bit * unit)
            assert other.dropout == pytest.approx(fleet.allocate().dropout, abs=1e-9)


def test_the_same_fleet_in_seconds_or_milliseconds_gives_the_same_rates() -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        fleet = random_fleet(rng)
        other = fleet.allocate(
            seconds_per_bit=fleet.seconds_per_bit * 1000, compute=fleet.compute * 1000, penalty=fleet.penalty * 1000
        )
        assert other.objective == pytest.approx(1000 * fleet.allocate().objective, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), penalty=st.sampled_from([0.0, 1.0, 50.0]), budget=st.sampled_from([0.3, 0.6, 0.9]))
def test_permuting_the_clients_permutes_the_rates_and_equal_clients_get_equal_rates(
    data: st.DataObject, penalty: float, budget: float
) -> None:
    kinds = [(2e6, 3e-5, 1.0, 0.2), (2e6, 3e-5, 1.0, 0.1), (1e6, 9e-5, 4.0, 0.1), (4e6, 5e-5, 0.0, 0.0)]
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=12))
    order = data.draw(st.permutations(range(len(drawn))))
    fleet = Fleet(*np.array([kinds[k] for k in drawn]).T, budget=budget, max_dropout=0.8, penalty=penalty)
    rates = fleet.allocate().dropout
    moved = Fleet(*(column[list(order)] for column in fleet[:4]), budget, 0.8, penalty).allocate().dropout
    assert moved == pytest.approx(rates[list(order)], abs=1e-9)
    for kind in set(drawn):
        assert len({rate for rate, k in zip(rates, drawn, strict=True) if k == kind}) == 1


def test_without_a_penalty_the_shortest_round_loses_the_least_contribution() -> None:
    rng = np.random.default_rng(9)
    for _ in range(60):
        fleet = random_fleet(rng)._replace(penalty=0.0)
        result = fleet.allocate()
        least_lost = least(fleet, 0.0, 1.0, longest=result.round_seconds * (1 + 1e-12))
        lost = float((fleet.contribution * result.dropout).sum())
        assert lost == pytest.approx(least_lost, rel=1e-6, abs=1e-8 * max(1.0, fleet.contribution.sum()))


def test_a_larger_penalty_never_loses_more_contribution_nor_shortens_the_round() -> None:
    rng = np.random.default_rng(10)
    for _ in range(30):
        fleet = random_fleet(rng)
        results = [fleet.allocate(penalty=penalty) for penalty in (0.0, 1e-2, 1.0, 30.0, 1e3, 1e6)]
        lost = [float((fleet.contribution * result.dropout).sum()) for result in results]
        seconds = [result.round_seconds for result in results]
        assert all(b <= a * (1 + 1e-9) + 1e-12 for a, b in pairwise(lost))
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(seconds))


def test_the_arrays_given_are_not_changed() -> None:
    fleet = random_fleet(np.random.default_rng(2))
    copies = [column.copy() for column in fleet[:4]]
    fleet.allocate()
    assert all(np.array_equal(column, copy) for column, copy in zip(fleet[:4], copies, strict=True))


GOOD: dict[str, Any] = {
    "upload_bits": [1.0, 2.0, 3.0],
    "seconds_per_bit": [1.0, 1.0, 1.0],
    "compute_seconds": [0.0, 0.0, 1.0],
    "contribution": [0.0, 1.0, 1.0],
    "budget": 0.6,
    "max_dropout": 0.8,
    "penalty": 1.0,
}
BAD: list[tuple[str, Any, str]] = [
    ("budget", 0.1, r"infeasible.*between 0\.2 and 1"),
    ("budget", 0.1999, "infeasible"),
    ("budget", 1.2, "infeasible"),
    ("budget", -1.0, "infeasible"),
    ("budget", math.nan, "infeasible"),
    ("max_dropout", 1.5, "max_dropout"),
    ("max_dropout", -0.1, "max_dropout"),
    ("max_dropout", math.nan, "max_dropout"),
    ("penalty", -1.0, "penalty"),
    ("penalty", math.nan, "penalty"),
    ("penalty", math.inf, "penalty"),
    ("upload_bits", [1.0, 0.0, 3.0], "upload_bits must be positive"),
    ("upload_bits", [1.0, -2.0, 3.0], "upload_bits must be positive"),
    ("seconds_per_bit", [1.0, 0.0, 1.0], "seconds_per_bit must be positive"),
    ("seconds_per_bit", [1.0, -1.0, 1.0], "seconds_per_bit must be positive"),
    ("compute_seconds", [0.0, -1.0, 0.0], "compute_seconds must be at least 0"),
    ("contribution", [0.0, -1.0, 0.0], "contribution must be at least 0"),
    ("solver", "simplex", "solver"),
]
NAMES = ("upload_bits", "seconds_per_bit", "compute_seconds", "contribution")
BAD += [
    (name, [1.0, bad, 1.0], f"{name} holds a value that is not finite")
    for name in NAMES
    for bad in (math.nan, math.inf)
]
BAD += [(name, shape, "one number per client") for name in NAMES for shape in ([1.0, 1.0], 1.0, [[1.0, 1.0, 1.0]], [])]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_wrong_input_is_refused_with_its_reason(name: str, value: Any, message: str) -> None:
    changed = GOOD | {name: value}
    columns = [changed.pop(column) for column in NAMES]
    with pytest.raises(ValueError, match=message):
        feddd.allocate(*columns, **changed)


def test_a_fleet_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="one number per client"):
        feddd.allocate([], [], [], [], budget=0.6, max_dropout=0.8, penalty=1.0)


def test_a_million_clients_meet_the_budget() -> None:
    rng = np.random.default_rng(0)
    n = 1_000_000
    links = 1 / rng.uniform(1e4, 5e4, n) + 1 / rng.uniform(4e4, 2e5, n)
    fleet = Fleet(rng.choice([1, 0.6, 0.2], n) * 2.7e6, links, rng.uniform(0, 5, n), rng.random(n) / n, 0.6, 0.8, 1e4)
    result = fleet.allocate()
    assert math.fsum(fleet.bits * result.dropout) == pytest.approx(0.4 * fleet.bits.sum(), rel=1e-9)
