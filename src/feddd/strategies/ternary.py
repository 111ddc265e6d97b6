"""Downloads as sparse differences to the reference, the model that all clients hold alike.

The server's own model runs ahead of the reference by what was not sent yet: that is the residual of the server's error
feedback. A client that missed some moves of the reference is sent them all, or the reference itself if that is less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from feddd.core.payload import most_bytes
from feddd.core.sparse import choose, dense, greatest_count, sparse_bytes
from feddd.core.units import Units
from feddd.strategies.protocol import Plan, Reference, ServerState, Task
from feddd.strategies.reference import Sending


@dataclass(frozen=True)
class SparseSending(Sending):
    """What goes down in a round of sparse differences; see `Sending`."""

    def _payload_bytes(self, task: Task, table: Units) -> int:
        if self.before is None or self.reference is None:
            raise ValueError("sparse differences need a reference")
        held = int(self.before.held[task.client])
        whole = most_bytes(table)
        return whole if held < 0 else min(whole, sum(self.reference.sizes[held:]))


def sparse_sending(state: ServerState, plan: Plan, table: Units) -> SparseSending:
    """What the server sends in a round of this plan: everything at first, then differences."""
    assert plan.sparse is not None
    if state.reference is None:
        first = Reference(state.model, 0, np.full(len(state.masks), -1))
        return SparseSending(plan.bits, state.model, first, first)
    reference = state.reference
    parts = [(state.model[slot.name] - reference.model[slot.name]).reshape(-1).float() for slot in table.slots]
    vector = torch.cat(parts).numpy()
    chosen = choose(vector, greatest_count(len(vector), plan.sparse.share), ternary=plan.sparse.ternary)
    moves = torch.split(torch.from_numpy(dense(chosen, len(vector))), [slot.elements for slot in table.slots])
    sent = dict(state.model) | {
        slot.name: reference.model[slot.name] + move.view(slot.shape)
        for slot, move in zip(table.slots, moves, strict=True)
    }
    sent |= {alias: sent[name] for alias, name in table.aliases}
    sizes = (*reference.sizes, sparse_bytes(chosen, len(vector)))
    after = Reference(sent, reference.number + 1, reference.held, sizes)
    return SparseSending(plan.bits, sent, reference, after)
