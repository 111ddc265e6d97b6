"""FedDD: everybody takes part, each at its own dropout rate (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.allocation import Allocation, allocate, check_budget
from feddd.core.selection import Score, Selector, check_selector
from feddd.strategies.adapting import (
    TARGETS,
    Target,
    after_trial,
    begin_trials,
    budget_for_bytes,
    budget_for_seconds,
    mean_loss,
    seconds_of,
    staying_out,
    trial_budget,
)
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
        self._check_adapting()
        if not (np.isfinite(self.penalty) and self.penalty >= 0):
            raise ValueError(f"penalty must be finite and at least 0, not {self.penalty}")
        if self.broadcast_every < 0:
            raise ValueError(f"broadcast_every must be at least 0 (0: never), not {self.broadcast_every}")
        turns = [turn for turn, _ in self.broadcast_later]
        if turns != sorted(set(turns)) or any(turn < 2 or every < 0 for turn, every in self.broadcast_later):
            raise ValueError(
                "broadcast_later takes (round, h) pairs with rounds that go up from 2 and h of at least 0 (0: never), "
                f"not {[list(pair) for pair in self.broadcast_later]}"
            )
        check_bits(self.value_bits, self.error_feedback)
        periods = [self.broadcast_every, *(every for _, every in self.broadcast_later)]
        if self.value_bits < 32 and 0 in periods:
            raise ValueError("value_bits below 32 needs full broadcasts, to which differences are taken: not h = 0")
        if self.download not in DOWNLOADS:
            raise ValueError(f"download must be one of {', '.join(DOWNLOADS)}, not {self.download!r}")
        check_selector(self.selector)
        if self.rates not in RATES:
            raise ValueError(f"rates must be one of {', '.join(RATES)}, not {self.rates!r}")

    def _check_adapting(self) -> None:
        if self.auto_target not in TARGETS:
            raise ValueError(f"auto_target must be one of {', '.join(TARGETS)}, not {self.auto_target!r}")
        if self.budget == "auto" and self.auto_target != "progress" and not 0 < self.auto_value < np.inf:
            raise ValueError(f"auto_target {self.auto_target!r} needs an auto_value above 0, not {self.auto_value}")
        if self.budget == "auto" and self.auto_target == "run_bytes" and self.auto_rounds < 1:
            raise ValueError("auto_target 'run_bytes' needs auto_rounds, the rounds that share the bytes")
        if self.budget == "auto" and self.rates == "uniform":
            raise ValueError('budget = "auto" goes with rates = "differential"')
        if self.broadcast_error is not None and not self.broadcast_error > 0:
            raise ValueError(f"broadcast_error must be above 0, not {self.broadcast_error}")
        if self.error_feedback == "all" and self.leave_out:
            raise ValueError("error_feedback 'all' does not go with leave_out: what a client missed is not known to it")
        if not 0 <= self.leave_out < 1 or self.max_absence < 1:
            raise ValueError("leave_out must lie between 0 and 1, and max_absence be at least 1")

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Round 1 is full both ways; later ones drop by the rates and download what each client sent last."""
        number, fleet = state.round + 1, fleet.in_bits(self.value_bits)
        unknown = set(self.always_send) - set(fleet.layer_bits)
        if unknown:
            known = ", ".join(fleet.layer_bits)
            raise ValueError(f"always_send: the model has no layer {sorted(unknown)[0]!r}; its layers are {known}")
        if set(self.always_send) == set(fleet.layer_bits):
            raise ValueError("always_send names every layer: nothing is left to drop")
        # A first upload of everything tells the server what models there are; where they are equal it knows.
        drops = state.round > 0 or (self.value_bits < 32 and not fleet.heterogeneous)
        rates = self.dropout_rates(state, fleet) if drops else np.zeros(len(fleet))
        everything, broadcast = self._gets_everything(state), self.broadcasts(state)
        tells_coverage = self._tells_coverage(state, fleet)
        tasks = tuple(
            Task(
                client,
                self._upload(float(rates[client])),
                download(None if everything[client] else state.masks[client], self.value_bits, broadcast=broadcast),
                coverage=tells_coverage,
            )
            for client in range(len(fleet))
            if rates[client] < 1.0
        )
        return Plan(number, tasks, broadcast)

    def _upload(self, dropout: float) -> Chain:
        """What a client sends: its best units, as they are or as rounded differences."""
        best = Select(dropout, self.selector, self.always_send)
        return chain(*value_stages(self.value_bits, self.error_feedback, best))

    def _tells_coverage(self, state: ServerState, fleet: Fleet) -> bool:
        """Whether CR(k) goes down in the coming round: once, to everybody, as soon as the models are known."""
        return state.round == 1 and fleet.heterogeneous and self.selector == "importance"

    def broadcasts(self, state: ServerState) -> bool:
        """Whether the coming round begins with the full model for everybody."""
        every = self.broadcast_period(state.round)
        drift = _remembered(state, "drift", 0.0) + np.nan_to_num(state.mask_error)
        if self.broadcast_error is not None and drift >= self.broadcast_error:
            return True
        return state.round == 0 or (every > 0 and state.round % every == 0)

    def _gets_everything(self, state: ServerState) -> NDArray[np.bool_]:
        """Who downloads the full model in the coming round: who failed in the last may have missed a broadcast."""
        failed = state.last_round < state.round
        failed[_left_out(state)] = False
        return failed | self.broadcasts(state)

    def broadcast_period(self, number: int) -> int:
        """h in a round: the last of `broadcast_later` that has begun."""
        later = [every for turn, every in self.broadcast_later if turn <= number]
        return later[-1] if later else self.broadcast_every

    def dropout_rates(self, state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
        """D_n for the coming round, from what the last ones reported."""
        contributed = contribution(state, fleet)
        share = 0.0 if self.broadcasts(state) or self._tells_coverage(state, fleet) else self.leave_out
        out = staying_out(state, fleet, contributed, share, self.max_absence)
        rates = np.ones(len(fleet))
        if self.rates == "uniform" and self.budget != "auto":
            rates[~out] = 1.0 - self._within(self.budget, fleet, out)
            return rates
        always_bits = sum((fleet.layer_bits[name] for name in self.always_send), start=np.zeros(len(fleet)))
        droppable_bits = fleet.droppable_bits - always_bits
        constant_seconds = fleet.compute_seconds + (fleet.fixed_bits + always_bits) * fleet.seconds_per_bit
        full_seconds = float((constant_seconds + droppable_bits * fleet.seconds_per_bit).max())
        seconds_per_bit = fleet.seconds_per_bit
        if self.download == "fixed":
            seconds_per_bit = 1.0 / fleet.uplink_bits_per_s
            coming_bits = download_shares(state, self._gets_everything(state)) * droppable_bits
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

        rates[~out] = at(self._chosen_budget(state, fleet, lambda budget: at(budget).round_seconds)).dropout
        return rates

    def _within(self, budget: float, fleet: Fleet, out: NDArray[np.bool_]) -> float:
        """The budget of those that take part, so that the fleet uploads as much as if nobody stayed out."""
        if not out.any():
            return budget
        share = float(fleet.droppable_bits.sum() / fleet.droppable_bits[~out].sum())
        return min(max(budget * share, 1.0 - self.max_dropout), 1.0)

    def _chosen_budget(self, state: ServerState, fleet: Fleet, seconds_at: Callable[[float], float]) -> float:
        """A for the coming round."""
        if self.budget != "auto":
            return self.budget
        least = 1.0 - self.max_dropout
        if self.auto_target == "round_seconds":
            return budget_for_seconds(seconds_at, self.auto_value, least)
        if self.auto_target == "progress":
            return trial_budget(state.memory if _is_trial(state.memory) else begin_trials(0.6), state.round + 1, least)
        allowed = self.auto_value
        if self.auto_target == "run_bytes":
            left = max(1, self.auto_rounds - state.round)
            allowed = max(0.0, allowed - _remembered(state, "spent", 0.0)) / left
        shares = download_shares(state, self._gets_everything(state))
        down = float((shares * fleet.droppable_bits + fleet.fixed_bits).sum()) / 8
        whole = float(fleet.droppable_bits.sum()) / 8
        return budget_for_bytes(allowed, down, float(fleet.fixed_bits.sum()) / 8, whole, least)

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model, the losses and the masks, and what the next choices need."""
        memory: dict[str, Any] = {}
        if self.budget == "auto" and self.auto_target == "progress":
            memory = dict(state.memory) if _is_trial(state.memory) else begin_trials(0.6)
            loss, least = mean_loss(uploads), 1.0 - self.max_dropout
            if not np.isnan(loss):
                memory = after_trial(memory, plan.round, loss, seconds_of(uploads, fleet), least)
        if self.budget == "auto" and self.auto_target == "run_bytes":
            sent = sum(upload.upload_bytes + upload.download_bytes for upload in uploads)
            memory["spent"] = _remembered(state, "spent", 0.0) + float(sent)
        if self.broadcast_error is not None:
            drift = _remembered(state, "drift", 0.0) + float(np.nan_to_num(state.mask_error))
            memory["drift"] = 0.0 if plan.broadcast else drift
        by_client: dict[str, NDArray[np.bool_]] = {}
        if self.leave_out:
            left_out = _left_out(state) | (state.last_round == state.round)
            # Nobody is left out of a broadcast: who was not asked was not there, and has missed it.
            left_out[[task.client for task in plan.tasks] if not plan.broadcast else slice(None)] = False
            by_client["left_out"] = left_out
        return digest(state, plan, uploads, model, memory or None, by_client)


def _is_trial(memory: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(memory, dict) and "gains" in memory


def _remembered(state: ServerState, key: str, default: float) -> float:
    return float(state.memory.get(key, default)) if isinstance(state.memory, dict) else default


def _left_out(state: ServerState) -> NDArray[np.bool_]:
    """Return which clients have only not been asked since they last answered."""
    nobody = np.zeros(len(state.masks), dtype=np.bool_)
    return state.client_memory.get("left_out", nobody).copy()


def contribution(state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
    """re_n = (m_n / m) · (Σ_c min(C·dis_n^c, 1)) · (U_n / U) · loss_n (Eq. 13); unknown facts count as the mean."""
    samples = known_or_mean(state.samples)
    size = fleet.droppable_bits / fleet.model_bits
    share: NDArray[np.float64] = samples / samples.sum()
    losses = known_or_mean(state.losses)
    if losses.min() < 0:
        raise ValueError(f"a client's loss is {losses.min():.4g}; FedDD weighs clients by losses, which are at least 0")
    return share * known_or_mean(state.label_coverage) * size * losses
