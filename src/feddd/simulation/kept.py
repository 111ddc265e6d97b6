"""What the clients of a shard hold between rounds: in memory, or in a memory-mapped file where that is too much."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.strategies.client import Kept

KeptArrays = tuple[Mapping[str, NDArray[np.bool_]], NDArray[np.float32]]
"""A client's mask and values as arrays, which travel between processes."""

PLACES = 256
"""Clients in one memory-mapped file."""


class KeptStore:
    """Kept values by client; a client right after a full download has none.

    folder: for the file, None to stay in memory    elements: the most that a client can keep
    """

    def __init__(self, folder: Path | None, elements: int) -> None:
        self._kept: dict[int, Kept] = {}
        self._folder = folder
        self._elements = elements
        self._places: dict[int, Tensor] = {}
        self._segments: list[Tensor] = []

    def __getitem__(self, client: int) -> Kept:
        return self._kept[client]

    def __contains__(self, client: int) -> bool:
        return client in self._kept

    def get(self, client: int) -> Kept | None:
        """What the client holds, None for nothing."""
        return self._kept.get(client)

    def put(self, client: int, kept: Kept) -> None:
        """Remember; the values move into the client's place in the file if there is one."""
        if self._folder is not None:
            values = self._place(client)[: len(kept.values)]
            values.copy_(kept.values)
            kept = replace(kept, values=values)
        self._kept[client] = kept

    def forget(self, client: int) -> None:
        """The client has nothing of its own any more."""
        self._kept.pop(client, None)

    def clear(self) -> None:
        """Nobody has."""
        self._kept.clear()

    def snapshot(self) -> dict[int, KeptArrays]:
        """Everything, as arrays."""
        return {
            client: ({name: mask.numpy().copy() for name, mask in kept.mask.items()}, kept.values.numpy().copy())
            for client, kept in self._kept.items()
        }

    def restore(self, snapshot: Mapping[int, KeptArrays]) -> None:
        """The inverse of `snapshot`."""
        self.clear()
        for client, (mask, values) in snapshot.items():
            own = {name: torch.from_numpy(np.array(units)) for name, units in mask.items()}
            self.put(client, Kept(own, torch.from_numpy(np.array(values))))

    def _place(self, client: int) -> Tensor:
        """The client's place, of the greatest size; what was never written takes no room on the disk."""
        if client not in self._places:
            free = len(self._places) % PLACES
            if free == 0:
                # The file has no name: it is gone when the worker ends, however it ends.
                with tempfile.TemporaryFile(dir=self._folder, prefix="feddd-kept-") as file:
                    file.truncate(4 * PLACES * self._elements)
                    shape = (PLACES, self._elements)
                    self._segments.append(torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape)))
            self._places[client] = self._segments[-1][free]
        return self._places[client]
