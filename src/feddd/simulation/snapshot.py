"""A run between two rounds: all that is needed to go on, since generators have addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.simulation.client_state import StateArrays
from feddd.strategies.packing import expect, pack_state, unpack_state
from feddd.strategies.protocol import ServerState


@dataclass(frozen=True)
class Snapshot:
    """clients: what those keep whose next rounds build on it, by number."""

    state: ServerState
    clock_seconds: float
    clients: Mapping[int, StateArrays]


def pack_snapshot(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors, and a document that JSON can hold. Tensors of one name are laid one behind the other."""
    tensors, document = pack_state(snapshot.state)
    parts: dict[str, list[NDArray[Any]]] = {}
    kept: list[tuple[int, dict[str, list[int]]]] = []
    for client, state in snapshot.clients.items():
        kept.append((client, {name: list(array.shape) for name, array in state.items()}))
        for name, array in state.items():
            parts.setdefault(name, []).append(array.reshape(-1))
    # Put together by NumPy: what comes from Ray is read-only, which torch cannot express.
    tensors |= {f"kept.{name}": torch.from_numpy(np.concatenate(own)) for name, own in parts.items()}
    return tensors, document | {"clock_seconds": snapshot.clock_seconds, "kept": kept}


def unpack_snapshot(tensors: Mapping[str, Tensor], document: Mapping[str, Any], like: Mapping[str, Tensor]) -> Snapshot:
    """Undo `pack_snapshot`, or raise one of `feddd.strategies.packing.MALFORMED`."""
    starts: dict[str, int] = {}
    clients: dict[int, dict[str, Any]] = {}
    for client, shapes in document["kept"]:
        expect(type(client) is int and client not in clients, "clients")
        clients[client] = {}
        for name, shape in shapes.items():
            start, size = starts.get(name, 0), torch.Size(shape).numel()
            part = tensors[f"kept.{name}"][start : start + size]
            expect(len(part) == size, "what clients keep")
            clients[client][name] = part.reshape(shape).numpy()
            starts[name] = start + size
    return Snapshot(unpack_state(tensors, document, like), document["clock_seconds"], clients)
