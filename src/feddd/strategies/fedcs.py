"""FedCS: full models of the clients that are quickest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import (
    Feedback,
    Fleet,
    Plan,
    ServerState,
    check_bits,
    check_share,
    fill_budget,
    full_model_plan,
)

MODES = ("budget", "deadline")


@dataclass(frozen=True)
class FedCS(Memoryless):
    """mode "budget": by transfer time, quickest first, while their models fit A Σ U_n (the FedDD paper's comparison).

    mode "deadline" (the original): as many clients as finish within `deadline_seconds`. The original's greedy orders
    clients because they share one channel; here everyone has a link of their own, so whoever is quick enough is in.
    value_bits: 32, or 8, 4 or 2 to send rounded differences
    error_feedback: "rounded" makes clients add what was rounded away to what they send later; "all" is the same here
    """

    budget: float = 0.6
    mode: Literal["budget", "deadline"] = "budget"
    deadline_seconds: float | None = None
    value_bits: int = 32
    error_feedback: Feedback = "none"

    def __post_init__(self) -> None:
        check_bits(self.value_bits, self.error_feedback)
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        check_share("budget", self.budget)
        if self.mode == "deadline" and not (self.deadline_seconds is not None and 0 < self.deadline_seconds < np.inf):
            raise ValueError(f'mode "deadline" needs a positive deadline_seconds, not {self.deadline_seconds}')
        if self.mode == "budget" and self.deadline_seconds is not None:
            raise ValueError('deadline_seconds belongs to mode "deadline"')

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Return the quickest clients, the same every round while the fleet stays as it is."""
        fleet = fleet.in_bits(self.value_bits)
        if self.deadline_seconds is not None:
            chosen = np.flatnonzero(fleet.full_seconds <= self.deadline_seconds).tolist()
            if not chosen:
                quickest = float(fleet.full_seconds.min())
                raise ValueError(
                    f"no client finishes within deadline_seconds = {self.deadline_seconds:g}; "
                    f"the quickest needs {quickest:.1f} s"
                )
            return full_model_plan(state, chosen, self.value_bits, feedback=self.error_feedback)
        order = np.argsort(fleet.transfer_seconds, kind="stable")
        chosen = fill_budget(order, fleet.droppable_bits, self.budget * float(fleet.droppable_bits.sum()))
        if not chosen:
            raise ValueError(f"budget {self.budget} is less than any client's model")
        return full_model_plan(state, chosen, self.value_bits, feedback=self.error_feedback)
