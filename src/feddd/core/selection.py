"""Which units a client uploads: scores per unit, ranked within their layer, and rate → mask (Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.stacks import stack_of_one
from feddd.core.units import Layer, Mask, Params, Units, units_for

Floats = NDArray[np.float64]
Selector = Literal["importance", "magnitude", "delta", "random", "ordered"]
Score = Callable[[Tensor, Tensor], Tensor]
"""A score of one's own: score(before, after) -> [clients, units], the higher the sooner a unit is sent.

before, after: the trained numbers of one layer, float64 [clients, units, numbers of a unit]
"""

WEIGHT_FLOOR = 1e-3
"""|W| is not taken smaller than this share of the layer's root mean square when importance divides by it."""
BLOCK = 2**18
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
    selector: str | Score = "importance",
    coverage: Mapping[str, Tensor] | None = None,
    rng: np.random.Generator | None = None,
    units: Units | None = None,
    always_send: Collection[str] = (),
) -> Mask:
    """Return the units to upload at dropout rate D: in every layer the n_up best by `selector`, ties by unit index.

    before, after: the client's parameters W and Ŵ    rng: for "random"    selector: a name, or a `Score` of one's own
    coverage: CR(k) per layer, [units]; importance is divided by it (Eq. 21), the other rules do not know it
    always_send: layers that are never dropped
    """
    table = units_for(after, units)
    if table.fit(before) is not table:
        raise ValueError("the parameters before and after training must have the same shapes")
    masks = select_stack(
        stack_of_one(before, table),
        stack_of_one(after, table),
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
    selector: str | Score = "importance",
    coverage: Mapping[str, Tensor] | None = None,
    rngs: Sequence[np.random.Generator] | None = None,
    always_send: Collection[str] = (),
) -> Mask:
    """`select` for several clients of one model at once; before, after: stacks, one rate and generator per client."""
    for dropout in dropouts:
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must lie between 0 and 1, not {dropout}")
    ranking = ranking_of(selector)
    if ranking.draws and rngs is None:
        raise ValueError(f'selector "{selector}" needs rng, a numpy Generator')
    _check_coverage(units, coverage)
    unknown = set(always_send) - {layer.name for layer in units.layers}
    if unknown:
        raise ValueError(f"always_send names no layer of the model: {', '.join(sorted(unknown))}")
    mask = {}
    for layer in units.layers:
        whole = layer.name in always_send
        counts = [layer.units if whole else kept_units(layer.units, dropout) for dropout in dropouts]
        # What is drawn is drawn for every layer, so that keeping one whole does not move what the others draw.
        if min(counts) == layer.units and not ranking.draws:
            mask[layer.name] = torch.ones(len(counts), layer.units, dtype=torch.bool)
            continue
        share = coverage[layer.name].double().numpy() if coverage and ranking.covered else None
        mask[layer.name] = torch.from_numpy(ranking.best(Candidates(layer, before, after, counts, share, rngs or ())))
    return mask


def _check_coverage(table: Units, coverage: Mapping[str, Tensor] | None) -> None:
    if coverage is None:
        return
    for layer in table.layers:
        if layer.name not in coverage or coverage[layer.name].shape != (layer.units,):
            raise ValueError(f"coverage needs one number for each of the {layer.units} units of layer {layer.name!r}")


@dataclass(frozen=True)
class Candidates:
    """The units of a layer, and how many of each client's are wanted.

    before, after: W and Ŵ, stacks    share: CR(k), [units], None if models are equal    rngs: one for each client
    """

    layer: Layer
    before: Params
    after: Params
    counts: Sequence[int]
    share: Floats | None = None
    rngs: Sequence[np.random.Generator] = ()


@dataclass(frozen=True)
class Ranking:
    """A way to choose units; best: the `count` best of every client, [clients, units].

    draws: it needs generators    covered: it wants to know how many clients have a unit
    """

    best: Callable[[Candidates], NDArray[np.bool_]]
    draws: bool = False
    covered: bool = False


def ranking_of(selector: str | Score) -> Ranking:
    """Return the ranking of this name, or by somebody's own score; ValueError if there is none."""
    if callable(selector):
        return Ranking(partial(_best_by_own_score, selector))
    if selector not in RANKINGS:
        raise ValueError(f"selector must be one of {', '.join(RANKINGS)}, not {selector!r}")
    return RANKINGS[selector]


def _drawn(units: Candidates) -> NDArray[np.bool_]:
    return _best(np.stack([rng.random(units.layer.units) for rng in units.rngs]), units.counts, units.layer)


def _first(units: Candidates) -> NDArray[np.bool_]:
    first: NDArray[np.bool_] = np.arange(units.layer.units) < np.array(units.counts)[:, None]
    return first


def _best_by_own_score(score: Score, units: Candidates) -> NDArray[np.bool_]:
    """Return the best units by what somebody's own score says of them; ValueError if it is no ranking."""
    layer = units.layer
    old, new = _rows(layer, units.before), _rows(layer, units.after)
    if not old:  # nothing that was trained: all units are equal
        return _first(units)
    found = torch.as_tensor(score(torch.cat(old, 2).double(), torch.cat(new, 2).double())).detach().cpu().double()
    name = getattr(score, "__name__", type(score).__name__)
    if found.shape != (len(old[0]), layer.units):
        wanted, got = [len(old[0]), layer.units], list(found.shape)
        raise ValueError(f"score {name!r} must give layer {layer.name!r} numbers [clients, units] {wanted}, not {got}")
    if not bool(found.isfinite().all()):
        raise ValueError(f"score {name!r} gives a unit of layer {layer.name!r} a number that is not finite")
    return _best(found.numpy(), units.counts, layer)


@dataclass(frozen=True)
class Norm:
    """A score that is the L2 norm of what a formula makes of W and Ŵ.

    formula: of W, Ŵ, the smallest |W| and two tensors to write to    floored: the formula divides by W
    """

    formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    floored: bool = False

    def best(self, units: Candidates) -> NDArray[np.bool_]:
        """Return the units with the highest scores in float64.

        All units are scored in float32, which is half of the work. Where that leaves open on which side of the cut some
        units of a client are, those are scored again in float64.
        """
        layer, counts = units.layer, units.counts
        old, new = _rows(layer, units.before), _rows(layer, units.after)
        if not old:  # nothing that was trained: all units are equal
            return _first(units)
        shares = np.ones(layer.units) if units.share is None else units.share
        scores = np.full((len(counts), layer.units), np.nan)
        if all(rows.dtype == torch.float32 for rows in (*old, *new)):
            scores = self.scores(old, new, self.floors(old, torch.float32)) / shares
        ranked = np.sort(scores, axis=1)
        best = np.ones(scores.shape, dtype=np.bool_)
        for client, count in enumerate(counts):
            if count == layer.units:
                continue
            cut, below = ranked[client, layer.units - count], ranked[client, layer.units - count - 1]
            told = cut > FLOAT32_LEAST and np.isfinite(ranked[client, -1])
            best[client] = scores[client] >= cut
            if told and cut - below > FLOAT32_ERROR * cut:
                continue
            near = np.abs(scores[client] - cut) <= 2 * FLOAT32_ERROR * cut if told else np.ones(layer.units, np.bool_)
            own_old, own_new = ([rows[client : client + 1] for rows in stack] for stack in (old, new))
            chosen = torch.from_numpy(near)
            near_old, near_new = ([rows[:, chosen] for rows in stack] for stack in (own_old, own_new))
            precise = self.scores(near_old, near_new, self.floors(own_old, torch.float64)) / shares[near]
            best[client] &= ~near
            best[client, near] = _best(precise, [count - int(best[client].sum())], layer)[0]
        return best

    def floors(self, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return how small |W| may be: a share of the layer's root mean square, per client, [clients, 1, 1]."""
        floors = np.zeros(len(rows[0]))
        if self.floored:
            squares, numbers = np.zeros(len(rows[0])), 0
            for part in rows:
                norms = torch.linalg.vector_norm(part.flatten(1).to(dtype), dim=1)
                squares += norms.cpu().numpy().astype(np.float64) ** 2
                numbers += part[0].numel()
            floors = WEIGHT_FLOOR * np.sqrt(squares / numbers)
            # A layer that is all zeros has no scale of its own: any floor gives the same ranking there.
            floors[floors == 0.0] = 1.0
        return torch.from_numpy(floors).to(rows[0].device, dtype)[:, None, None]

    def scores(self, old: Sequence[Tensor], new: Sequence[Tensor], floor: Tensor) -> Floats:
        """Return every unit's score, [clients, units], worked out block by block in the precision of the floors."""
        squares = np.zeros(old[0].shape[:2])
        for before, after in zip(old, new, strict=True):
            blocks = list(_blocks(*before.shape))
            # One block of room for all blocks: fresh memory for each would cost more than the sums.
            room = torch.empty(2, *before[blocks[0]].shape, dtype=floor.dtype, device=before.device)
            for some, rows in blocks:
                weight, trained = before[some, rows].to(floor.dtype), after[some, rows].to(floor.dtype)
                result = self.formula(weight, trained, floor[some], room[:, : len(weight), : weight.shape[1]])
                squares[some, rows] += torch.linalg.vector_norm(result, dim=2).cpu().numpy().astype(np.float64) ** 2
        return np.sqrt(squares)


def _magnitude(weight: Tensor, trained: Tensor, floor: Tensor, room: Tensor) -> Tensor:
    return trained


def _delta(weight: Tensor, trained: Tensor, floor: Tensor, room: Tensor) -> Tensor:
    return torch.sub(trained, weight, out=room[0])


def _importance(weight: Tensor, trained: Tensor, floor: Tensor, room: Tensor) -> Tensor:
    """ΔW ⊙ Ŵ ⊘ W (Eq. 20) with |W| floored; the norm does not see W's sign."""
    torch.sub(trained, weight, out=room[0])
    torch.abs(weight, out=room[1]).clamp_(min=floor)
    return room[0].mul_(trained).div_(room[1])


NORMS = {
    "importance": Norm(_importance, floored=True),
    "magnitude": Norm(_magnitude),
    "delta": Norm(_delta),
}
"""The scores that look at what training did."""
RANKINGS = {
    "importance": Ranking(NORMS["importance"].best, covered=True),
    "magnitude": Ranking(NORMS["magnitude"].best),
    "delta": Ranking(NORMS["delta"].best),
    "random": Ranking(_drawn, draws=True),
    "ordered": Ranking(_first),
}
"""Every way to rank units by name."""


def _best(scores: Floats, counts: Sequence[int], layer: Layer) -> NDArray[np.bool_]:
    """For every client the `count` highest scores, ties by unit index; scores: [clients, units]."""
    if not np.isfinite(scores).all():
        raise ValueError(f"layer {layer.name!r} holds values that are not finite; its units cannot be ranked")
    order = np.argsort(-scores, axis=1, kind="stable")
    best = np.empty(scores.shape, dtype=np.bool_)
    np.put_along_axis(best, order, np.arange(scores.shape[1]) < np.array(counts)[:, None], axis=1)
    return best


def _rows(layer: Layer, params: Params) -> list[Tensor]:
    """Return the trained tensors of a layer, [clients, units, numbers of a unit] each."""
    return [slot.stacked_rows(params[slot.name]) for slot in layer.slots if not slot.buffer]


def _blocks(clients: int, units: int, numbers: int) -> Iterator[tuple[slice, slice]]:
    """Return some clients with all their units, or some units of one client, at most BLOCK numbers if a unit allows."""
    together = max(1, BLOCK // (units * numbers))
    rows = units if together > 1 else max(1, BLOCK // numbers)
    for client in range(0, clients, together):
        for start in range(0, units, rows):
            yield slice(client, client + together), slice(start, start + rows)
