"""EDEN: full models down, differences in one to four bits a number up (Vargaftik et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Plan, ServerState, Task, check_share, draw_clients
from feddd.wire.difference import Difference
from feddd.wire.eden import Eden as Rotated
from feddd.wire.exchange import chain


@dataclass(frozen=True)
class Eden(Memoryless):
    """bits: of a number on its way up, 1 to 4    participation: the share of clients drawn at random each round"""

    bits: int = 1
    participation: float = 1.0

    def __post_init__(self) -> None:
        chain(Rotated(self.bits))
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Send the full model down, and ask for rotated and rounded differences."""
        up = chain(Difference(), Rotated(self.bits))
        clients = sorted(draw_clients(len(fleet), self.participation, rng))
        return Plan(state.round + 1, tuple(Task(client, up) for client in clients))
