"""Bits, links and cycles → seconds."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers = TypeVar("Numbers", float, NDArray[np.float64])


def transfer_seconds(bits: Numbers, bits_per_s: Numbers) -> Numbers:
    """t = bits / r, with the bits of the encoded payload (Eqs. 8 and 10)."""
    return bits / bits_per_s


def compute_seconds(cycles_per_sample: Numbers, samples: Numbers, cpu_hz: Numbers) -> Numbers:
    """t_cmp = c · b / f, b being the samples processed in a round: epochs × samples (Eq. 6)."""
    return cycles_per_sample * samples / cpu_hz


def shannon_bits_per_s(
    bandwidth_hz: NDArray[np.float64],
    power_w: NDArray[np.float64],
    gain: NDArray[np.float64],
    noise_w: NDArray[np.float64],
) -> NDArray[np.float64]:
    """r = B · log2(1 + p·h / N0) (Eqs. 7 and 9)."""
    return bandwidth_hz * np.log2(1.0 + power_w * gain / noise_w)


def round_seconds(
    download_seconds: NDArray[np.float64], compute_seconds: NDArray[np.float64], upload_seconds: NDArray[np.float64]
) -> float:
    """Return a synchronous round lasts as long as its slowest client (Eq. 11)."""
    return float((download_seconds + compute_seconds + upload_seconds).max())
