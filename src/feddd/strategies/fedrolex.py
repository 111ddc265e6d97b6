"""FedRolex: a window of units that moves on by one unit in every round (Alam et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feddd.strategies.submodels import AssignedWidths, units_down


@dataclass(frozen=True)
class FedRolex(AssignedWidths):
    """Let sub-models move over the layers; its fields are those of `AssignedWidths`."""

    def units(self, count: int, share: float, number: int) -> NDArray[np.bool_]:
        """Return in round j ⌊width · N_l⌋ units from unit (j − 1) mod N_l on, around the end."""
        return window(count, share, number)


def window(count: int, share: float, first: int) -> NDArray[np.bool_]:
    """Return so many of a layer's units, from this one on, around the end."""
    inside: NDArray[np.bool_] = (np.arange(count) - first) % count < units_down(count, share)
    return inside
