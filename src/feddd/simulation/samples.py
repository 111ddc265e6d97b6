"""The data of all clients, held once and shared by all workers; bytes stay bytes until a batch needs them."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.simulation.training import Samples
from feddd.world.dataset import Dataset, Shape
from feddd.world.objectives import CLASSIFICATION, Objective

_CHUNK = 4096


@dataclass(frozen=True)
class Kind:
    """What one sample of an array is: the type of its values, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a data set lie in a file: inputs by name and targets, for training and for testing.

    inputs: by name; the name of a single one is ""    channels_last: whether a pixel's channels lie together
    scale, shift: from bytes to what a network takes, per channel; None for what bytes always get
    """

    train: int
    test: int
    inputs: Mapping[str, Kind]
    targets: Kind
    channels_last: bool = False
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None

    @property
    def input_shape(self) -> Shape:
        """Return the shape of one sample's input, or of each by name."""
        if "" in self.inputs:
            return self.inputs[""].shape
        return {name: kind.shape for name, kind in self.inputs.items()}

    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, type and shape of each array as it lies in memory, the strictest alignment first."""
        found = []
        for part, count in (("train", self.train), ("test", self.test)):
            found.append((f"{part}_targets", self.targets.dtype, (count, *self.targets.shape)))
            for name, kind in self.inputs.items():
                channels, *rest = kind.shape if self.channels_last else (0, *kind.shape)
                shape = (*rest, channels) if self.channels_last else kind.shape
                found.append((_input(part, name), kind.dtype, (count, *shape)))
        return sorted(found, key=lambda one: -np.dtype(one[1]).itemsize)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of them."""
        return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for _, kind, shape in self.fields())


def _input(part: str, name: str) -> str:
    return f"{part}_inputs" + (f".{name}" if name else "")


def lay_out(data: Dataset, train: int, test: int, *, channels_last: bool = False) -> Layout:
    """Return where so many training and test samples of a data set lie.

    channels_last: put a pixel's channels together, if the samples are images
    """
    inputs = data.train_inputs if isinstance(data.train_inputs, dict) else {"": data.train_inputs}
    kinds = {name: Kind(array.dtype.str, tuple(array.shape[1:])) for name, array in inputs.items()}
    images = "" in kinds and len(kinds[""].shape) == 3
    scale, shift = (None, None) if data.scaling is None else (tuple(each.tolist()) for each in data.scaling)
    targets = Kind(data.train_targets.dtype.str, tuple(data.train_targets.shape[1:]))
    return Layout(train, test, kinds, targets, channels_last and images, scale, shift)


@dataclass(frozen=True)
class SampleArrays:
    """Training samples in the order of their clients, and the test samples; arrays by name, see `Layout.fields`."""

    layout: Layout
    arrays: Mapping[str, NDArray[Any]]

    def tensors(self, device: str, objective: Objective | None = None) -> tuple[Samples, Samples]:
        """Training and test samples for torch; on the CPU they are these arrays, not copies."""
        layout = self.layout

        def shared(name: str) -> Tensor:
            with warnings.catch_warnings():  # Ray's memory is read-only, which torch cannot express; nobody writes
                warnings.simplefilter("ignore", UserWarning)
                tensor = torch.from_numpy(self.arrays[name]).to(device)
            return tensor.permute(0, 3, 1, 2) if layout.channels_last and "_inputs" in name else tensor

        def samples(part: str) -> Samples:
            inputs = {name: shared(_input(part, name)) for name in layout.inputs}
            scale, shift = self._factors(device)
            only = inputs.get("", inputs)
            return Samples(only, shared(f"{part}_targets"), scale, shift, objective or CLASSIFICATION)

        return samples("train"), samples("test")

    def _factors(self, device: str) -> tuple[Tensor | None, Tensor | None]:
        layout = self.layout
        if layout.scale is None or layout.shift is None:
            return None, None
        # A single number goes faster over all pixels than one for each of one channel.
        factors = (layout.scale, layout.shift)
        scale, shift = (torch.tensor(f if len(f) > 1 else f[0], device=device) for f in factors)
        return (scale[:, None, None], shift[:, None, None]) if len(layout.scale) > 1 else (scale, shift)


def from_buffer(buffer: Any, layout: Layout) -> SampleArrays:
    """Return the arrays that lie in a buffer: anything that NumPy can look into."""
    arrays: dict[str, NDArray[Any]] = {}
    start = 0
    for name, kind, shape in layout.fields():
        arrays[name] = np.frombuffer(buffer, kind, int(np.prod(shape)), start).reshape(shape)
        start += arrays[name].nbytes
    return SampleArrays(layout, arrays)


def fill(arrays: SampleArrays, data: Dataset, parts: Sequence[NDArray[np.int64]]) -> None:
    """Write the clients' samples, one client after the other, and as many test samples as there is room for."""
    order = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    layout = arrays.layout
    everything = np.arange(layout.test)
    for name, source in data.arrays():
        target, chosen = arrays.arrays[name], order if name.startswith("train") else everything
        swapped = layout.channels_last and "_inputs" in name
        for start in range(0, len(chosen), _CHUNK):
            some = source[chosen[start : start + _CHUNK]]
            target[start : start + _CHUNK] = some.transpose(0, 2, 3, 1) if swapped else some


def make_samples(
    data: Dataset,
    part: NDArray[np.int64],
    objective: Objective | None = None,
    *,
    test: int = 0,
    channels_last: bool = False,
    device: str = "cpu",
) -> tuple[Samples, Samples]:
    """Return some training samples and the first test samples as tensors, in memory of their own."""
    layout = lay_out(data, len(part), test, channels_last=channels_last)
    arrays = from_buffer(bytearray(layout.nbytes), layout)
    fill(arrays, data, [part])
    return arrays.tensors(device, objective)


def memory_file(size: int) -> int:
    """Return a descriptor of a file without a name, in memory where the system has that; gone with its last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("feddd-samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
