"""EDEN: one to four bits a number behind a random rotation, unbiased (Vargaftik et al., 2022).

A rotated vector looks like draws of a normal distribution whatever it was before, so that the best quantiser of that
distribution suits it. The numbers of a client are cut into blocks of 4096. The last one is padded with zeros to a power
of two, as the Hadamard transform wants it. Of a block x of size d, z = H D x / ‖x‖ is rounded to the nearest centroid
Q(z), where D are random signs and H is the transform, without a factor. Rotated back and scaled,
x̂ = D H Q(z) · ‖x‖ / ⟨z, Q(z)⟩, which is the paper's scale ‖x‖² / ⟨Rx, Q⟩ for the rotation R = H D / √d.

The mean is proven right for a rotation drawn from all rotations; H D stands for one, as in the paper's experiments.
Where a few numbers of a block hold most of its norm, the mean is off by a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from feddd.core.units import Units
from feddd.wire.chosen import Ints
from feddd.wire.format import VALUE_BYTES, PayloadError
from feddd.wire.stage import COMPOSED, At, ClientState, Each, Reading, Stage, Update, fixed_values

Vector = NDArray[np.float32]

BLOCK = 2**12
SEED_BYTES = 8
_HALF = {
    1: (0.7978845608028654,),
    2: (0.4527800398860679, 1.5104176087114887),
    3: (0.24509416307340598, 0.7560052489539643, 1.3439092613750225, 2.151945669890335),
    4: (
        *(0.12839501671105813, 0.38804823445328507, 0.6567589957631145, 0.9423402689122875),
        *(1.2562309480263467, 1.6180460517130526, 2.069016730231837, 2.732588804065177),
    ),
}
CENTROIDS = {bits: np.array([*(-c for c in reversed(half)), *half], np.float32) for bits, half in _HALF.items()}
"""The Lloyd–Max quantiser of the standard normal distribution, ascending, by bits."""


@dataclass(frozen=True)
class Eden(Stage):
    """Write numbers in one to four bits after a random rotation, so that their mean over rotations is right.

    A payload holds the seed of its rotation, a scale for each block, the numbers that are always sent, and the codes.
    """

    bits: int = 1

    codes_values: ClassVar[bool] = True

    def check(self) -> None:
        """Refuse a number of bits that there is not."""
        if self.bits not in CENTROIDS:
            raise ValueError(f"EDEN writes numbers in 1, 2, 3 or 4 bits, not {self.bits}")

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Rotate and round the numbers that are sent, and rotate them back."""
        written, vectors = [], []
        for place, rng in enumerate(at.rngs("rotation")):
            vector = update.chosen.take(update.values, place, at.table).numpy()
            seed = int(rng.integers(2**63))
            scales, codes = compress(vector, seed, self.bits)
            written.append((seed, scales, codes))
            restored = restore(scales, codes, seed, len(vector), self.bits)
            vectors.append(torch.from_numpy(np.concatenate([restored, fixed_values(update, place, at.table)])))
        return Update(update.chosen.put(vectors, at.table), update.chosen, written), states

    def sizes(self, update: Update, table: Units) -> Ints:
        """Return the bytes of seed, scales, codes, and the numbers that are always sent, which stay as they are."""
        fixed = update.chosen.fixed(table)
        return np.array([self._bytes(int(count), fixed) for count in update.chosen.numbers(table)], np.int64)

    def planned(self, table: Units, numbers: int, units: int) -> tuple[int, int, int]:
        """Return the same, of what is asked for."""
        return numbers, units, self._bytes(numbers, len(table.fixed))

    def _bytes(self, numbers: int, fixed: int) -> int:
        blocks = block_sizes(numbers)
        return SEED_BYTES + VALUE_BYTES * (len(blocks) + fixed) + -(-self.bits * sum(blocks) // 8)

    def front(self, update: Update, place: int, table: Units) -> bytes:
        """Write the seed, the scales, and the numbers that are always sent."""
        seed, scales, _ = update.coded[place]
        floats = np.concatenate([scales, fixed_values(update, place, table)]).astype("<f4")
        return int(seed).to_bytes(SEED_BYTES, "little") + floats.tobytes()

    def back(self, update: Update, place: int, table: Units) -> bytes:
        """Write the codes."""
        return pack(update.coded[place][2], self.bits)

    def read_front(self, reading: Reading, table: Units) -> None:
        """Read the seed and the scales."""
        blocks, fixed = len(block_sizes(int(reading.chosen.numbers(table)[0]))), reading.chosen.fixed(table)
        reading.notes["seed"] = int.from_bytes(reading.take(SEED_BYTES), "little")
        floats = np.frombuffer(reading.take(VALUE_BYTES * (blocks + fixed)), "<f4").astype(np.float32)
        reading.notes["scales"], reading.notes["fixed"] = floats[:blocks], floats[blocks:]
        if not (np.isfinite(floats[:blocks]).all() and (floats[:blocks] >= 0).all()):
            raise PayloadError("a block's scale must be finite and at least 0")

    def read_back(self, reading: Reading, table: Units) -> None:
        """Read the codes, and rotate back."""
        count, notes = int(reading.chosen.numbers(table)[0]), reading.notes
        codes = unpack(reading, sum(block_sizes(count)), self.bits)
        restored = restore(notes["scales"], codes, notes["seed"], count, self.bits)
        reading.values = torch.from_numpy(np.concatenate([restored, notes["fixed"]]))

    def encoding(self, inner: int) -> int:
        """Return that of chains that have none of their own."""
        return COMPOSED


def compress(vector: Vector, seed: int, bits: int) -> tuple[Vector, NDArray[np.uint8]]:
    """Return the scale of every block, and the number of every coordinate's centroid."""
    sizes, signs = block_sizes(len(vector)), _signs(seed, len(vector))
    edges = (CENTROIDS[bits][1:] + CENTROIDS[bits][:-1]) / 2
    padded = np.zeros(sum(sizes), np.float32)
    padded[: len(vector)] = vector
    padded *= signs
    scales, codes = [], []
    for rows in _rows(padded, sizes):
        norms = np.sqrt((rows.astype(np.float64) ** 2).sum(1, keepdims=True))
        rotated = hadamard((rows / np.where(norms > 0, norms, 1.0)).astype(np.float32))
        own = np.searchsorted(edges, rotated, side="right").astype(np.uint8)
        along = (rotated.astype(np.float64) * CENTROIDS[bits][own]).sum(1)
        scales.append(np.where(norms[:, 0] > 0, norms[:, 0] / np.where(along > 0, along, 1.0), 0.0))
        codes.append(own.reshape(-1))
    return _joined(scales, np.float32), _joined(codes, np.uint8)


def restore(scales: Vector, codes: NDArray[np.uint8], seed: int, count: int, bits: int) -> Vector:
    """Return the numbers that scales and centroids stand for: sums and products only, so the same on any machine."""
    sizes, parts, first = block_sizes(count), [], 0
    for rows in _rows(CENTROIDS[bits][codes], sizes):
        with np.errstate(over="ignore"):  # what is not finite then is refused by whoever asks for finite values
            parts.append((hadamard(rows) * scales[first : first + len(rows), None]).reshape(-1))
        first += len(rows)
    whole = _joined(parts, np.float32) * _signs(seed, count)
    return whole[:count].astype(np.float32)


def hadamard(rows: Vector) -> Vector:
    """Multiply each row, of a power of two of numbers, by the Hadamard matrix of ones and minus ones.

    Every pass adds and subtracts neighbours and turns the bits of their places by one: in the end they are back.
    """
    for _ in range(rows.shape[1].bit_length() - 1):
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = np.concatenate([even + odd, even - odd], axis=1)
    return rows


def block_sizes(count: int) -> list[int]:
    """Return the sizes of the blocks of so many numbers: full ones, then the rest, padded to a power of two."""
    full, rest = divmod(count, BLOCK)
    return [BLOCK] * full + ([1 << (rest - 1).bit_length()] if rest else [])


def pack(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Return codes of a few bits one after the other, the lowest bit first, zero-padded to a byte."""
    planes = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(planes.reshape(-1), bitorder="little").tobytes()


def unpack(reading: Reading, count: int, bits: int) -> NDArray[np.uint8]:
    """Read what `pack` wrote; PayloadError for a padding bit that is set."""
    planes = np.unpackbits(np.frombuffer(reading.take(-(-bits * count // 8)), np.uint8), bitorder="little")
    if planes[bits * count :].any():
        raise PayloadError("a padding bit of the codes is set")
    return np.packbits(planes[: bits * count].reshape(count, bits), axis=1, bitorder="little").reshape(-1)


def _signs(seed: int, count: int) -> Vector:
    """Return a random sign for every coordinate of the blocks."""
    size = sum(block_sizes(count))
    raw = np.asarray(np.random.PCG64(seed).random_raw(-(-size // 64)), "<u8").view(np.uint8)
    return 1.0 - 2.0 * np.unpackbits(raw, bitorder="little")[:size].astype(np.float32)


def _rows(whole: Vector, sizes: Sequence[int]) -> list[Vector]:
    """Return the full blocks as rows, and the last one as a row of its own."""
    full = sum(size == BLOCK for size in sizes)
    parts = [whole[: full * BLOCK].reshape(full, BLOCK), whole[full * BLOCK :].reshape(1, -1)]
    return [part for part in parts if part.size]


def _joined(parts: Sequence[NDArray[Any]], kind: type) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind)
