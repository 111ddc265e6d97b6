"""Oort: full models of the clients whose data promise most, with a penalty for slow ones.

Mode "published" follows the paper's rule (OSDI '21): clipped statistical utility, a bonus for not having been seen
lately, a straggler penalty with a pacer, and decaying exploration. Mode "budget" is the FedDD paper's wording: the
clients with the lowest utility are left out, and nothing is explored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.strategies.protocol import (
    Feedback,
    Fleet,
    Plan,
    ServerState,
    Upload,
    check_bits,
    check_share,
    digest,
    fill_budget,
    full_model_plan,
    known_or_mean,
)

MODES = ("published", "budget")
CLIP_PERCENTILE = 95.0
CUT_OFF = 0.95
EXPLORATION_START, EXPLORATION_DECAY, EXPLORATION_LEAST = 0.9, 0.98, 0.2
STALENESS = 0.1
PACER_WINDOW, PACER_START, PACER_STEP = 20, 30.0, 5.0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pacer:
    """The percentile of full-model times that is the preferred round time T, and the utility gained per round."""

    percentile: float = PACER_START
    gained: tuple[float, ...] = ()


@dataclass(frozen=True)
class Oort:
    """straggler_penalty: α, the power of T / t_n for clients slower than the preferred round time T

    value_bits: 32, or 8, 4 or 2 to send rounded differences
    error_feedback: "rounded" makes clients add what was rounded away to what they send later; "all" is the same here
    """

    budget: float = 0.6
    mode: Literal["published", "budget"] = "published"
    straggler_penalty: float = 2.0
    value_bits: int = 32
    error_feedback: Feedback = "none"

    def __post_init__(self) -> None:
        check_bits(self.value_bits, self.error_feedback)
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        check_share("budget", self.budget)
        if not (np.isfinite(self.straggler_penalty) and self.straggler_penalty >= 0):
            raise ValueError(f"straggler_penalty must be finite and at least 0, not {self.straggler_penalty}")

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Fill the parameter budget A Σ U_n: by utility, in published mode after a share for the untried."""
        fleet = fleet.in_bits(self.value_bits)
        allowance = self.budget * float(fleet.droppable_bits.sum())
        if self.mode == "budget":
            ranked = np.argsort(-self.plain_utility(state, fleet), kind="stable")
            chosen = fill_budget(ranked, fleet.droppable_bits, allowance)
        else:
            chosen = self._explore_and_exploit(state, fleet, rng, allowance)
        if not chosen:
            raise ValueError(f"budget {self.budget} is less than any client's model")
        return full_model_plan(state, chosen, self.value_bits, feedback=self.error_feedback)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the reports; let the pacer look back over its windows."""
        gain = sum(u.samples * u.oort_statistic for u in uploads if u.status == "ok")
        return digest(state, plan, uploads, model, memory=pace(_pacer(state), plan.round, gain))

    def plain_utility(self, state: ServerState, fleet: Fleet) -> Floats:
        """m_n · √(mean loss²) × straggler penalty; a client never tried counts as the mean of the known ones."""
        statistic = known_or_mean(state.samples) * known_or_mean(state.oort_statistics)
        return statistic * self._system_utility(state, fleet)

    def utility(self, state: ServerState, fleet: Fleet) -> Floats:
        """Return the published utility of every explored client (NaN for the others), before a round."""
        explored = ~np.isnan(state.oort_statistics)
        statistic = state.samples * state.oort_statistics
        scaled = np.full(len(fleet), np.nan)
        if explored.any():
            scaled[explored] = scale(clip(statistic[explored]))
        seen = np.maximum(state.last_round, 1)
        bonus: Floats = np.sqrt(STALENESS * np.log(state.round + 1) / seen)
        return (scaled + bonus) * self._system_utility(state, fleet)

    def _system_utility(self, state: ServerState, fleet: Fleet) -> Floats:
        """(T / t_n)^α for clients slower than T, 1 for the others."""
        seconds = fleet.full_seconds
        preferred = float(np.percentile(seconds, _pacer(state).percentile))
        return np.where(seconds > preferred, (preferred / seconds) ** self.straggler_penalty, 1.0)

    def _explore_and_exploit(
        self, state: ServerState, fleet: Fleet, rng: np.random.Generator, allowance: float
    ) -> list[int]:
        bits = fleet.droppable_bits
        utility = self.utility(state, fleet)
        explored = np.flatnonzero(~np.isnan(utility))
        # A client that never answered is as good as never tried; left out of both groups it would be blacklisted.
        untried = np.flatnonzero(np.isnan(utility))
        order = _draw(untried, 1.0 / fleet.full_seconds[untried], rng)
        fresh = fill_budget(order, bits, exploration(state.round + 1) * allowance)
        # Exploitation has its share and the places that the untried could not fill, and the other way round.
        left = allowance - float(bits[fresh].sum())
        exploited = exploit(explored, utility[explored], bits, left, rng)
        left -= float(bits[exploited].sum())
        more = fill_budget(order[~np.isin(order, fresh)], bits, left)
        return exploited + fresh + more


def clip(statistic: Floats) -> Floats:
    """Cut outliers at the 95th percentile."""
    return np.minimum(statistic, np.percentile(statistic, CLIP_PERCENTILE))


def scale(values: Floats) -> Floats:
    """To [0, 1]; all ones where the values do not differ."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)


def exploration(number: int) -> float:
    """ε of round t: 0.9, × 0.98 a round, not below 0.2."""
    return max(EXPLORATION_START * EXPLORATION_DECAY ** (number - 1), EXPLORATION_LEAST)


def exploit(
    clients: NDArray[np.int64], utility: Floats, bits: Floats, allowance: float, rng: np.random.Generator
) -> list[int]:
    """Sample in proportion to utility among the clients above 95 % of the cut-off utility.

    The cut-off is the utility of the last client that a ranking by utility alone would take. Where models differ in
    size, a gap into which nobody of the pool fits goes down the ranking.
    """
    ranked = clients[np.argsort(-utility, kind="stable")]
    by_rank = fill_budget(ranked, bits, allowance)
    if not by_rank:
        return []
    above = utility >= CUT_OFF * utility[np.isin(clients, by_rank)].min()
    drawn = _draw(clients[above], utility[above], rng)
    return fill_budget([*drawn, *ranked[len(drawn) :]], bits, allowance)


def pace(pacer: Pacer, number: int, gain: float) -> Pacer:
    """Every 20 rounds, if the last window gained less than the one before, prefer a longer round by 5 percentiles."""
    gained = (*pacer.gained, gain)[-2 * PACER_WINDOW :]
    percentile = pacer.percentile
    if number % PACER_WINDOW == 0 and len(gained) == 2 * PACER_WINDOW:
        before, last = sum(gained[:PACER_WINDOW]), sum(gained[PACER_WINDOW:])
        if last < before:
            percentile = min(percentile + PACER_STEP, 100.0)
    return Pacer(percentile, gained)


def _draw(clients: NDArray[np.int64], weights: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return all clients in a random order without replacement, heavier ones earlier (exponential race)."""
    with np.errstate(divide="ignore"):
        arrival = rng.exponential(size=len(clients)) / weights
    return clients[np.argsort(arrival, kind="stable")]


def _pacer(state: ServerState) -> Pacer:
    return state.memory if isinstance(state.memory, Pacer) else Pacer()
