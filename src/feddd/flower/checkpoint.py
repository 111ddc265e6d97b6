"""Everything a server needs to go on after it was killed, in one file that is replaced as a whole after every round."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from feddd.errors import InputError
from feddd.files import write_atomically
from feddd.flower.registry import Member
from feddd.strategies.oort import Pacer
from feddd.strategies.protocol import ServerState

FORMAT = 2
_ARRAYS = ("losses", "oort_statistics", "samples", "label_coverage", "kept_shares", "last_round")


@dataclass(frozen=True)
class Checkpoint:
    """token: names the run in the versions that clients keep    clock_seconds: wall seconds of the rounds so far

    versions: what each client holds as far as the server knows
    """

    token: str
    clock_seconds: float
    members: tuple[Member, ...]
    versions: tuple[str, ...]
    state: ServerState


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file; the old one stays until the new one is complete."""
    state = checkpoint.state
    tensors = {f"model.{name}": tensor.detach().contiguous().clone() for name, tensor in state.model.items()}
    tensors |= {f"state.{name}": torch.from_numpy(np.array(getattr(state, name))) for name in _ARRAYS}
    document = {
        "format": FORMAT,
        "token": checkpoint.token,
        "clock_seconds": checkpoint.clock_seconds,
        "members": [dataclasses.asdict(member) for member in checkpoint.members],
        "versions": list(checkpoint.versions),
        "round": state.round,
        "masks": [None if mask is None else mask.hex() for mask in state.masks],
        "memory": _memory(state.memory),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, {"feddd": json.dumps(document)}))


def load_checkpoint(path: Path, like: Mapping[str, Tensor]) -> Checkpoint:
    """Read it back; `like` is the model that it has to fit."""
    try:
        with safe_open(path, framework="pt") as file:
            document: dict[str, Any] = json.loads((file.metadata() or {})["feddd"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint that can be read: {error}") from error
    if document.get("format") != FORMAT:
        raise InputError(f"{path} has checkpoint format {document.get('format')}, not {FORMAT}")
    model = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    if {name: tensor.shape for name, tensor in model.items()} != {name: tensor.shape for name, tensor in like.items()}:
        raise InputError(f"{path} belongs to another model")
    arrays = {name: tensors[f"state.{name}"].numpy() for name in _ARRAYS}
    state = ServerState(
        round=document["round"],
        model=model,
        masks=tuple(None if mask is None else bytes.fromhex(mask) for mask in document["masks"]),
        memory=_remembered(document["memory"]),
        **arrays,
    )
    members = tuple(Member(**member) for member in document["members"])
    return Checkpoint(document["token"], document["clock_seconds"], members, tuple(document["versions"]), state)


def _memory(memory: object) -> dict[str, Any] | None:
    """What one method remembers besides; Oort's pacer is the only one so far."""
    if memory is None:
        return None
    if isinstance(memory, Pacer):
        return {"pacer": dataclasses.asdict(memory)}
    raise InputError(f"a checkpoint cannot hold the memory of this strategy ({type(memory).__name__})")


def _remembered(document: dict[str, Any] | None) -> object:
    if document is None:
        return None
    pacer = document["pacer"]
    return Pacer(pacer["percentile"], tuple(pacer["gained"]))
