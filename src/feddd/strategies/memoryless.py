"""What methods share that remember nothing of a round but its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from feddd.strategies.protocol import Fleet, Plan, ServerState, Upload, digest


class Memoryless:
    """A method whose plans follow from the server's state alone."""

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Remember the new model."""
        return digest(state, plan, uploads, model)
