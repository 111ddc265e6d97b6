"""The data of all clients as a network takes it, held once and shared by all workers."""

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
    """Where the four arrays lie in a file: images [samples, …] as float32, then labels as int64, for training and test.

    image_shape: (channels, height, width)    channels_last: whether a pixel's channels lie together
    """

    train: int
    test: int
    image_shape: tuple[int, int, int]
    channels_last: bool

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
            ("train_images", np.float32, (self.train, *self.stored_shape)),
            ("test_images", np.float32, (self.test, *self.stored_shape)),
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for _, kind, shape in self.fields())


@dataclass(frozen=True)
class SampleArrays:
    """Training samples in the order of their clients, and the test samples."""

    layout: Layout
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
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

        def images(array: NDArray[np.float32]) -> Tensor:
            tensor = shared(array).to(device)
            return tensor.permute(0, 3, 1, 2) if self.layout.channels_last else tensor

        return (
            Samples(images(self.train_images), shared(self.train_labels).to(device)),
            Samples(images(self.test_images), shared(self.test_labels).to(device)),
        )


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
    _fill_images(arrays.train_images, data, data.train_images, order, arrays.layout.channels_last)
    everything = np.arange(len(data.test_labels))
    _fill_images(arrays.test_images, data, data.test_images, everything, arrays.layout.channels_last)


def _fill_images(
    target: NDArray[np.float32], data: Dataset, images: NDArray[np.uint8], order: NDArray[np.int64], channels_last: bool
) -> None:
    for start in range(0, len(order), _CHUNK):
        inputs = data.inputs(images[order[start : start + _CHUNK]])
        target[start : start + _CHUNK] = inputs.transpose(0, 2, 3, 1) if channels_last else inputs


def memory_file(size: int) -> int:
    """A descriptor of a file without a name, in memory where the system has that; gone with its last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("feddd-samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
