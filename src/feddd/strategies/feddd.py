"""FedDD: everybody takes part, each at its own dropout rate (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.allocation import Allocation, allocate, check_budget
from feddd.core.selection import Score, Selector, ranking_of
from feddd.strategies.feddd_rules import Absences, Broadcasts, Budget, Coming, Target, make_budget, memory_of
from feddd.strategies.protocol import (
    Feedback,
    Fleet,
    Plan,
    ServerState,
    Task,
    Upload,
    check_bits,
    digest,
    download,
    download_shares,
    known_or_mean,
    value_stages,
)
from feddd.wire.exchange import Chain, chain
from feddd.wire.select import Select

RATES = ("differential", "uniform")
DOWNLOADS = ("paper", "fixed")


@dataclass(frozen=True)
class FedDD:
    """A rate rule × a selection rule × a broadcast schedule.

    selector: the name of a score, or a function, see `core.selection.Score`; in a TOML "package.module:function"
    budget: A_server    max_dropout: D_max    broadcast_every: h (0: never)    always_send: layers never dropped
    penalty: δ relative to the fleet's full-model round time; 0 looks at time only
    rates: "differential" solves the linear programme, "uniform" gives everybody 1 − A
    broadcast_later: (round, h) pairs: from that round on another h, e.g. large early and small late, as the paper says
    value_bits: 32, or 8, 4 or 2 to send rounded differences; then equal models drop from round 1 on
    error_feedback: "rounded" makes clients add what was rounded away to what they send later, "all" also what a
    broadcast replaced before it was sent
    download: "paper" lets the allocation believe that a download shrinks with the rate of its own round; "fixed" tells
    it the truth: the coming download was decided by the last upload, or is the full model

    budget = "auto" chooses A every round for a target: "round_seconds", "round_bytes" (both ways) or "run_bytes" (over
    `auto_rounds` rounds) of `auto_value`, or "progress", the greatest decrease of the loss per second
    broadcast_error: also broadcast when the mask errors since the last broadcast add up to this (in the simulator;
    a deployment cannot measure them and keeps to h)
    leave_out: the share of the clients, those that contribute least per second, that stays out of a round, if it does
    not begin with a broadcast; max_absence: for so many rounds in a row at most
    """

    budget: float | Literal["auto"] = 0.6
    max_dropout: float = 0.8
    penalty: float = 0.1
    broadcast_every: int = 5
    selector: Selector | Score = "importance"
    always_send: tuple[str, ...] = ()
    rates: Literal["differential", "uniform"] = "differential"
    broadcast_later: tuple[tuple[int, int], ...] = ()
    value_bits: int = 32
    error_feedback: Feedback = "none"
    download: Literal["paper", "fixed"] = "paper"
    auto_target: Target = "progress"
    auto_value: float = 0.0
    auto_rounds: int = 0
    broadcast_error: float | None = None
    leave_out: float = 0.0
    max_absence: int = 5

    def __post_init__(self) -> None:
        check_budget(1.0 if self.budget == "auto" else self.budget, self.max_dropout)
        # Whatever is wrong with the settings of a rule, building it says so.
        broadcasts = self.broadcasts
        _ = self.budget_rule, self.absences
        check_bits(self.value_bits, self.error_feedback)
        ranking_of(self.selector)
        if not (np.isfinite(self.penalty) and self.penalty >= 0):
            raise ValueError(f"penalty must be finite and at least 0, not {self.penalty}")
        if self.download not in DOWNLOADS:
            raise ValueError(f"download must be one of {', '.join(DOWNLOADS)}, not {self.download!r}")
        if self.rates not in RATES:
            raise ValueError(f"rates must be one of {', '.join(RATES)}, not {self.rates!r}")
        if self.budget == "auto" and self.rates == "uniform":
            raise ValueError('budget = "auto" goes with rates = "differential"')
        if self.error_feedback == "all" and self.leave_out:
            raise ValueError("error_feedback 'all' does not go with leave_out: what a client missed is not known to it")
        if self.value_bits < 32 and not broadcasts.always_come:
            raise ValueError("value_bits below 32 needs full broadcasts, to which differences are taken: not h = 0")

    @property
    def budget_rule(self) -> Budget:
        """Return how A is chosen."""
        return make_budget(self.budget, self.auto_target, self.auto_value, self.auto_rounds, 1.0 - self.max_dropout)

    @property
    def broadcasts(self) -> Broadcasts:
        """Return when everybody is sent the full model."""
        return Broadcasts(self.broadcast_every, self.broadcast_later, self.broadcast_error)

    @property
    def absences(self) -> Absences:
        """Return who stays out of a round."""
        return Absences(self.leave_out, self.max_absence)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Plan round 1 full both ways, later ones with rates, and with downloads of what each client sent last."""
        fleet = fleet.in_bits(self.value_bits)
        self._check_layers(fleet)
        # A first upload of everything tells the server what models there are; where they are equal it knows.
        drops = state.round > 0 or (self.value_bits < 32 and not fleet.heterogeneous)
        rates = self.dropout_rates(state, fleet) if drops else np.zeros(len(fleet))
        everything, broadcast = self._gets_everything(state), self.broadcasts.due(state)
        tells_coverage, masks = self._tells_coverage(state, fleet), state.masks
        tasks = tuple(
            Task(
                client,
                self._upload(float(rates[client])),
                download(None if everything[client] else masks[client], self.value_bits, broadcast=broadcast),
                coverage=tells_coverage,
            )
            for client in range(len(fleet))
            if rates[client] < 1.0
        )
        return Plan(state.round + 1, tasks, broadcast)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model, the losses and the masks, and what the next choices need."""
        memory = self.budget_rule.remember(memory_of(state), plan, uploads, fleet)
        memory |= self.broadcasts.remember(state, plan)
        return digest(state, plan, uploads, model, memory or None, self.absences.remember(state, plan))

    def dropout_rates(self, state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
        """Return D_n for the coming round, from what the last ones reported; 1 for those that stay out of it."""
        contributed, out = contribution(state, fleet), np.zeros(len(fleet), dtype=np.bool_)
        if not (self.broadcasts.due(state) or self._tells_coverage(state, fleet)):
            out = self.absences.choose(state, fleet, contributed)
        rates = np.ones(len(fleet))
        if self.rates == "uniform" and self.budget != "auto":
            rates[~out] = 1.0 - self._within(self.budget, fleet, out)
            return rates
        always_bits = sum((fleet.layer_bits[name] for name in self.always_send), start=np.zeros(len(fleet)))
        droppable_bits = fleet.droppable_bits - always_bits
        constant_seconds = fleet.compute_seconds + (fleet.fixed_bits + always_bits) * fleet.seconds_per_bit
        full_seconds = float((constant_seconds + droppable_bits * fleet.seconds_per_bit).max())
        seconds_per_bit, everything = fleet.seconds_per_bit, self._gets_everything(state)
        if self.download == "fixed":
            seconds_per_bit = 1.0 / fleet.uplink_bits_per_s
            coming_bits = download_shares(state, everything) * droppable_bits
            constant_seconds = constant_seconds + coming_bits / fleet.downlink_bits_per_s

        def at(budget: float) -> Allocation:
            return allocate(
                droppable_bits[~out],
                seconds_per_bit[~out],
                constant_seconds[~out],
                contributed[~out],
                budget=self._within(budget, fleet, out),
                max_dropout=self.max_dropout,
                penalty=self.penalty * full_seconds,
            )

        least = 1.0 - self.max_dropout
        coming = Coming(state, fleet, everything, least, lambda budget: at(budget).round_seconds)
        rates[~out] = at(self.budget_rule.choose(coming)).dropout
        return rates

    def _check_layers(self, fleet: Fleet) -> None:
        unknown = set(self.always_send) - set(fleet.layer_bits)
        if unknown:
            known = ", ".join(fleet.layer_bits)
            raise ValueError(f"always_send: the model has no layer {sorted(unknown)[0]!r}; its layers are {known}")
        if set(self.always_send) == set(fleet.layer_bits):
            raise ValueError("always_send names every layer: nothing is left to drop")

    def _upload(self, dropout: float) -> Chain:
        """Return what a client sends: its best units, as they are or as rounded differences."""
        best = Select(dropout, self.selector, self.always_send)
        return chain(*value_stages(self.value_bits, self.error_feedback, best))

    def _tells_coverage(self, state: ServerState, fleet: Fleet) -> bool:
        """Return whether CR(k) goes down: once, to everybody, as soon as the models are known."""
        return state.round == 1 and fleet.heterogeneous and ranking_of(self.selector).covered

    def _gets_everything(self, state: ServerState) -> NDArray[np.bool_]:
        """Return who downloads the full model: everybody, or those that failed, who may have missed a broadcast."""
        failed = (state.last_round < state.round) & ~self.absences.remembered(state)
        return failed | self.broadcasts.due(state)

    def _within(self, budget: float, fleet: Fleet, out: NDArray[np.bool_]) -> float:
        """Return the budget of those that take part, so that the fleet uploads as much as if nobody stayed out."""
        if not out.any():
            return budget
        share = float(fleet.droppable_bits.sum() / fleet.droppable_bits[~out].sum())
        return min(max(budget * share, 1.0 - self.max_dropout), 1.0)


def contribution(state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
    """re_n = (m_n / m) · (Σ_c min(C·dis_n^c, 1)) · (U_n / U) · loss_n (Eq. 13); unknown facts count as the mean."""
    samples = known_or_mean(state.samples)
    size = fleet.droppable_bits / fleet.model_bits
    share: NDArray[np.float64] = samples / samples.sum()
    losses = known_or_mean(state.losses)
    if losses.min() < 0:
        raise ValueError(f"a client's loss is {losses.min():.4g}; FedDD weighs clients by losses, which are at least 0")
    return share * known_or_mean(state.label_coverage) * size * losses
