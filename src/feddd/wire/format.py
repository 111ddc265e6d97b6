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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.units import Mask, Params, Units

MAGIC = b"FdDD"
VERSION = 1
FLOAT32 = 0
KNOWN_ENCODINGS = range(8)
_WITHOUT_MASK = (5, 6, 7)
_HEADER = struct.Struct("<4sBBH8s")
HEADER_BYTES = _HEADER.size
VALUE_BYTES = 4


class PayloadError(ValueError):
    """The bytes are not a payload for this model."""


def payload_head(table: Units, encoding: int = FLOAT32, tag: int = 0) -> bytes:
    """Return the header of a payload of this model; tag: sixteen bits that tell chains without an encoding apart."""
    return _HEADER.pack(MAGIC, VERSION, encoding, tag, table.digest)


def check_head(data: bytes | memoryview, wanted: bytes, table: Units) -> None:
    """Refuse bytes that do not begin with this header; wanted: a header of this model."""
    if len(data) < _HEADER.size + mask_bytes(table) and wanted[5] not in _WITHOUT_MASK:
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


def write_units(params: Params, mask: Mapping[str, Tensor], table: Units) -> bytes:
    """Return the kept units of a model as they are; ValueError for a finite number that float32 cannot hold."""
    # The values are gathered right into the bytes that are returned: a copy would cost more than the gathering.
    buffer = io.BytesIO()
    buffer.write(payload_head(table) + pack_mask(mask, table))
    start, size = buffer.tell(), buffer.tell() + VALUE_BYTES * table.kept_elements(mask)
    if size > start:
        buffer.seek(size - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as room:
            _gather(np.frombuffer(room, np.float32, offset=start), table, params, mask)
    return buffer.getvalue()


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


def fixed_bytes(table: Units) -> int:
    """What every payload of this model carries besides droppable values: header, mask and the tensors always sent."""
    return _HEADER.size + mask_bytes(table) + VALUE_BYTES * len(table.fixed)


def droppable_bytes(table: Units) -> int:
    """Return the values that a mask can leave out: U_n in bytes."""
    return VALUE_BYTES * table.droppable_elements


def coverage_size(table: Units) -> int:
    """Return the bytes of a message that tells CR(k): the same header, then one float32 per unit of its model."""
    return _HEADER.size + VALUE_BYTES * table.total_units


def encode_coverage(share: Mapping[str, Tensor], table: Units) -> bytes:
    """CR(k) of every unit of a client's model."""
    values = [share[layer.name].to(torch.float32).numpy().astype("<f4") for layer in table.layers]
    return payload_head(table) + b"".join(value.tobytes() for value in values)


def decode_coverage(data: bytes, table: Units) -> dict[str, Tensor]:
    """Return the inverse of `encode_coverage`; shares lie above 0 and at most at 1."""
    if len(data) != coverage_size(table) or data[: _HEADER.size] != payload_head(table):
        raise PayloadError("this is not the coverage of this model's units")
    flat = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=_HEADER.size).astype(np.float32)).double()
    if not bool(((flat > 0) & (flat <= 1)).all()):
        raise PayloadError("a unit's coverage must lie above 0 and at most at 1")
    return dict(zip((x.name for x in table.layers), torch.split(flat, [x.units for x in table.layers]), strict=True))


def unit_payload_sizes(packed: Sequence[bytes], table: Units) -> NDArray[np.int64]:
    """Return the payloads of several packed masks with values as they are."""
    per_unit = np.repeat([x.unit_elements for x in table.layers], [x.units for x in table.layers])
    kept = _unpacked(packed)[:, : table.total_units].astype(np.int64)
    sizes: NDArray[np.int64] = fixed_bytes(table) + VALUE_BYTES * (kept @ per_unit.astype(np.int64))
    return sizes


def pack_mask(mask: Mapping[str, Tensor], table: Units) -> bytes:
    """Return a bit per unit, layer by layer, zero-padded to a multiple of four bytes."""
    return pack_masks({name: units[None] for name, units in mask.items()}, table)[0]


def pack_masks(masks: Mapping[str, Tensor], table: Units) -> list[bytes]:
    """`pack_mask` for each client of a stack of masks, [clients, units] per layer; of one if there are no layers."""
    if not table.layers:
        return [b""]
    flat = np.concatenate([masks[layer.name].numpy() for layer in table.layers], axis=1)
    packed = np.packbits(flat, axis=1, bitorder="little")
    return [row.tobytes().ljust(mask_bytes(table), b"\0") for row in packed]


def unpack_mask(data: bytes, table: Units) -> Mask:
    """Return the inverse of `pack_mask`; a padding bit that is set is refused."""
    return {name: mask[0] for name, mask in unpack_masks([data], table).items()}


def unpack_masks(packed: Sequence[bytes], table: Units) -> Mask:
    """Return the inverse of `pack_masks`, a stack."""
    wrong = next((len(data) for data in packed if len(data) != mask_bytes(table)), None)
    if wrong is not None:
        raise PayloadError(f"a mask of {table.total_units} units has {mask_bytes(table)} bytes, not {wrong}")
    bits = _unpacked(packed)
    if bits[:, table.total_units :].any():
        raise PayloadError("a padding bit of the mask is set")
    flat = torch.from_numpy(bits[:, : table.total_units].astype(np.bool_))
    parts = torch.split(flat, [layer.units for layer in table.layers], dim=1) if table.layers else ()
    return dict(zip((layer.name for layer in table.layers), parts, strict=True))


def _unpacked(packed: Sequence[bytes]) -> NDArray[np.uint8]:
    rows = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1)
    return np.unpackbits(rows, axis=1, bitorder="little")


def mask_bytes(table: Units) -> int:
    """Return the size of a mask on the wire: a bit for every unit, in whole words."""
    return -(-table.total_units // 32) * 4
