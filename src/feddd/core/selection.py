"""Which units a client uploads: scores per unit, ranked within their layer, and rate → mask (Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from feddd.core.units import Layer, Mask, Params, Units, units_for

Selector = Literal["importance", "magnitude", "delta", "random", "ordered"]

WEIGHT_FLOOR = 1e-3
"""|W| is not taken smaller than this share of the layer's root mean square when importance divides by it."""


def kept_units(units: int, dropout: float) -> int:
    """n_up = N_l · (1 − D), to the nearest unit, halves up, at least one."""
    # The tiny addend keeps an exact half a half although 1 − D is rounded (N = 5, D = 0.9 is below a half in floats).
    return min(units, max(1, math.floor(units * (1.0 - dropout) + 0.5 + 1e-9)))


def select(
    before: Params,
    after: Params,
    dropout: float,
    *,
    selector: str = "importance",
    coverage: Mapping[str, Tensor] | None = None,
    rng: np.random.Generator | None = None,
    units: Units | None = None,
    always_send: Collection[str] = (),
) -> Mask:
    """The units to upload at dropout rate D: in every layer the n_up best by `selector`, ties by unit index.

    before, after: the client's parameters W and Ŵ    rng: for "random"
    coverage: CR(k) per layer, [units]; importance is divided by it (Eq. 21), the other rules do not know it
    always_send: layers that are never dropped
    """
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout must lie between 0 and 1, not {dropout}")
    if selector not in SELECTORS:
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, not {selector!r}")
    if selector == "random" and rng is None:
        raise ValueError('selector "random" needs rng, a numpy Generator')
    table = units_for(after, units)
    _check_like(table, before, coverage)
    unknown = set(always_send) - {layer.name for layer in table.layers}
    if unknown:
        raise ValueError(f"always_send names no layer of the model: {', '.join(sorted(unknown))}")
    mask = {}
    for layer in table.layers:
        count = layer.units if layer.name in always_send else kept_units(layer.units, dropout)
        mask[layer.name] = torch.ones(layer.units, dtype=torch.bool)
        # "random" draws for every layer, so that keeping one whole does not move what the others draw.
        if count < layer.units or selector == "random":
            scores = SELECTORS[selector](layer, before, after, rng)
            if coverage is not None and selector == "importance":
                scores = scores / coverage[layer.name].double()
            mask[layer.name][_ranking(scores, layer)[count:]] = False
    return mask


def unit_scores(
    before: Params, after: Params, *, selector: str = "importance", units: Units | None = None
) -> dict[str, Tensor]:
    """The score of every unit by a selector that needs no generator, float64 [units] per layer."""
    table = units_for(after, units)
    return {layer.name: SELECTORS[selector](layer, before, after, None) for layer in table.layers}


def _check_like(table: Units, before: Params, coverage: Mapping[str, Tensor] | None) -> None:
    if table.fit(before) is not table:
        raise ValueError("the parameters before and after training must have the same shapes")
    if coverage is None:
        return
    for layer in table.layers:
        if layer.name not in coverage or coverage[layer.name].shape != (layer.units,):
            raise ValueError(f"coverage needs one number for each of the {layer.units} units of layer {layer.name!r}")


def _ranking(scores: Tensor, layer: Layer) -> Tensor:
    if not torch.isfinite(scores).all():
        raise ValueError(f"layer {layer.name!r} holds values that are not finite; its units cannot be ranked")
    return torch.argsort(scores, descending=True, stable=True)


def _importance(layer: Layer, before: Params, after: Params, _rng: np.random.Generator | None) -> Tensor:
    """I(k) = ‖ΔW ⊙ Ŵ ⊘ W‖₂ over all parameters of unit k (Eq. 20), in float64, with |W| floored."""
    slots = [slot for slot in layer.slots if not slot.buffer]
    old = [before[slot.name].detach().to(torch.float64, copy=True) for slot in slots]
    elements = sum(tensor.numel() for tensor in old)
    norm = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in old))
    # A layer that is all zeros has no scale of its own: any floor gives the same ranking there.
    floor = WEIGHT_FLOOR * norm / math.sqrt(max(elements, 1)) or 1.0
    squares = torch.zeros(layer.units, dtype=torch.float64)
    for slot, weight in zip(slots, old, strict=True):
        new = after[slot.name].detach().double()
        ratio = new.sub(weight).mul_(new)
        ratio.div_(weight.abs_().clamp_(min=floor))  # the norm below does not see W's sign
        squares += _row_norms(slot.rows(ratio), slot.lead) ** 2
    return squares.sqrt_()


def _magnitude(layer: Layer, _before: Params, after: Params, _rng: np.random.Generator | None) -> Tensor:
    """‖Ŵ‖₂ of the unit."""
    return _layer_norms(layer, lambda name: after[name].detach().double())


def _delta(layer: Layer, before: Params, after: Params, _rng: np.random.Generator | None) -> Tensor:
    """‖ΔW‖₂ of the unit."""
    return _layer_norms(layer, lambda name: after[name].detach().double() - before[name].detach().double())


def _ordered(layer: Layer, _before: Params, _after: Params, _rng: np.random.Generator | None) -> Tensor:
    """The first units first."""
    return -torch.arange(layer.units, dtype=torch.float64)


def _random(layer: Layer, _before: Params, _after: Params, rng: np.random.Generator | None) -> Tensor:
    """Uniform from the round's generator."""
    if rng is None:
        raise ValueError('selector "random" needs rng, a numpy Generator')
    return torch.from_numpy(rng.random(layer.units))


def _layer_norms(layer: Layer, values: Callable[[str], Tensor]) -> Tensor:
    squares = torch.zeros(layer.units, dtype=torch.float64)
    for slot in layer.slots:
        if not slot.buffer:
            squares += _row_norms(slot.rows(values(slot.name)), slot.lead) ** 2
    return squares.sqrt_()


def _row_norms(rows: Tensor, lead: int) -> Tensor:
    """L2 norm of each unit's slice, [units]."""
    norms: Tensor = torch.linalg.vector_norm(rows.reshape(*rows.shape[:lead], -1), dim=-1)
    return norms.reshape(-1)


SELECTORS: Mapping[str, Callable[[Layer, Params, Params, np.random.Generator | None], Tensor]] = {
    "importance": _importance,
    "magnitude": _magnitude,
    "delta": _delta,
    "random": _random,
    "ordered": _ordered,
}
