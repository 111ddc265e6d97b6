"""STC: sparse ternary compression both ways, with error feedback at both ends (Sattler et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddd.strategies.memoryless import Memoryless
from feddd.strategies.protocol import Fleet, Plan, ServerState, Task, check_share, draw_clients
from feddd.wire.difference import Difference, Feedback
from feddd.wire.down import Moves
from feddd.wire.exchange import chain
from feddd.wire.quantised import Ternary
from feddd.wire.select import TopK


@dataclass(frozen=True)
class STC(Memoryless):
    """share, download_share: p, of the elements that go up and down, as signs and one mean magnitude"""

    share: float = 0.01
    download_share: float = 0.01
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_share("share", self.share)
        check_share("download_share", self.download_share)
        check_share("participation", self.participation)

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Return what the server's model has moved goes down; the clients' updates go up, both ternary."""
        if fleet.heterogeneous:
            raise ValueError("stc sends everybody the same difference: not to models that differ in width")
        clients = sorted(draw_clients(len(fleet), self.participation, rng))
        up = chain(Difference(), Feedback(), TopK(self.share), Ternary())
        down = Moves(coding=chain(TopK(self.download_share), Ternary()), broadcast=True)
        return Plan(state.round + 1, tuple(Task(client, up, down) for client in clients), broadcast=True)
