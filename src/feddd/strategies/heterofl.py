"""HeteroFL: every client has a width of its own and trains the first units of every layer (Diao et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feddd.strategies.submodels import AssignedWidths, first_units


@dataclass(frozen=True)
class HeteroFL(AssignedWidths):
    """Cut the same sub-models in every round; its fields are those of `AssignedWidths`."""

    def units(self, count: int, share: float, number: int) -> NDArray[np.bool_]:
        """Return the first ⌈width · N_l⌉ units."""
        return first_units(count, share)
