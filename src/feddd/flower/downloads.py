"""What a server needs beside the plan to write downloads: earlier moves of the reference, digests of frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from feddd.core.submodel import prefix
from feddd.core.units import frozen_digest, units
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


def with_move(moves: Mapping[int, Update], sent: Sending) -> dict[int, Update]:
    """Return the latest moves of the reference by number, for those that will have missed them."""
    if sent.coded is None or sent.reference is None or not sent.moves:
        return dict(moves)
    number = sent.reference.number
    return {old: move for old, move in moves.items() if old > number - MOVES_KEPT} | {number: sent.coded}
