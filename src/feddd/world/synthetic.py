"""Images made on the fly, in the shapes of the real data sets: for trying a set-up where nothing was downloaded.

A class is a smooth pattern; a sample is its class's pattern, shifted and dimmed a little, under noise. They are easy
to learn and say nothing about real images.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddd.core.streams import stream
from feddd.world.datasets import ImageDataset

SHAPES = {"synthetic-grey": (1, 28, 28), "synthetic-colour": (3, 32, 32)}
CLASSES, TRAIN, TEST = 10, 2000, 400
_COARSE = 4  # a pattern is so many random values a side, drawn apart


@functools.cache
def make(name: str) -> ImageDataset:
    """Return the data set of this name; always the same one."""
    shape = SHAPES[name]
    patterns = _patterns(shape)
    (train_images, train_labels), (test_images, test_labels) = (
        _samples(patterns, count, part) for count, part in ((TRAIN, "train"), (TEST, "test"))
    )
    pixels = train_images.astype(np.float64) / 255.0
    mean, deviation = (tuple(each.tolist()) for each in (pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))))
    facts: dict[str, Any] = {"name": name, "mean": mean, "deviation": deviation}
    return ImageDataset(train_images, train_labels, test_images, test_labels, classes=CLASSES, **facts)


def _patterns(shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """[classes, channels, height, width] in [0, 1]."""
    channels, height, width = shape
    coarse = stream(0, "synthetic", "patterns", *shape).random((CLASSES, channels, _COARSE, _COARSE))
    tile = np.ones((1, 1, -(-height // _COARSE), -(-width // _COARSE)))
    drawn: NDArray[np.float64] = np.kron(coarse, tile)[:, :, :height, :width].astype(np.float64)
    return drawn


def _samples(patterns: NDArray[np.float64], count: int, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = stream(0, "synthetic", part, *patterns.shape)
    labels = rng.permutation(np.arange(count) % CLASSES)
    shifts = rng.integers(-2, 3, (count, 2))
    light = rng.uniform(0.6, 1.0, count)
    images = np.empty((count, *patterns.shape[1:]), np.uint8)
    for place, label in enumerate(labels):
        moved = np.roll(patterns[label], shifts[place], (1, 2)) * light[place]
        noisy = moved + rng.normal(0.0, 0.2, moved.shape)
        images[place] = np.clip(255.0 * noisy, 0.0, 255.0)
    images.flags.writeable = labels.flags.writeable = False
    return images, labels.astype(np.int64)
