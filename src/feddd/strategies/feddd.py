"""FedDD: everybody takes part, each at its own dropout rate (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.allocation import allocate, check_budget
from feddd.core.selection import SELECTORS, Selector
from feddd.strategies.protocol import (
    Fleet,
    Plan,
    ServerState,
    Task,
    Upload,
    check_bits,
    digest,
    download_shares,
    known_or_mean,
)

RATES = ("differential", "uniform")
DOWNLOADS = ("paper", "fixed")


@dataclass(frozen=True)
class FedDD:
    """A rate rule × a selection rule × a broadcast schedule.

    budget: A_server    max_dropout: D_max    broadcast_every: h (0: never)    always_send: layers never dropped
    penalty: δ relative to the fleet's full-model round time; 0 looks at time only
    rates: "differential" solves the linear programme, "uniform" gives everybody 1 − A
    broadcast_later: (round, h) pairs: from that round on another h, e.g. large early and small late, as the paper says
    value_bits: 32, or 8, 4 or 2 to send rounded differences; then equal models drop from round 1 on
    download: "paper" lets the allocation believe that a download shrinks with the rate of its own round; "fixed" tells
    it the truth: the coming download was decided by the last upload, or is the full model
    """

    budget: float = 0.6
    max_dropout: float = 0.8
    penalty: float = 0.1
    broadcast_every: int = 5
    selector: Selector = "importance"
    always_send: tuple[str, ...] = ()
    rates: Literal["differential", "uniform"] = "differential"
    broadcast_later: tuple[tuple[int, int], ...] = ()
    value_bits: int = 32
    download: Literal["paper", "fixed"] = "paper"

    def __post_init__(self) -> None:
        check_budget(self.budget, self.max_dropout)
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
        check_bits(self.value_bits)
        periods = [self.broadcast_every, *(every for _, every in self.broadcast_later)]
        if self.value_bits < 32 and 0 in periods:
            raise ValueError("value_bits below 32 needs full broadcasts, to which differences are taken: not h = 0")
        if self.download not in DOWNLOADS:
            raise ValueError(f"download must be one of {', '.join(DOWNLOADS)}, not {self.download!r}")
        if self.selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, not {self.selector!r}")
        if self.rates not in RATES:
            raise ValueError(f"rates must be one of {', '.join(RATES)}, not {self.rates!r}")

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Round 1 is full both ways; later ones drop by the rates and download what each client sent last."""
        number, fleet = state.round + 1, fleet.in_bits(self.value_bits)
        unknown = set(self.always_send) - set(fleet.layer_bits)
        if unknown:
            known = ", ".join(fleet.layer_bits)
            raise ValueError(f"always_send: the model has no layer {sorted(unknown)[0]!r}; its layers are {known}")
        if set(self.always_send) == set(fleet.layer_bits):
            raise ValueError("always_send names every layer: nothing is left to drop")
        broadcast = self.broadcasts(state)
        # A first upload of everything tells the server what models there are; where they are equal it knows.
        drops = state.round > 0 or (self.value_bits < 32 and not fleet.heterogeneous)
        rates = self.dropout_rates(state, fleet) if drops else np.zeros(len(fleet))
        tells_coverage = number == 2 and fleet.heterogeneous and self.selector == "importance"
        tasks = tuple(
            Task(
                client=client,
                dropout=float(rates[client]),
                selector=self.selector,
                always_send=self.always_send,
                download=None if broadcast else state.masks[client],
                coverage=tells_coverage,
            )
            for client in range(len(fleet))
        )
        return Plan(number, tasks, self.value_bits, broadcast)

    def broadcasts(self, state: ServerState) -> bool:
        """Whether the coming round begins with the full model for everybody."""
        every = self.broadcast_period(state.round)
        return state.round == 0 or (every > 0 and state.round % every == 0)

    def broadcast_period(self, number: int) -> int:
        """h in a round: the last of `broadcast_later` that has begun."""
        later = [every for turn, every in self.broadcast_later if turn <= number]
        return later[-1] if later else self.broadcast_every

    def dropout_rates(self, state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
        """D_n for the coming round, from what the last ones reported."""
        if self.rates == "uniform":
            return np.full(len(fleet), 1.0 - self.budget)
        always_bits = sum((fleet.layer_bits[name] for name in self.always_send), start=np.zeros(len(fleet)))
        droppable_bits = fleet.droppable_bits - always_bits
        constant_seconds = fleet.compute_seconds + (fleet.fixed_bits + always_bits) * fleet.seconds_per_bit
        full_seconds = float((constant_seconds + droppable_bits * fleet.seconds_per_bit).max())
        seconds_per_bit = fleet.seconds_per_bit
        if self.download == "fixed":
            seconds_per_bit = 1.0 / fleet.uplink_bits_per_s
            coming_bits = download_shares(state, self.broadcasts(state)) * droppable_bits
            constant_seconds = constant_seconds + coming_bits / fleet.downlink_bits_per_s
        return allocate(
            droppable_bits,
            seconds_per_bit,
            constant_seconds,
            contribution(state, fleet),
            budget=self.budget,
            max_dropout=self.max_dropout,
            penalty=self.penalty * full_seconds,
        ).dropout

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model, the losses and the masks."""
        return digest(state, plan, uploads, model)


def contribution(state: ServerState, fleet: Fleet) -> NDArray[np.float64]:
    """re_n = (m_n / m) · (Σ_c min(C·dis_n^c, 1)) · (U_n / U) · loss_n (Eq. 13); unknown facts count as the mean."""
    samples = known_or_mean(state.samples)
    size = fleet.droppable_bits / fleet.model_bits
    share: NDArray[np.float64] = samples / samples.sum()
    return share * known_or_mean(state.label_coverage) * size * known_or_mean(state.losses)
