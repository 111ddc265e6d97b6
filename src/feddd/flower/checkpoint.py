"""Everything a server needs to go on after it was killed, in one file that is replaced as a whole after every round."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from feddd.core.units import Units
from feddd.errors import InputError
from feddd.files import parse_json, write_atomically
from feddd.flower.registry import Member
from feddd.strategies.clients import FACTS
from feddd.strategies.packing import MALFORMED, expect, pack_state, unpack_state
from feddd.strategies.protocol import ServerState
from feddd.wire.format import unpack_mask

FORMAT = 3


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
    tensors, state = pack_state(checkpoint.state)
    document = {
        "format": FORMAT,
        "token": checkpoint.token,
        "clock_seconds": checkpoint.clock_seconds,
        "members": [dataclasses.asdict(member) for member in checkpoint.members],
        "versions": list(checkpoint.versions),
        **state,
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
        raise InputError(
            f"{path} has checkpoint format {document.get('format')!r:.80}, and this version reads {FORMAT}: go on with "
            "the version of feddd that wrote it, or begin again with another file"
        )
    try:
        return _checkpoint(document, unpack_state(tensors, document, like))
    except MALFORMED as error:
        raise InputError(f"{path} is not a checkpoint that can be used: {type(error).__name__} {error}") from error


def check_members(found: Checkpoint, tables: Sequence[Units], path: Path) -> None:
    """Refuse a checkpoint whose clients have sub-models that there are not, or masks that do not fit them."""
    try:
        for member, mask in zip(found.members, found.state.masks, strict=True):
            if member.sub_model >= len(tables):
                raise ValueError(f"client {member.name!r} has sub-model {member.sub_model}")
            if mask is not None:
                unpack_mask(mask, tables[member.sub_model])
    except ValueError as error:
        raise InputError(f"{path} does not fit the models: {error}") from error


def _checkpoint(document: dict[str, Any], state: ServerState) -> Checkpoint:
    """Every part with its type and its length; what it says of clients is believed no more than their own words."""
    members = tuple(Member(**member) for member in document["members"])
    for member in members:
        expect(type(member.name) is str and type(member.sub_model) is int and member.sub_model >= 0, "members")
    reports = [state.clients[name] for name, kind in FACTS.items() if kind is np.float64]
    expect(not any(np.isinf(column).any() for column in reports), "reports")
    versions = tuple(document["versions"])
    expect(len(state.clients) == len(versions) == len(members) and all(type(v) is str for v in versions), "versions")
    token, clock_seconds = document["token"], document["clock_seconds"]
    expect(type(token) is str, "token")
    expect(type(clock_seconds) is float and 0 <= clock_seconds < math.inf, "clock_seconds")
    return Checkpoint(token, clock_seconds, members, versions, state)
