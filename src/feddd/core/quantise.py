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

from feddd.core.units import Params, Slot, Units

BITS = (8, 4, 2)
FLOAT_BITS = 32
_NOISE_STEPS = 2**16


@dataclass(frozen=True)
class Coded:
    """Numbers as integers and scales, of one model or of a stack of them.

    codes: by tensor, whole numbers kept as floats; tensors without units are there as they are
    scales: by layer, [units]; of a stack, [clients, units]
    """

    codes: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]


def greatest_code(bits: int) -> int:
    """L: 127, 7 or 1."""
    if bits not in BITS:
        raise ValueError(f"values are sent in 32, 8, 4 or 2 bits, not {bits}")
    return (1 << (bits - 1)) - 1


def quantise(params: Params, units: Units, bits: int, rng: np.random.Generator) -> Coded:
    """One model's numbers in a few bits."""
    coded = quantise_stack({slot.name: params[slot.name][None] for slot in units.slots}, units, bits, [rng])
    return Coded(
        {name: codes[0] for name, codes in coded.codes.items()}, {name: one[0] for name, one in coded.scales.items()}
    )


def quantise_stack(stack: Params, units: Units, bits: int, rngs: Sequence[np.random.Generator]) -> Coded:
    """Several models at once; each with the noise of its own generator, drawn for every number in wire order."""
    most = float(greatest_code(bits))
    drawn = [_noise(rng, units.droppable_elements) for rng in rngs]
    noise = torch.stack(drawn) if len(drawn) > 1 else drawn[0][None]
    codes: dict[str, Tensor] = {slot.name: stack[slot.name] for slot in units.fixed}
    scales: dict[str, Tensor] = {}
    start = 0
    for layer in units.layers:
        rows = [slot.stacked_rows(stack[slot.name]) for slot in layer.slots]
        peaks = [one.abs().amax(2) for one in rows]
        peak = torch.stack(peaks).amax(0) if len(peaks) > 1 else peaks[0]
        # What is too small for a scale of its own is nothing: one over it would not be a number.
        scale = torch.where(peak > most * torch.finfo(torch.float32).tiny, peak / most, 0.0).to(torch.float32)
        scales[layer.name] = scale
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0).unsqueeze(2)
        for slot, numbers in zip(layer.slots, rows, strict=True):
            part = noise[:, start : start + slot.elements].view(numbers.shape)
            start += slot.elements
            whole = torch.addcmul(part, numbers.to(torch.float32), inverse).floor_().clamp_(-most, most)
            codes[slot.name] = _as_tensors(slot, whole)
    return Coded(codes, scales)


def dequantise(coded: Coded, units: Units) -> dict[str, Tensor]:
    """The numbers that the codes stand for; of a stack, a stack."""
    values = {slot.name: coded.codes[slot.name] for slot in units.fixed}
    for layer in units.layers:
        scale = coded.scales[layer.name]
        alone = scale.dim() == 1
        scale = (scale[None] if alone else scale).unsqueeze(2)
        for slot in layer.slots:
            codes = coded.codes[slot.name]
            rows = slot.stacked_rows(codes[None] if alone else codes)
            restored = _as_tensors(slot, rows * scale)
            values[slot.name] = restored[0] if alone else restored
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
    """The inverse of `pack_codes`, as float32; ValueError for a code or a padding bit that is never written."""
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


def _noise(rng: np.random.Generator, count: int) -> Tensor:
    """Uniform in [0, 1), in 65,536 steps: finer would not be seen."""
    raw = np.frombuffer(rng.bytes(2 * count), "<u2")
    noise = raw.astype(np.float32)
    noise += 0.5
    noise /= _NOISE_STEPS
    return torch.from_numpy(noise)


def _as_tensors(slot: Slot, rows: Tensor) -> Tensor:
    """[clients, units, numbers of a unit] in the tensor's own shape."""
    if slot.plain:
        return rows.view(len(rows), *slot.shape)
    shaped = torch.empty(len(rows), *slot.shape)
    for one, own in zip(shaped, rows, strict=True):
        view = slot.rows(one)
        view.copy_(own.reshape(view.shape))
    return shaped
