"""Payloads of a stack of clients, really encoded and decoded: what `wire` does instead of only charging their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from feddd.core.payload import decode, decode_values, encode, encode_coded, unpack_mask
from feddd.core.quantise import Coded
from feddd.core.units import Mask, Params, Units


def download(stack: Params, model: Params, packed: Sequence[bytes], units: Units) -> None:
    """Replace the stack by what clients decode of the model, zero where they are sent nothing; packed: their masks."""
    held = {name: tensor.cpu() for name, tensor in model.items()}
    for place, mask in enumerate(packed):
        received, _ = decode(encode(held, unpack_mask(mask, units), units=units), held, units=units, finite=True)
        for name, tensors in stack.items():
            tensors[place].copy_(received[name])


def upload(stack: Params, masks: Mask, units: Units) -> dict[str, Tensor]:
    """What the server decodes, zero where nothing was sent."""
    arrived = []
    for place in range(len(next(iter(masks.values())))):
        own = {name: tensors[place].cpu() for name, tensors in stack.items()}
        data = encode(own, _own(masks, place), units=units)
        arrived.append(decode(data, own, units=units, finite=True)[0])
    return {name: torch.stack([values[name] for values in arrived]) for name in stack}


def upload_coded(coded: Coded, masks: Mask, units: Units, bits: int) -> dict[str, Tensor]:
    """The rounded differences that the server decodes, zero where nothing was sent."""
    arrived = []
    for place in range(len(next(iter(masks.values())))):
        own = Coded(_own(coded.codes, place), _own(coded.scales, place))
        mask, values = decode_values(encode_coded(own, _own(masks, place), units, bits), units, bits)
        dense = units.zeros_like(own.codes)
        units.put(dense, mask, values)
        arrived.append(dense)
    return {slot.name: torch.stack([dense[slot.name] for dense in arrived]) for slot in units.slots}


def _own(stack: Params, place: int) -> dict[str, Tensor]:
    return {name: tensors[place] for name, tensors in stack.items()}
