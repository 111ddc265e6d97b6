"""What downloads need beside the plan: earlier moves of the reference, and digests of frozen values for both ends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from feddd.core.submodel import prefix
from feddd.core.units import Params, Units, units
from feddd.wire.down import Sending
from feddd.wire.download_format import MOVES_KEPT
from feddd.wire.stage import Update


def frozen_digests(model: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> list[str]:
    """Return for every sub-model what a client with the server's frozen parameters finds too."""
    digests = []
    for module in modules:
        table, own = units(module), module.state_dict()
        digests.append(frozen_digest({name: prefix(model[name], own[name].shape) for name in table.frozen}, table))
    return digests


def frozen_digest(params: Params, table: Units) -> str:
    """Return what two ends share exactly when the values of their frozen parameters agree; "" if there are none."""
    if not table.frozen:
        return ""
    digest = hashlib.sha256()
    for name in table.frozen:
        tensor = params[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def with_move(moves: Mapping[int, Update], sent: Sending) -> dict[int, Update]:
    """Return the latest moves of the reference by number, for those that will have missed them."""
    if sent.coded is None or sent.reference is None or not sent.moves:
        return dict(moves)
    number = sent.reference.number
    return {old: move for old, move in moves.items() if old > number - MOVES_KEPT} | {number: sent.coded}
