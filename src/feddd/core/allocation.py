"""Dropout rates for all clients: the linear programme of Eqs. 14 and 15, solved exactly in O(N log N).

    minimise    T + δ · Σ_n re_n · D_n
    subject to  0 ≤ D_n ≤ D_max
                Σ_n U_n (1 − D_n) = A · Σ_n U_n
                t_cmp,n + U_n (1 − D_n) (1/r_up,n + 1/r_down,n) ≤ T      for every n

For a fixed T every client has a least rate l_n(T) = max(0, 1 − (T − t_cmp,n) / (U_n s_n)), s_n being its seconds per
bit, and what remains to be dropped goes to the clients with the smallest re_n / U_n: a fractional knapsack. Its value
is convex and piecewise linear in T, so the best T is found by bisection over where a least rate reaches zero, and
then exactly inside the piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

BUDGET_TOLERANCE = 1e-9
"""A budget may miss 1 − D_max by this much: 0.3 with max dropout 0.7 is meant to be feasible, though 1 − 0.7 > 0.3."""


EQUAL = 1e-12
"""Contributions per bit closer than this share are equal: rounding must not decide who drops."""


@dataclass(frozen=True)
class Allocation:
    """dropout: D_n [N]    round_seconds: T    objective: T + δ Σ re_n D_n."""

    dropout: Floats
    round_seconds: float
    objective: float


@dataclass(frozen=True)
class _Problem:
    bits: Floats
    seconds_per_bit: Floats
    compute_seconds: Floats
    contribution: Floats
    dropped_bits: float
    max_dropout: float
    penalty: float


def allocate(
    upload_bits: ArrayLike,
    seconds_per_bit: ArrayLike,
    compute_seconds: ArrayLike,
    contribution: ArrayLike,
    *,
    budget: float,
    max_dropout: float,
    penalty: float,
    solver: str = "exact",
) -> Allocation:
    """Return the rates that minimise T + δ Σ re_n D_n at budget A.

    upload_bits: U_n    seconds_per_bit: 1/r_up + 1/r_down    compute_seconds: t_cmp    contribution: re_n    all [N]
    penalty: the raw δ, in seconds    solver: "exact", or "highs" for the reference
    """
    problem = _problem(upload_bits, seconds_per_bit, compute_seconds, contribution, budget, max_dropout, penalty)
    if solver not in ("exact", "highs"):
        raise ValueError(f'solver must be "exact" or "highs", not {solver!r}')
    dropout = _solve_exactly(problem) if solver == "exact" else _solve_with_highs(problem)
    kept_seconds = problem.bits * problem.seconds_per_bit * (1.0 - dropout)
    round_seconds = float((problem.compute_seconds + kept_seconds).max())
    lost = float((problem.contribution * dropout).sum())
    return Allocation(dropout, round_seconds, round_seconds + problem.penalty * lost)


def check_budget(budget: float, max_dropout: float) -> None:
    """Refuse a budget that no rates can meet: feasible exactly when 1 − D_max ≤ A ≤ 1, up to rounding."""
    if not 0.0 <= max_dropout <= 1.0:
        raise ValueError(f"max_dropout must lie between 0 and 1, not {max_dropout}")
    if not 1.0 - max_dropout - BUDGET_TOLERANCE <= budget <= 1.0 + BUDGET_TOLERANCE:
        raise ValueError(
            f"budget {budget} is infeasible: with max_dropout {max_dropout} it must lie between "
            f"{1.0 - max_dropout:g} and 1"
        )


def _problem(
    upload_bits: ArrayLike,
    seconds_per_bit: ArrayLike,
    compute_seconds: ArrayLike,
    contribution: ArrayLike,
    budget: float,
    max_dropout: float,
    penalty: float,
) -> _Problem:
    named = {
        "upload_bits": upload_bits,
        "seconds_per_bit": seconds_per_bit,
        "compute_seconds": compute_seconds,
        "contribution": contribution,
    }
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    shape = arrays["upload_bits"].shape
    if len(shape) != 1 or shape[0] == 0 or any(values.shape != shape for values in arrays.values()):
        shapes = ", ".join(f"{name} {values.shape}" for name, values in arrays.items())
        raise ValueError(f"one number per client is needed in each of: {shapes}")
    for name, values in arrays.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds a value that is not finite")
        positive = name in ("upload_bits", "seconds_per_bit")
        if (values <= 0).any() if positive else (values < 0).any():
            raise ValueError(f"{name} must be {'positive' if positive else 'at least 0'} for every client")
    if not (np.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"penalty must be finite and at least 0, not {penalty}")
    check_budget(budget, max_dropout)
    total = float(arrays["upload_bits"].sum())
    dropped = min(max(1.0 - budget, 0.0), max_dropout) * total
    return _Problem(
        bits=arrays["upload_bits"],
        seconds_per_bit=arrays["seconds_per_bit"],
        compute_seconds=arrays["compute_seconds"],
        contribution=arrays["contribution"],
        dropped_bits=dropped,
        max_dropout=max_dropout,
        penalty=penalty,
    )


def _solve_exactly(problem: _Problem) -> Floats:
    # Clients in the order in which they give up parameters: least contribution per bit first.
    density = problem.contribution / problem.bits
    order = np.argsort(density)
    clients = _Sorted(
        bits=problem.bits[order],
        seconds=(problem.bits * problem.seconds_per_bit)[order],
        compute=problem.compute_seconds[order],
        density=density[order],
        penalty=problem.penalty,
        dropped_bits=problem.dropped_bits,
        max_dropout=problem.max_dropout,
    )
    dropout = np.empty_like(density)
    dropout[order] = clients.rates(clients.best_round_seconds())
    return dropout


@dataclass(frozen=True)
class _Sorted:
    """The problem with clients sorted by contribution per bit, and its pieces as functions of T."""

    bits: Floats
    seconds: Floats  # U_n s_n: the full model's transfer
    compute: Floats
    density: Floats  # re_n / U_n
    penalty: float
    dropped_bits: float
    max_dropout: float

    @cached_property
    def finish(self) -> Floats:
        """Return when each client would end with its full model."""
        return self.compute + self.seconds

    @cached_property
    def speed(self) -> Floats:
        """1 / s_n, bits a second."""
        return self.bits / self.seconds

    @cached_property
    def price(self) -> Floats:
        """δ re_n / U_n: what dropping a bit costs."""
        return self.penalty * self.density

    @cached_property
    def bits_before(self) -> Floats:
        """Σ_{i<j} U_i for j = 0 … N."""
        return np.concatenate(([0.0], np.cumsum(self.bits)))

    def rates(self, round_seconds: float) -> Floats:
        """Least rates, then the rest of the budget from the cheapest clients on; equal prices share alike."""
        least = np.clip(1.0 - (round_seconds - self.compute) / self.seconds, 0.0, self.max_dropout)
        room = self.bits * (self.max_dropout - least)
        filled = np.cumsum(room)
        rest = self.dropped_bits - float((self.bits * least).sum())
        if rest <= 0.0:
            return least
        marginal = min(int(np.searchsorted(filled, rest)), len(room) - 1)
        first = int(np.searchsorted(self.density, self.density[marginal] * (1.0 - EQUAL), side="left"))
        last = int(np.searchsorted(self.density, self.density[marginal] * (1.0 + EQUAL), side="right"))
        before = float(filled[first - 1]) if first else 0.0
        group = float(room[first:last].sum())
        share = min(max((rest - before) / group, 0.0), 1.0) if group > 0 else 0.0
        least[:first] = self.max_dropout
        least[first:last] += share * (self.max_dropout - least[first:last])
        return least

    def shortest_round_seconds(self) -> float:
        """Return the least T at which the least rates fit both D_max and the budget."""
        bound = float((self.compute + self.seconds * (1.0 - self.max_dropout)).max())
        # Σ max(0, U_n − (T − t_n)/s_n) = dropped bits; the clients with the latest full-model time come first.
        late = np.argsort(-self.finish)
        speed, finish = self.speed[late], self.finish[late]
        speeds = np.cumsum(speed)
        # Bits that the first k clients must drop when T is client k's finish; it grows with k.
        forced = np.cumsum(speed * finish) - speeds * finish
        count = int(np.searchsorted(forced, self.dropped_bits, side="right"))
        excess = float((speed[:count] * finish[:count]).sum()) - self.dropped_bits
        return max(bound, excess / float(speeds[count - 1]))

    def best_round_seconds(self) -> float:
        """Return the T of the optimum; of several the largest, which loses the least contribution."""
        best = self.shortest_round_seconds()
        index = np.flatnonzero(self.finish > best)
        late = _Late(index, self.price[index], self.speed[index], self.finish[index])
        corners = np.concatenate(([best], np.unique(late.finish)))
        first, last = 0, len(corners) - 2
        piece = 0  # often the shortest round is the best: look there before bisecting
        while first <= last:
            start, end = float(corners[piece]), float(corners[piece + 1])
            best = self._best_inside(start, end, late)
            if best >= end:
                first = piece + 1
            elif best <= start:
                last = piece - 1
            else:
                break
            piece = (first + last) // 2
        return best

    def _best_inside(self, start: float, end: float, late: _Late) -> float:
        """Return the best T of [start, end], in which no least rate reaches zero.

        While a client of price p fills up (cheaper ones are at D_max, dearer ones at their least rate), a longer
        round lets the dearer ones drop less and this one more: the objective's slope is 1 − Σ (price_i − p)/s_i
        over the dearer clients that T still forces to drop. It grows with p, and p grows with T.
        """
        speed = np.where(late.finish > start, late.speed, 0.0)
        speed_from, cost_from = _sum_from(speed), _sum_from(late.price * speed)
        turn = int(np.argmax(cost_from - late.price * speed_from < 1.0))
        dearer_speed = float(speed_from[turn])
        turning_price = (float(cost_from[turn]) - 1.0) / dearer_speed
        lowest, highest = int(late.index[turn - 1]) + 1 if turn else 0, int(late.index[turn])
        full = lowest + int(np.searchsorted(self.price[lowest:highest], turning_price, side="right"))
        if full == 0:
            return start
        # T at which the first `full` clients are full: D_max Σ U_i of them + Σ U_i l_i(T) of the rest is all to drop.
        kept_back = float((speed[turn:] * late.finish[turn:]).sum())
        kink = self.max_dropout * float(self.bits_before[full]) + kept_back - self.dropped_bits
        return min(max(kink / dearer_speed, start), end)


@dataclass(frozen=True)
class _Late:
    """The clients that some T in question forces to drop, in the same order; the others never have to."""

    index: NDArray[np.intp]
    price: Floats
    speed: Floats
    finish: Floats


def _sum_from(values: Floats) -> Floats:
    """Σ_{i≥j} values_i for every j."""
    sums: Floats = np.cumsum(values[::-1])[::-1]
    return sums


def _solve_with_highs(problem: _Problem) -> Floats:
    """Return the same programme in a general solver; the last variable is T."""
    count = len(problem.bits)
    seconds = problem.bits * problem.seconds_per_bit
    # Only the reference needs SciPy, which takes a while to import.
    from scipy import sparse
    from scipy.optimize import linprog

    finish = sparse.hstack([sparse.diags(-seconds), -np.ones((count, 1))]).tocsr()
    solution = linprog(
        np.append(problem.penalty * problem.contribution, 1.0),
        A_ub=finish,
        b_ub=-(problem.compute_seconds + seconds),
        A_eq=sparse.csr_matrix(np.append(problem.bits, 0.0)[None]),
        b_eq=[problem.dropped_bits],
        bounds=[(0.0, problem.max_dropout)] * count + [(None, None)],
        method="highs",
    )
    if solution.status != 0:
        raise RuntimeError(f"HiGHS found no solution: {solution.message}")
    rates: Floats = np.clip(solution.x[:-1], 0.0, problem.max_dropout)
    return rates
