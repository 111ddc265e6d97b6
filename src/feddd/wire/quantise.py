"""A few bits a value: differences as small integers, one scale per unit, rounded at random so that they are unbiased.

With b bits a unit's numbers become integers from −L to L, L = 2^(b−1) − 1, times its scale: the greatest over L.
A number between two steps goes to the upper one with the probability that makes its mean right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.units import Params, Units

BITS = (8, 4, 2)
FLOAT_BITS = 32
_NOISE_STEPS = 2**16
_BLOCK = 2**18
"""Numbers that are worked on at once: they stay in a core's cache."""


@dataclass(frozen=True)
class Coded:
    """The numbers of a stack of models as integers and scales.

    codes: by tensor, whole numbers kept as floats; tensors without units are there as they are
    scales: by layer, [clients, units]
    """

    codes: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]


def greatest_code(bits: int) -> int:
    """L: 127, 7 or 1."""
    if bits not in BITS:
        raise ValueError(f"values are sent in 32, 8, 4 or 2 bits, not {bits}")
    return (1 << (bits - 1)) - 1


def quantise_stack(stack: Params, units: Units, bits: int, rngs: Sequence[np.random.Generator] | None) -> Coded:
    """Several models at once; each with the noise of its own generator, drawn for every number in wire order.

    Without generators numbers go to the nearest step.
    """
    clients = len(stack[units.slots[0].name])
    noise = draw_noise(rngs, clients, units)
    codes = {slot.name: stack[slot.name] for slot in units.fixed}
    scales = {}
    for layer in units.layers:
        numbers = [slot.stacked_rows(stack[slot.name]).flatten(0, 1) for slot in layer.slots]
        whole = [torch.empty(rows.shape) for rows in numbers]
        scale = torch.empty(clients * layer.units)
        step = units_at_once(numbers)
        for begin in range(0, len(scale), step):
            part = slice(begin, begin + step)
            drawn = [noise[slot.name][part] for slot in layer.slots]
            scale[part], rounded = round_units([rows[part] for rows in numbers], drawn, bits)
            for rows, own in zip(whole, rounded, strict=True):
                rows[part] = own
        scales[layer.name] = scale.view(clients, layer.units)
        for slot, rows in zip(layer.slots, whole, strict=True):
            codes[slot.name] = slot.tensors(rows.view(clients, layer.units, -1))
    return Coded(codes, scales)


def units_at_once(numbers: Sequence[Tensor]) -> int:
    """Return how many units of a layer fit a core's cache; numbers: by tensor, [units, numbers of a unit]."""
    return max(1, _BLOCK // sum(rows.shape[1] for rows in numbers))


def round_units(
    numbers: Sequence[Tensor], noise: Sequence[NDArray[np.uint16]], bits: int
) -> tuple[Tensor, list[Tensor]]:
    """Scales [units] and codes of some units of a layer.

    numbers, noise, codes: by tensor, [units, numbers of a unit]
    """
    most = float(greatest_code(bits))
    peaks = [rows.abs().amax(1) for rows in numbers]
    peak = torch.stack(peaks).amax(0) if len(peaks) > 1 else peaks[0]
    # What is too small for a scale of its own is nothing: one over it would not be a number.
    scale = torch.where(peak > most * torch.finfo(torch.float32).tiny, peak / most, 0.0).to(torch.float32)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0).unsqueeze(1)
    codes = []
    for rows, own_noise in zip(numbers, noise, strict=True):
        drawn = torch.from_numpy(own_noise.astype(np.float32)).add_(0.5).mul_(1 / _NOISE_STEPS)
        codes.append(drawn.addcmul_(rows.to(torch.float32), inverse).floor_().clamp_(-most, most))
    return scale, codes


def draw_noise(rngs: Sequence[np.random.Generator] | None, clients: int, units: Units) -> dict[str, NDArray[np.uint16]]:
    """By tensor, [clients · units, numbers of a unit]: whole numbers below 65,536, finer would not be seen.

    Each client's from its own generator, for every number in wire order; without generators the middle.
    """
    count = units.droppable_elements
    if rngs is None:
        noise = np.broadcast_to(np.uint16(_NOISE_STEPS // 2), (clients, count))
    else:
        raw = [rng.bit_generator.random_raw(-(-count // 4)) for rng in rngs]
        noise = np.stack([np.asarray(one, "<u8").view("<u2")[:count] for one in raw])
    drawn, start = {}, 0
    for layer in units.layers:
        for slot in layer.slots:
            drawn[slot.name] = noise[:, start : start + slot.elements].reshape(clients * layer.units, -1)
            start += slot.elements
    return drawn


def dequantise(coded: Coded, units: Units) -> dict[str, Tensor]:
    """Return the numbers that the codes stand for."""
    values = {slot.name: coded.codes[slot.name] for slot in units.fixed}
    for layer in units.layers:
        scale = coded.scales[layer.name].unsqueeze(2)
        for slot in layer.slots:
            values[slot.name] = slot.tensors(slot.stacked_rows(coded.codes[slot.name]) * scale)
    return values


def pack_codes(codes: NDArray[np.float32], bits: int) -> bytes:
    """Whole numbers as two's complement of so many bits, the first in the lowest bits of a byte."""
    small = codes.astype(np.int8).view(np.uint8)
    if bits == 8:
        return small.tobytes()
    each = 8 // bits
    padded = np.zeros(-(-len(small) // each) * each, np.uint8)
    padded[: len(small)] = small & (2**bits - 1)
    packed = padded[0::each].copy()
    for place in range(1, each):
        packed |= padded[place::each] << np.uint8(bits * place)
    return packed.tobytes()


def unpack_codes(data: bytes | memoryview, count: int, bits: int) -> NDArray[np.float32]:
    """Return the inverse of `pack_codes`, as float32; ValueError for a code or a padding bit that is never written."""
    packed = np.frombuffer(data, np.uint8)
    if bits == 8:
        whole = packed.astype(np.int8)
    else:
        each = 8 // bits
        spread = np.empty((len(packed), each), np.uint8)
        for place in range(each):
            spread[:, place] = packed << (8 - bits * (place + 1))
        whole = (spread.reshape(-1).view(np.int8) >> (8 - bits)).astype(np.int8, copy=False)
    if whole[count:].any():
        raise ValueError("a padding bit of the codes is set")
    whole = whole[:count]
    if len(whole) and int(whole.min()) < -greatest_code(bits):
        raise ValueError("a code is out of range")
    return whole.astype(np.float32)
