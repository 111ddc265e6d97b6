"""Top-k with error feedback: the greatest elements of update and residual go up (Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Plan, ServerState, Task, check_share, draw_clients
from feddd.wire.difference import Difference
from feddd.wire.difference import Feedback as ErrorFeedback
from feddd.wire.exchange import chain
from feddd.wire.select import TopK as Greatest


@dataclass(frozen=True)
class TopK(Memoryless):
    """share: k over all elements of the model; what is not sent is added to the client's next update"""

    share: float = 0.1
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_share("share", self.share)
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Return the full model down, the k greatest elements up."""
        clients = sorted(draw_clients(len(fleet), self.participation, rng))
        up = chain(Difference(), ErrorFeedback(), Greatest(self.share))
        return Plan(state.round + 1, tuple(Task(client, up) for client in clients))
