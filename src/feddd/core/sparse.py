"""Sparse vectors on the wire: the elements of greatest magnitude, their places in a Golomb code.

    header       as of every payload, value encoding 5 (float32) or 6 (ternary); no mask of units follows it
    4 bytes      k, the number of elements
    then         ternary: their mean magnitude μ, float32
    then         the gaps between their places, Golomb-coded, zero-padded to a byte
    then         float32 values; ternary: a bit per sign, zero-padded to a byte

Places are coded as in sparse ternary compression (Sattler et al., 2019): a gap of d is (d − 1) div 2^b ones, a zero and
the b low bits of d − 1, with the b that suits a share of k / n. For k ≥ n / 2 this is a bitmap, for fewer it is
shorter than one, and shorter than a list of places.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feddd.core.payload import HEADER_BYTES, PayloadError, payload_head
from feddd.core.units import Units

ENCODINGS = {False: 5, True: 6}
_GOLDEN = (math.sqrt(5.0) + 1.0) / 2.0
_COUNT = struct.Struct("<I")

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Chosen:
    """Some elements of a vector: their places, ascending, and their values; ternary ones are all μ or −μ."""

    places: NDArray[np.int64]
    values: Vector
    ternary: bool


def greatest_count(elements: int, share: float) -> int:
    """k: a share of the elements, to the nearest, halves up, at least one."""
    return min(elements, max(1, math.floor(share * elements + 0.5)))


def choose(vector: Vector, count: int, *, ternary: bool) -> Chosen:
    """The elements of greatest magnitude, of equal ones the first; ternary: their signs times their mean magnitude."""
    size = np.abs(vector)
    least = np.partition(size, len(size) - count)[len(size) - count]
    taken = size > least
    taken[np.flatnonzero(size == least)[: count - np.count_nonzero(taken)]] = True
    places = np.flatnonzero(taken)
    values = vector[places]
    if ternary:
        mean = np.float32(size[places].mean(dtype=np.float64))
        values = np.where(values < 0, -mean, mean)
    return Chosen(places, values, ternary)


def dense(chosen: Chosen, elements: int) -> Vector:
    """The vector that the other end makes of it: zero elsewhere."""
    vector = np.zeros(elements, np.float32)
    vector[chosen.places] = chosen.values
    return vector


def sparse_bytes(chosen: Chosen, elements: int) -> int:
    """`len(encode_sparse(…))` without encoding."""
    count = len(chosen.places)
    gaps = np.diff(chosen.places, prepend=-1) - 1
    bits = golomb_bits(count, elements)
    coded = -(-int((gaps >> bits).sum() + count * (1 + bits)) // 8)
    values = 4 + -(-count // 8) if chosen.ternary else 4 * count
    return HEADER_BYTES + _COUNT.size + coded + values


def encode_sparse(chosen: Chosen, elements: int, table: Units) -> bytes:
    """As bytes, for a vector of the model's elements."""
    count = len(chosen.places)
    start = payload_head(table, ENCODINGS[chosen.ternary]) + _COUNT.pack(count)
    places = _encode_places(chosen.places, golomb_bits(count, elements))
    if not chosen.ternary:
        return start + places + chosen.values.astype("<f4").tobytes()
    mean = np.abs(chosen.values[:1]).astype("<f4").tobytes()
    return start + mean + places + np.packbits(chosen.values < 0, bitorder="little").tobytes()


def decode_sparse(data: bytes, elements: int, table: Units, *, ternary: bool) -> Chosen:
    """The inverse; PayloadError for anything that `encode_sparse` does not write."""
    head = payload_head(table, ENCODINGS[ternary])
    body = len(head) + _COUNT.size + (4 if ternary else 0)
    if len(data) < body or data[: len(head)] != head:
        raise PayloadError("this is not a sparse payload of this model")
    (count,) = _COUNT.unpack_from(data, len(head))
    tail = -(-count // 8) if ternary else 4 * count
    if not 1 <= count <= elements or len(data) < body + tail:
        raise PayloadError(f"a sparse payload of {len(data)} bytes cannot hold {count} of {elements} elements")
    places = _decode_places(data[body : len(data) - tail], count, elements)
    if ternary:
        bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=len(data) - tail), bitorder="little")
        if bits[count:].any():
            raise PayloadError("a padding bit of the signs is set")
        mean = np.frombuffer(data, "<f4", count=1, offset=body - 4).astype(np.float32)[0]
        if not mean >= 0:
            raise PayloadError("a mean magnitude must be finite and at least 0")
        values = np.where(bits[:count] > 0, -mean, mean)
    else:
        values = np.frombuffer(data, "<f4", offset=len(data) - tail).astype(np.float32)
    if not np.isfinite(values).all():
        raise PayloadError("the payload holds a value that is not finite")
    return Chosen(places, values, ternary)


def golomb_bits(count: int, elements: int) -> int:
    """b = 1 + ⌊log₂(ln(φ − 1) / ln(1 − p))⌋ with p = k / n, at least 0."""
    if count >= elements:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(_GOLDEN - 1.0) / math.log1p(-count / elements))))


def _encode_places(places: NDArray[np.int64], bits: int) -> bytes:
    gaps = np.diff(places, prepend=-1) - 1
    quotients = gaps >> bits
    ends = np.cumsum(quotients + 1 + bits)
    stream = np.ones(int(ends[-1]), np.uint8)
    zeros = ends - bits - 1
    stream[zeros] = 0
    for low in range(bits):
        stream[zeros + 1 + low] = (gaps >> low) & 1
    return np.packbits(stream, bitorder="little").tobytes()


def _decode_places(data: bytes, count: int, elements: int) -> NDArray[np.int64]:
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
    if len(stream) - start >= 8 or stream[start:].any():
        raise PayloadError("there is something behind the places of a sparse payload")
    return places
