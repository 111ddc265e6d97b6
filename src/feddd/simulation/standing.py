"""Where a run stands between two rounds: all that is needed to go on, since generators have addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.payload import unpack_mask
from feddd.core.units import Units
from feddd.simulation.kept import KeptArrays
from feddd.strategies.protocol import ServerState
from feddd.strategies.saving import pack_state, unpack_state


@dataclass(frozen=True)
class Standing:
    """kept: client → the values of the units that it did not send, for those whose next rounds build on them."""

    state: ServerState
    clock_seconds: float
    kept: Mapping[int, NDArray[np.float32]]


def pack_standing(standing: Standing) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and a document that JSON can hold."""
    tensors, document = pack_state(standing.state)
    kept = list(standing.kept.values())
    tensors["kept"] = torch.from_numpy(np.concatenate(kept) if kept else np.empty(0, np.float32))
    sizes = [[client, len(values)] for client, values in standing.kept.items()]
    return tensors, document | {"clock_seconds": standing.clock_seconds, "kept": sizes}


def unpack_standing(tensors: Mapping[str, Tensor], document: Mapping[str, Any], like: Mapping[str, Tensor]) -> Standing:
    """The inverse, or an error of `feddd.strategies.saving.MALFORMED`."""
    clients, sizes = [client for client, _ in document["kept"]], [size for _, size in document["kept"]]
    values = torch.split(tensors["kept"], sizes)
    kept = {client: own.numpy() for client, own in zip(clients, values, strict=True)}
    return Standing(unpack_state(tensors, document, like), document["clock_seconds"], kept)


def kept_arrays(standing: Standing, tables: Sequence[Units]) -> dict[int, KeptArrays]:
    """What goes back to the workers; the mask is the one that the server remembers. tables: each client's layers."""
    nothing = np.empty(0, np.float32)
    arrays: dict[int, KeptArrays] = {}
    for client, packed in enumerate(standing.state.masks):
        if packed is None and client not in standing.kept:
            continue
        units_sent = tables[client].full_mask() if packed is None else unpack_mask(packed, tables[client])
        mask = {name: units.numpy() for name, units in units_sent.items()}
        # Who sent everything keeps nothing, but its next download may well be a mask.
        if client in standing.kept or all(units.all() for units in mask.values()):
            arrays[client] = mask, standing.kept.get(client, nothing)
    return arrays
