"""Everything a server needs to go on after it was killed, in one file that is replaced as a whole after every round."""

from __future__ import annotations

import dataclasses
import json
import math
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
from feddd.files import parse_json, write_atomically
from feddd.flower.registry import Member
from feddd.strategies.oort import Pacer
from feddd.strategies.protocol import ServerState

FORMAT = 1
_ARRAYS = ("losses", "oort_statistics", "samples", "label_coverage", "last_round")


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
            document = parse_json((file.metadata() or {})["feddd"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint that can be read: {error}") from error
    if document.get("format") != FORMAT:
        raise InputError(f"{path} has checkpoint format {document.get('format')!r:.80}, not {FORMAT}")
    model = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    if _table_of(model) != _table_of(like):
        raise InputError(f"{path} belongs to another model")
    try:
        found = _checkpoint(document, model, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is not a checkpoint that can be read: {type(error).__name__} {error}") from error
    return found


def _checkpoint(document: dict[str, Any], model: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Every part with its type and its length; what it says of clients is believed no more than their own words."""
    members = tuple(Member(**member) for member in document["members"])
    for member in members:
        _expect(type(member.name) is str and type(member.sub_model) is int and member.sub_model >= 0, "members")
    arrays = {name: tensors[f"state.{name}"].numpy() for name in _ARRAYS}
    for name, array in arrays.items():
        kind = np.int64 if name == "last_round" else np.float64
        _expect(array.dtype == kind and array.shape == (len(members),) and not np.isinf(array).any(), name)
    masks = tuple(None if mask is None else bytes.fromhex(mask) for mask in document["masks"])
    versions = tuple(document["versions"])
    _expect(len(masks) == len(versions) == len(members) and all(type(one) is str for one in versions), "versions")
    token, clock_seconds, number = (document[key] for key in ("token", "clock_seconds", "round"))
    _expect(type(token) is str and type(number) is int and number >= 0, "round")
    _expect(type(clock_seconds) is float and 0 <= clock_seconds < math.inf, "clock_seconds")
    memory = _remembered(document["memory"])
    return Checkpoint(
        token, clock_seconds, members, versions, ServerState(number, model, masks, memory=memory, **arrays)
    )


def _table_of(model: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in model.items()}


def _expect(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"its {what} make no sense")


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
    percentile, gained = document["pacer"]["percentile"], tuple(document["pacer"]["gained"])
    _expect(type(percentile) is float and 0 <= percentile <= 100, "pacer")
    _expect(all(type(one) in (int, float) and math.isfinite(one) for one in gained), "pacer")
    return Pacer(percentile, gained)
