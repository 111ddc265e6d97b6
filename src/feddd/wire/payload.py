"""One model's units as bytes and back, by the stages that clients and servers run: for programs of one's own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from feddd.core.stacks import stack_of_one
from feddd.core.units import Mask, Params, Units, units_for
from feddd.wire.chosen import ChosenUnits, one
from feddd.wire.exchange import Chain, chain, payload_sizes, read, write
from feddd.wire.format import PayloadError, write_units
from feddd.wire.quantise import FLOAT_BITS
from feddd.wire.quantised import Bits
from feddd.wire.select import Select
from feddd.wire.stage import Update


def encode(
    params: Params,
    mask: Mapping[str, Tensor],
    *,
    units: Units | None = None,
    bits: int = FLOAT_BITS,
    rng: np.random.Generator | None = None,
) -> bytes:
    """Return the kept units of `params` as bytes; integer tensors are not sent.

    bits: 32 for the values as they are; 8, 4 or 2 to round them at random, with `rng`, to so many bits
    ValueError for a finite number that float32 cannot hold; what is not finite travels as it is.
    """
    table = units_for(params, units)
    table.check_mask(mask)
    if bits == FLOAT_BITS:
        return write_units(params, mask, table)
    if rng is None:
        raise ValueError("values in a few bits are rounded at random: encode needs rng")
    line = _line(bits)
    update = Bits(bits).rounded(Update(stack_of_one(params, table), _chosen(mask)), table, [rng])
    return write(line, update, 0, table)


def decode(
    data: bytes | memoryview,
    like: Params,
    *,
    units: Units | None = None,
    finite: bool = False,
    bits: int = FLOAT_BITS,
) -> tuple[dict[str, Tensor], Mask]:
    """Return what `encode` was given: dense values, zero where the mask is false, and the mask.

    like: the receiver's own parameters (names, shapes, dtypes)    finite: also refuse values that are not finite
    bits: as the sender was told; a payload in another encoding is refused
    """
    table = units_for(like, units)
    update = read(_line(bits), data, table)
    assert isinstance(update.chosen, ChosenUnits)
    sent = one(update.values, 0)
    values = {name: tensor.to(like[name].dtype) for name, tensor in sent.items()}
    for found, where in ((sent, ""), (values, " in the receiver's precision")):
        if finite and not all(bool(tensor.isfinite().all()) for tensor in found.values()):
            raise PayloadError(f"the payload holds a value that is not finite{where}")
    return values | {alias: values[name] for alias, name in table.aliases}, one(update.chosen.masks, 0)


def payload_size(
    mask: Mapping[str, Tensor], like: Params, *, units: Units | None = None, bits: int = FLOAT_BITS
) -> int:
    """``len(encode(like, mask))`` without encoding."""
    table = units_for(like, units)
    table.check_mask(mask)
    return int(payload_sizes(_line(bits), Update({}, _chosen(mask)), table)[0])


def _line(bits: int) -> Chain:
    return chain(Select()) if bits == FLOAT_BITS else chain(Select(), Bits(bits))


def _chosen(mask: Mapping[str, Tensor]) -> ChosenUnits:
    return ChosenUnits({name: units[None] for name, units in mask.items()})
