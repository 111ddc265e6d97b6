"""What a client tells about its labels: one number, not how many of each it has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def label_coverage(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ_c min(C · dis_n^c, 1): C for a client whose C classes are balanced, 1 for one with a single class.

    counts: [clients, classes]    dis_n^c: share of class c among client n's samples    result: [clients]
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    coverage: NDArray[np.float64] = np.minimum(counts.shape[1] * shares, 1.0).sum(axis=1)
    return coverage
