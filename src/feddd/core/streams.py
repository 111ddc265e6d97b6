"""Randomness with an address: the same stream wherever and in whatever order it is drawn."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *address: str | int) -> np.random.Generator:
    """Return the generator at this address of an experiment's seed, e.g. ``stream(0, "batches", round, client)``."""
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in address)))
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.PCG64(entropy))
