"""The data of all clients, held once and shared by all workers; pixels stay bytes until a batch needs them."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.simulation.training import Samples
from feddd.world.datasets import Dataset

_CHUNK = 4096


@dataclass(frozen=True)
class Layout:
    """Where the four arrays lie in a file: labels as int64, then images [samples, …] as bytes, for training and test.

    image_shape: (channels, height, width)    channels_last: whether a pixel's channels lie together
    scale, shift: from a pixel to what a network takes, per channel
    """

    train: int
    test: int
    image_shape: tuple[int, int, int]
    channels_last: bool
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape of an image as it lies in memory."""
        channels, height, width = self.image_shape
        return (height, width, channels) if self.channels_last else self.image_shape

    def fields(self) -> list[tuple[str, type[np.generic], tuple[int, ...]]]:
        """Name, type and shape of each array, labels first: they need the stricter alignment."""
        return [
            ("train_labels", np.int64, (self.train,)),
            ("test_labels", np.int64, (self.test,)),
            ("train_images", np.uint8, (self.train, *self.stored_shape)),
            ("test_images", np.uint8, (self.test, *self.stored_shape)),
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for _, kind, shape in self.fields())


@dataclass(frozen=True)
class SampleArrays:
    """Training samples in the order of their clients, and the test samples."""

    layout: Layout
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.layout.image_shape

    def tensors(self, device: str) -> tuple[Samples, Samples]:
        """Training and test samples for torch; on the CPU they are these arrays, not copies."""

        def shared(array: NDArray[Any]) -> Tensor:
            with warnings.catch_warnings():  # Ray's memory is read-only, which torch cannot express; nobody writes
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(array)

        def samples(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Samples:
            pixels = shared(images).to(device)
            pixels = pixels.permute(0, 3, 1, 2) if self.layout.channels_last else pixels
            factors = (self.layout.scale, self.layout.shift)
            # A single number goes faster over all pixels than one for each of one channel.
            scale, shift = (torch.tensor(f if len(f) > 1 else f[0], device=device) for f in factors)
            if len(self.layout.scale) > 1:
                scale, shift = scale[:, None, None], shift[:, None, None]
            return Samples(pixels, shared(labels).to(device), scale, shift)

        return samples(self.train_images, self.train_labels), samples(self.test_images, self.test_labels)


def from_buffer(buffer: Any, layout: Layout) -> SampleArrays:
    """The arrays that lie in a buffer: anything that NumPy can look into."""
    arrays, start = {}, 0
    for name, kind, shape in layout.fields():
        arrays[name] = np.frombuffer(buffer, kind, int(np.prod(shape)), start).reshape(shape)
        start += arrays[name].nbytes
    return SampleArrays(layout, **arrays)


def fill(arrays: SampleArrays, data: Dataset, parts: Sequence[NDArray[np.int64]]) -> None:
    """Write the clients' samples, one client after the other, and the test set."""
    order = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    arrays.train_labels[:] = data.train_labels[order]
    arrays.test_labels[:] = data.test_labels
    axes = (0, 2, 3, 1) if arrays.layout.channels_last else (0, 1, 2, 3)
    for start in range(0, len(order), _CHUNK):
        arrays.train_images[start : start + _CHUNK] = data.train_images[order[start : start + _CHUNK]].transpose(axes)
    arrays.test_images[:] = data.test_images.transpose(axes)


def memory_file(size: int) -> int:
    """A descriptor of a file without a name, in memory where the system has that; gone with its last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("feddd-samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
