"""Which units a client uploads: scores per unit, ranked within their layer, and rate → mask (Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.units import Layer, Mask, Params, Units, units_for

Floats = NDArray[np.float64]
Selector = Literal["importance", "magnitude", "delta", "random", "ordered"]

WEIGHT_FLOOR = 1e-3
"""|W| is not taken smaller than this share of the layer's root mean square when importance divides by it."""
BLOCK = 2**20
"""Scores are worked out on so many numbers at a time: intermediate results stay in the processor's cache."""
FLOAT32_ERROR = 1e-4
"""More than a float32 score can be off, relatively: rounding of the terms and of the sum of their squares."""
FLOAT32_LEAST = 1e-12
"""Of a score below this, squares may have vanished from a float32 sum."""


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
    table = units_for(after, units)
    if table.fit(before) is not table:
        raise ValueError("the parameters before and after training must have the same shapes")
    masks = select_stack(
        _stack_of_one(before, table),
        _stack_of_one(after, table),
        [dropout],
        units=table,
        selector=selector,
        coverage=coverage,
        rngs=None if rng is None else [rng],
        always_send=always_send,
    )
    return {name: mask[0] for name, mask in masks.items()}


def select_stack(
    before: Params,
    after: Params,
    dropouts: Sequence[float],
    *,
    units: Units,
    selector: str = "importance",
    coverage: Mapping[str, Tensor] | None = None,
    rngs: Sequence[np.random.Generator] | None = None,
    always_send: Collection[str] = (),
) -> Mask:
    """`select` for several clients of one model at once; before, after: stacks, one rate and generator per client."""
    for dropout in dropouts:
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must lie between 0 and 1, not {dropout}")
    if selector not in SELECTORS:
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, not {selector!r}")
    if selector == "random" and rngs is None:
        raise ValueError('selector "random" needs rng, a numpy Generator')
    _check_coverage(units, coverage)
    unknown = set(always_send) - {layer.name for layer in units.layers}
    if unknown:
        raise ValueError(f"always_send names no layer of the model: {', '.join(sorted(unknown))}")
    mask = {}
    for layer in units.layers:
        whole = layer.name in always_send
        counts = [layer.units if whole else kept_units(layer.units, dropout) for dropout in dropouts]
        # "random" draws for every layer, so that keeping one whole does not move what the others draw.
        if min(counts) == layer.units and selector != "random":
            mask[layer.name] = torch.ones(len(counts), layer.units, dtype=torch.bool)
            continue
        share = coverage[layer.name].double().numpy() if coverage and selector == "importance" else 1.0
        if selector == "random":
            chosen = _best(np.stack([rng.random(layer.units) for rng in rngs or ()]), counts, layer)
        elif selector == "ordered":
            chosen = np.arange(layer.units) < np.array(counts)[:, None]
        else:
            chosen = _best_by_score(SCORES[selector], layer, before, after, counts, share)
        mask[layer.name] = torch.from_numpy(chosen)
    return mask


def unit_scores(
    before: Params, after: Params, *, selector: str = "importance", units: Units | None = None
) -> dict[str, Tensor]:
    """The score of every unit by importance, magnitude or delta, float64 [units] per layer."""
    table = units_for(after, units)
    old, new = _stack_of_one(before, table), _stack_of_one(after, table)
    score = SCORES[selector]
    return {layer.name: torch.from_numpy(score(layer, old, new, torch.float64)[0]) for layer in table.layers}


def _stack_of_one(params: Params, table: Units) -> dict[str, Tensor]:
    return {slot.name: params[slot.name].detach().unsqueeze(0) for slot in table.slots}


def _check_coverage(table: Units, coverage: Mapping[str, Tensor] | None) -> None:
    if coverage is None:
        return
    for layer in table.layers:
        if layer.name not in coverage or coverage[layer.name].shape != (layer.units,):
            raise ValueError(f"coverage needs one number for each of the {layer.units} units of layer {layer.name!r}")


def _best_by_score(
    score: Score, layer: Layer, before: Params, after: Params, counts: Sequence[int], share: Floats | float
) -> NDArray[np.bool_]:
    """The units with the highest scores in float64, [clients, units]; float32 decides wherever it can.

    float32 is half of the work and nearly always enough. Where the last unit that is kept and the first that is not are
    too close to call, that client's layer is scored again in float64. share: CR(k), what the scores are divided by
    """
    names = [slot.name for slot in layer.slots]
    if any(after[name].dtype != torch.float32 or before[name].dtype != torch.float32 for name in names):
        return _best(score(layer, before, after, torch.float64) / share, counts, layer)
    scores = score(layer, before, after, torch.float32) / share
    ranked, clients, count = np.sort(scores, axis=1), np.arange(len(counts)), np.array(counts)
    kept, left = ranked[clients, layer.units - count], ranked[clients, np.maximum(layer.units - count - 1, 0)]
    best: NDArray[np.bool_] = scores >= kept[:, None]
    with np.errstate(invalid="ignore"):
        clear = (kept - left > FLOAT32_ERROR * kept) & (kept > FLOAT32_LEAST) & np.isfinite(ranked[:, -1])
    doubtful = np.flatnonzero(~clear)
    if len(doubtful):
        chosen = torch.from_numpy(doubtful)
        old, new = ({name: params[name][chosen] for name in names} for params in (before, after))
        again = score(layer, old, new, torch.float64) / share
        best[doubtful] = _best(again, count[doubtful].tolist(), layer)
    return best


def _best(scores: Floats, counts: Sequence[int], layer: Layer) -> NDArray[np.bool_]:
    """For every client the `count` highest scores, ties by unit index; scores: [clients, units]."""
    if not np.isfinite(scores).all():
        raise ValueError(f"layer {layer.name!r} holds values that are not finite; its units cannot be ranked")
    order = np.argsort(-scores, axis=1, kind="stable")
    best = np.empty(scores.shape, dtype=np.bool_)
    np.put_along_axis(best, order, np.arange(layer.units) < np.array(counts)[:, None], axis=1)
    return best


def _importance(layer: Layer, before: Params, after: Params, dtype: torch.dtype) -> Floats:
    """I(k) = ‖ΔW ⊙ Ŵ ⊘ W‖₂ over all parameters of unit k (Eq. 20), with |W| floored."""
    floors = WEIGHT_FLOOR * _root_mean_squares(layer, before, dtype)
    # A layer that is all zeros has no scale of its own: any floor gives the same ranking there.
    floors[floors == 0.0] = 1.0
    floor = torch.from_numpy(floors).to(before[layer.slots[0].name].device, dtype)[:, None, None]

    def values(old: Tensor, new: Tensor, clients: slice) -> Tensor:
        ratio = new.sub(old).mul_(new)
        return ratio.div_(old.abs().clamp_(min=floor[clients]))  # the norm does not see W's sign

    return _unit_norms(layer, before, after, values, dtype)


def _magnitude(layer: Layer, before: Params, after: Params, dtype: torch.dtype) -> Floats:
    """‖Ŵ‖₂ of the unit."""
    return _unit_norms(layer, before, after, lambda _old, new, _clients: new, dtype)


def _delta(layer: Layer, before: Params, after: Params, dtype: torch.dtype) -> Floats:
    """‖ΔW‖₂ of the unit."""
    return _unit_norms(layer, before, after, lambda old, new, _clients: new - old, dtype)


def _root_mean_squares(layer: Layer, params: Params, dtype: torch.dtype) -> Floats:
    """Of each client's weights in the layer, [clients]."""
    squares, elements = np.zeros(len(params[layer.slots[0].name])), 0
    for slot in layer.slots:
        if not slot.buffer:
            norms = torch.linalg.vector_norm(params[slot.name].flatten(1).to(dtype), dim=1)
            squares += norms.cpu().numpy().astype(np.float64) ** 2
            elements += slot.elements
    root: Floats = np.sqrt(squares / max(elements, 1))
    return root


def _unit_norms(
    layer: Layer,
    before: Params,
    after: Params,
    values: Callable[[Tensor, Tensor, slice], Tensor],
    dtype: torch.dtype,
) -> Floats:
    """L2 norm of each client's units, [clients, units], of what `values` makes of W and Ŵ block by block."""
    squares = np.zeros((len(after[layer.slots[0].name]), layer.units))
    for slot in layer.slots:
        if slot.buffer:
            continue
        old, new = slot.stacked_rows(before[slot.name]), slot.stacked_rows(after[slot.name])
        for clients, rows in _blocks(*old.shape):
            part = values(old[clients, rows].to(dtype), new[clients, rows].to(dtype), clients)
            squares[clients, rows] += torch.linalg.vector_norm(part, dim=2).cpu().numpy().astype(np.float64) ** 2
    return np.sqrt(squares)


def _blocks(clients: int, units: int, numbers: int) -> Iterator[tuple[slice, slice]]:
    """Some clients with all their units, or some units of one client, at most BLOCK numbers if a unit allows."""
    together = max(1, BLOCK // (units * numbers))
    rows = units if together > 1 else max(1, BLOCK // numbers)
    for client in range(0, clients, together):
        for start in range(0, units, rows):
            yield slice(client, client + together), slice(start, start + rows)


Score = Callable[[Layer, Params, Params, torch.dtype], Floats]
SCORES: Mapping[str, Score] = {"importance": _importance, "magnitude": _magnitude, "delta": _delta}
SELECTORS = ("importance", "magnitude", "delta", "random", "ordered")
