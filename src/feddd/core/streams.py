"""Randomness with an address: the same stream wherever and in whatever order it is drawn."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, *address: str | int) -> np.random.Generator:
    """The generator at this address of an experiment's seed, e.g. ``stream(0, "batches", round, client)``."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in address]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))
