"""Places of single numbers on the wire: where the elements of greatest magnitude are, in a Golomb code.

They are coded as in sparse ternary compression (Sattler et al., 2019): a gap of d is (d − 1) div 2^b ones, a zero and
the b low bits of d − 1, with the b that suits a share of k / n. For k ≥ n / 2 this is a bitmap, for fewer it is
shorter than one, and shorter than a list of places.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from feddd.wire.format import PayloadError

_GOLDEN = (math.sqrt(5.0) + 1.0) / 2.0

Vector = NDArray[np.float32]


def greatest_count(elements: int, share: float) -> int:
    """k: a share of the elements, to the nearest, halves up, at least one."""
    return min(elements, max(1, math.floor(share * elements + 0.5)))


def greatest_places(vector: Vector, count: int) -> NDArray[np.int64]:
    """Return where the elements of greatest magnitude are, ascending; of equal ones the first."""
    size = np.abs(vector)
    least = np.partition(size, len(size) - count)[len(size) - count]
    taken = size > least
    taken[np.flatnonzero(size == least)[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken)


def place_bytes(places: NDArray[np.int64], elements: int) -> int:
    """`len(encode_places(…))` without encoding."""
    gaps, bits = np.diff(places, prepend=-1) - 1, golomb_bits(len(places), elements)
    return -(-int((gaps >> bits).sum() + len(places) * (1 + bits)) // 8)


def golomb_bits(count: int, elements: int) -> int:
    """b = 1 + ⌊log₂(ln(φ − 1) / ln(1 − p))⌋ with p = k / n, at least 0."""
    if count >= elements:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(_GOLDEN - 1.0) / math.log1p(-count / elements))))


def encode_places(places: NDArray[np.int64], elements: int) -> bytes:
    """Return the gaps between ascending places, Golomb-coded, zero-padded to a byte."""
    gaps, bits = np.diff(places, prepend=-1) - 1, golomb_bits(len(places), elements)
    quotients = gaps >> bits
    ends = np.cumsum(quotients + 1 + bits)
    stream = np.ones(int(ends[-1]), np.uint8)
    zeros = ends - bits - 1
    stream[zeros] = 0
    for low in range(bits):
        stream[zeros + 1 + low] = (gaps >> low) & 1
    return np.packbits(stream, bitorder="little").tobytes()


def decode_places(data: bytes | memoryview, count: int, elements: int) -> tuple[NDArray[np.int64], int]:
    """The places at the beginning of some bytes, and how many bytes they take; PayloadError if they are not there."""
    bits = golomb_bits(count, elements)
    stream = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    zeros = np.flatnonzero(stream == 0)
    places = np.empty(count, np.int64)
    start, last, weights = 0, -1, 1 << np.arange(bits)
    for number in range(count):
        at = int(np.searchsorted(zeros, start))
        if at == len(zeros) or int(zeros[at]) + bits >= len(stream):
            raise PayloadError("the places of a sparse payload end too early")
        end = int(zeros[at])
        low = int((stream[end + 1 : end + 1 + bits] * weights).sum())
        last += 1 + ((end - start) << bits) + low
        if last >= elements:
            raise PayloadError("a place of a sparse payload lies beyond the model")
        places[number], start = last, end + 1 + bits
    used = -(-start // 8)
    if stream[start : 8 * used].any():
        raise PayloadError("there is something behind the places of a sparse payload")
    return places, used
