"""What the clients of a shard hold between rounds: in memory, or in memory-mapped files where that is too much."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.wire.stage import ClientState

StateArrays = Mapping[str, NDArray[np.generic]]
"""A client's state as arrays, which travel between processes."""

PLACES = 256
"""Clients in one memory-mapped file."""


class ClientStates:
    """Tensors by name, by client; a client that keeps nothing has none.

    folder: for the files, None to stay in memory    elements: of a model; no tensor is expected to be larger
    """

    def __init__(self, folder: Path | None, elements: int) -> None:
        self._states: dict[int, ClientState] = {}
        self._folder = folder
        self._elements = elements
        self._places: dict[tuple[int, str], Tensor] = {}
        self._segments: list[Tensor] = []

    def get(self, client: int) -> ClientState:
        """Return what the client holds."""
        return self._states.get(client, {})

    def put(self, client: int, state: ClientState) -> None:
        """Remember; numbers move into the client's places in the files if there are any."""
        if self._folder is not None:
            state = {name: self._stored(client, name, tensor) for name, tensor in state.items()}
        self._states[client] = state

    def clear(self) -> None:
        """Forget what every client holds."""
        self._states.clear()

    def snapshot(self) -> dict[int, StateArrays]:
        """Return everything, as arrays."""
        return {
            client: {name: tensor.numpy().copy() for name, tensor in state.items()}
            for client, state in self._states.items()
        }

    def restore(self, snapshot: Mapping[int, StateArrays]) -> None:
        """Go on from a snapshot."""
        self.clear()
        for client, state in snapshot.items():
            self.put(client, {name: torch.from_numpy(np.array(array)) for name, array in state.items()})

    def _stored(self, client: int, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32 or not 0 < tensor.numel() <= self._elements:
            return tensor
        place = self._place(client, name)[: tensor.numel()].view(tensor.shape)
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor)
        return place

    def _place(self, client: int, name: str) -> Tensor:
        """Return the tensor's place, of the greatest size; what was never written takes no room on the disk."""
        if (client, name) not in self._places:
            free = len(self._places) % PLACES
            if free == 0:
                # The file has no name: it is gone when the worker ends, however it ends.
                with tempfile.TemporaryFile(dir=self._folder, prefix="feddd-state-") as file:
                    file.truncate(4 * PLACES * self._elements)
                    shape = (PLACES, self._elements)
                    self._segments.append(torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape)))
            self._places[client, name] = self._segments[-1][free]
        return self._places[client, name]
