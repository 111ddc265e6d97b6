"""The wire format, the same both ways: a header, a bit per unit, then the kept units' values.

    bytes 0–3    magic b"FdDD"
    byte  4      version, 1
    byte  5      value encoding: 0 = float32; 1, 2, 3 = 8, 4, 2 bits a value; 4 = blocks (`wire.blocks`);
                 5, 6 = sparse, sparse and ternary (`wire.sparse`); 7 = another chain of stages (`wire.exchange`)
    bytes 6–7    zero; of another chain sixteen bits that tell it from others
    bytes 8–15   digest of the layer table
    then         one bit per unit, layer by layer, least significant bit first, zero-padded to four bytes
    then         float32 values, little-endian, contiguous per tensor, in the order of the layer table;
                 in a few bits instead: a float32 scale per kept unit, the float32 values without a unit, then the
                 whole numbers by which the scales are to be multiplied, packed, zero-padded to a byte

Decoding is driven by the receiver's own layer table; nothing a sender writes decides how much is allocated.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.units import Mask, Params, Units, units_for
from feddd.wire.quantise import FLOAT_BITS, Coded, pack_codes, quantise, unpack_codes

MAGIC = b"FdDD"
VERSION = 1
ENCODINGS = {FLOAT_BITS: 0, 8: 1, 4: 2, 2: 3}
KNOWN_ENCODINGS = range(8)
_WITHOUT_MASK = (5, 6, 7)
_HEADER = struct.Struct("<4sBBH8s")
HEADER_BYTES = _HEADER.size
VALUE_BYTES = 4


class PayloadError(ValueError):
    """The bytes are not a payload for this model."""


def encode(
    params: Params,
    mask: Mapping[str, Tensor],
    *,
    units: Units | None = None,
    bits: int = FLOAT_BITS,
    rng: np.random.Generator | None = None,
) -> bytes:
    """The kept units of `params` as bytes; integer tensors are not sent.

    bits: 32 for the values as they are; 8, 4 or 2 to round them at random, with `rng`, to so many bits
    ValueError for a finite number that float32 cannot hold; what is not finite travels as it is.
    """
    table = units_for(params, units)
    table.check_mask(mask)
    if bits != FLOAT_BITS:
        if rng is None:
            raise ValueError("values in a few bits are rounded at random: encode needs rng")
        return encode_coded(quantise(params, table, bits, rng), mask, table, bits)
    # The values are gathered right into the bytes that are returned: a copy would cost more than the gathering.
    buffer = io.BytesIO()
    buffer.write(_head(table, mask, FLOAT_BITS))
    start, size = buffer.tell(), _size(table, mask)
    if size > start:
        buffer.seek(size - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as room:
            _gather(np.frombuffer(room, np.float32, offset=start), table, params, mask)
    return buffer.getvalue()


def encode_coded(coded: Coded, mask: Mapping[str, Tensor], table: Units, bits: int) -> bytes:
    """The kept units of what `quantise` made."""
    scales = [coded.scales[layer.name][mask[layer.name]] for layer in table.layers]
    fixed = [coded.codes[slot.name].reshape(1) for slot in table.fixed]
    floats = torch.cat([*scales, *fixed]).to(torch.float32).numpy().astype("<f4") if table.slots else b""
    codes = table.take(coded.codes, mask, fixed=False).numpy()
    return _head(table, mask, bits) + bytes(floats) + pack_codes(codes, bits)


def _head(table: Units, mask: Mapping[str, Tensor], bits: int) -> bytes:
    return payload_head(table, ENCODINGS[bits]) + pack_mask(mask, table)


def payload_head(table: Units, encoding: int) -> bytes:
    """The header of a payload of this model."""
    return _HEADER.pack(MAGIC, VERSION, encoding, 0, table.digest)


def composed_head(table: Units, encoding: int, tag: int) -> bytes:
    """The header of a payload whose stages only its receiver knows; tag: sixteen bits that tell chains apart."""
    return _HEADER.pack(MAGIC, VERSION, encoding, tag, table.digest)


def check_head(data: bytes | memoryview, wanted: bytes, table: Units) -> None:
    """Refuse bytes that do not begin with this header; wanted: a header of this model."""
    if len(data) < _HEADER.size + _mask_bytes(table) and wanted[5] not in _WITHOUT_MASK:
        raise PayloadError(f"{len(data)} bytes are too few for a header and {table.total_units} mask bits")
    if len(data) < _HEADER.size:
        raise PayloadError(f"{len(data)} bytes are too few for a header")
    magic, version, encoding, tag, digest = _HEADER.unpack_from(data)
    _, _, wanted_encoding, wanted_tag, wanted_digest = _HEADER.unpack_from(wanted)
    if magic != MAGIC:
        raise PayloadError("this is not a payload: its magic number is wrong")
    if version != VERSION or encoding not in KNOWN_ENCODINGS or (tag and encoding != max(KNOWN_ENCODINGS)):
        raise PayloadError(f"payload version {version}, value encoding {encoding} is not known here")
    if (encoding, tag) != (wanted_encoding, wanted_tag):
        raise PayloadError(f"the payload has value encoding {encoding}, and {wanted_encoding} is expected")
    if digest != wanted_digest:
        raise PayloadError("the payload belongs to a model with another layer table")


def read_head(data: bytes | memoryview, table: Units, encoding: int) -> tuple[Mask, memoryview]:
    """The mask of a payload in this encoding, and what follows it."""
    start = _HEADER.size + _mask_bytes(table)
    if len(data) < start or data[: _HEADER.size] != payload_head(table, encoding):
        raise PayloadError(f"this is not a payload of this model in value encoding {encoding}")
    return unpack_mask(bytes(data[_HEADER.size : start]), table), memoryview(data)[start:]


def _gather(target: NDArray[np.float32], table: Units, params: Params, mask: Mapping[str, Tensor]) -> None:
    table.take(params, mask, out=torch.from_numpy(target))
    wide = [slot.name for slot in table.slots if params[slot.name].dtype == torch.float64]
    if wide and not np.isfinite(target).all():
        _refuse_overflow(target, table, params, mask)
    if sys.byteorder == "big":
        target.byteswap(inplace=True)


def _refuse_overflow(target: NDArray[np.float32], table: Units, params: Params, mask: Mapping[str, Tensor]) -> None:
    exact = torch.empty(len(target), dtype=torch.float64)
    table.take({slot.name: params[slot.name].detach().double() for slot in table.slots}, mask, out=exact)
    too_large = exact[exact.isfinite() & torch.from_numpy(target).isinf()]
    if len(too_large):
        raise ValueError(f"the parameters hold {too_large[0].item():g}, which is more than float32 can carry")


def decode(
    data: bytes | memoryview,
    like: Params,
    *,
    units: Units | None = None,
    finite: bool = False,
    bits: int = FLOAT_BITS,
) -> tuple[dict[str, Tensor], Mask]:
    """What `encode` was given: dense values, zero where the mask is false, and the mask.

    like: the receiver's own parameters (names, shapes, dtypes)    finite: also refuse values that are not finite
    bits: as the sender was told; a payload in another encoding is refused
    """
    table = units_for(like, units)
    mask, values = decode_values(data, table, bits)
    if finite and not torch.isfinite(values).all():
        raise PayloadError("the payload holds a value that is not finite")
    dense = table.zeros_like(like)
    table.put(dense, mask, values)
    narrow = [dense[slot.name] for slot in table.slots if dense[slot.name].element_size() < VALUE_BYTES]
    if finite and not all(bool(tensor.isfinite().all()) for tensor in narrow):
        raise PayloadError("the payload holds a value that is not finite in the receiver's precision")
    return dense, mask


def decode_values(data: bytes | memoryview, table: Units, bits: int = FLOAT_BITS) -> tuple[Mask, Tensor]:
    """The mask and the vector of kept values, checked against the layer table before anything large is made."""
    mask_bytes = _mask_bytes(table)
    check_head(data, payload_head(table, ENCODINGS[bits]), table)
    mask = unpack_mask(bytes(data[_HEADER.size : _HEADER.size + mask_bytes]), table)
    expected = _size(table, mask, bits)
    if len(data) != expected:
        raise PayloadError(f"the payload has {len(data)} bytes, its mask announces {expected}")
    body = memoryview(data)[_HEADER.size + mask_bytes :]
    if bits == FLOAT_BITS:
        return mask, torch.from_numpy(np.frombuffer(body, dtype="<f4").astype(np.float32))
    return mask, _scaled(body, table, mask, bits)


def _scaled(body: memoryview, table: Units, mask: Mask, bits: int) -> Tensor:
    """The vector of values behind scales and codes."""
    kept_units = sum(int(kept.sum()) for kept in mask.values())
    floats = np.frombuffer(body, "<f4", count=kept_units + len(table.fixed)).astype(np.float32)
    scales, fixed = floats[:kept_units], floats[kept_units:]
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise PayloadError("a unit's scale must be finite and at least 0")
    count = table.kept_elements(mask) - len(table.fixed)
    try:
        values = unpack_codes(body[4 * len(floats) :], count, bits)
    except ValueError as error:
        raise PayloadError(str(error)) from error
    start = first = 0
    for layer in table.layers:
        units = int(mask[layer.name].sum())
        own = scales[first : first + units, None]
        first += units
        for slot in layer.slots:
            each = slot.elements // layer.units
            with np.errstate(over="ignore"):  # what is not finite then is refused by whoever asks for finite values
                values[start : start + each * units].reshape(units, each)[...] *= own
            start += each * units
    return torch.from_numpy(np.concatenate([values, fixed]))


def payload_size(
    mask: Mapping[str, Tensor], like: Params, *, units: Units | None = None, bits: int = FLOAT_BITS
) -> int:
    """``len(encode(like, mask))`` without encoding."""
    table = units_for(like, units)
    table.check_mask(mask)
    return _size(table, mask, bits)


def fixed_bytes(table: Units) -> int:
    """What every payload of this model carries besides droppable values: header, mask and the tensors always sent."""
    return _HEADER.size + _mask_bytes(table) + VALUE_BYTES * len(table.fixed)


def droppable_bytes(table: Units) -> int:
    """The values that a mask can leave out: U_n in bytes."""
    return VALUE_BYTES * table.droppable_elements


def most_bytes(table: Units, bits: int = FLOAT_BITS) -> int:
    """The payload of the whole model."""
    return int(payload_bytes(table, table.total_units, table.droppable_elements, bits))


def coverage_size(table: Units) -> int:
    """Bytes of a message that tells a client CR(k): the same header, then one float32 per unit of its model."""
    return _HEADER.size + VALUE_BYTES * table.total_units


def encode_coverage(share: Mapping[str, Tensor], table: Units) -> bytes:
    """CR(k) of every unit of a client's model."""
    values = [share[layer.name].to(torch.float32).numpy().astype("<f4") for layer in table.layers]
    header = _HEADER.pack(MAGIC, VERSION, ENCODINGS[FLOAT_BITS], 0, table.digest)
    return header + b"".join(value.tobytes() for value in values)


def decode_coverage(data: bytes, table: Units) -> dict[str, Tensor]:
    """The inverse of `encode_coverage`; shares lie above 0 and at most at 1."""
    header = _HEADER.pack(MAGIC, VERSION, ENCODINGS[FLOAT_BITS], 0, table.digest)
    if len(data) != coverage_size(table) or data[: _HEADER.size] != header:
        raise PayloadError("this is not the coverage of this model's units")
    flat = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=_HEADER.size).astype(np.float32)).double()
    if not bool(((flat > 0) & (flat <= 1)).all()):
        raise PayloadError("a unit's coverage must lie above 0 and at most at 1")
    return dict(zip((x.name for x in table.layers), torch.split(flat, [x.units for x in table.layers]), strict=True))


def payload_sizes(packed: Sequence[bytes], table: Units, bits: int = FLOAT_BITS) -> NDArray[np.int64]:
    """`payload_size` of several packed masks at once."""
    rows = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1)
    flags = np.unpackbits(rows, axis=1, bitorder="little")
    per_unit = np.repeat([x.unit_elements for x in table.layers], [x.units for x in table.layers])
    kept = flags[:, : table.total_units].astype(np.int64)
    sizes: NDArray[np.int64] = payload_bytes(table, kept.sum(1), kept @ per_unit.astype(np.int64), bits)
    return sizes


def pack_mask(mask: Mapping[str, Tensor], table: Units) -> bytes:
    """A bit per unit, layer by layer, zero-padded to a multiple of four bytes."""
    if not table.layers:
        return b""
    return pack_masks({name: units[None] for name, units in mask.items()}, table)[0]


def pack_masks(masks: Mapping[str, Tensor], table: Units) -> list[bytes]:
    """`pack_mask` for each client of a stack of masks, [clients, units] per layer."""
    flat = np.concatenate([masks[layer.name].numpy() for layer in table.layers], axis=1)
    packed = np.packbits(flat, axis=1, bitorder="little")
    return [row.tobytes().ljust(_mask_bytes(table), b"\0") for row in packed]


def unpack_mask(data: bytes, table: Units) -> Mask:
    """The inverse of `pack_mask`; a padding bit that is set is refused."""
    if len(data) != _mask_bytes(table):
        raise PayloadError(f"a mask of {table.total_units} units has {_mask_bytes(table)} bytes, not {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[table.total_units :].any():
        raise PayloadError("a padding bit of the mask is set")
    flat = torch.from_numpy(bits[: table.total_units].astype(np.bool_))
    return dict(zip((x.name for x in table.layers), torch.split(flat, [x.units for x in table.layers]), strict=True))


def _mask_bytes(table: Units) -> int:
    return -(-table.total_units // 32) * 4


def _size(table: Units, mask: Mapping[str, Tensor], bits: int = FLOAT_BITS) -> int:
    kept_units = sum(int(kept.sum()) for kept in mask.values())
    return int(payload_bytes(table, kept_units, table.kept_elements(mask) - len(table.fixed), bits))


def payload_bytes(table: Units, kept_units: Any, kept_elements: Any, bits: int) -> Any:
    """Of a payload, or of several if the counts are arrays."""
    if bits == FLOAT_BITS:
        return fixed_bytes(table) + VALUE_BYTES * kept_elements
    return fixed_bytes(table) + VALUE_BYTES * kept_units + -(-(bits * kept_elements) // 8)
