"""The server's average: every element over the clients that sent it, weighted, streaming and mergeable (Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.submodel import prefix
from feddd.core.units import Params, Slot, Units, units_for

BLOCK = 2**16
"""The mean is worked out on so many numbers at a time: intermediate results stay in the processor's cache."""


@dataclass(frozen=True)
class Sums:
    """What an aggregator has counted, as arrays that can travel between processes.

    numerator: float64 [elements], in wire order    weights: for every width of model, the weight per layer and unit
    element_weights: as the numerator, of clients that sent blocks; None if there were none
    """

    numerator: NDArray[np.float64]
    weights: tuple[tuple[Units, Mapping[str, NDArray[np.float64]]], ...]
    total_weight: float
    element_weights: NDArray[np.float64] | None = None


def add_sums(left: Sums, right: Sums) -> Sums:
    """Return both together; the left one's arrays are used up, unless they are read-only."""
    spare = left.numerator if left.numerator.flags.writeable else None
    numerator = np.add(left.numerator, right.numerator, out=spare)
    weights = {table.digest: (table, dict(per_layer)) for table, per_layer in left.weights}
    for table, per_layer in right.weights:
        if table.digest in weights:
            own = weights[table.digest][1]
            weights[table.digest] = table, {name: own[name] + added for name, added in per_layer.items()}
        else:
            weights[table.digest] = table, dict(per_layer)
    by_element = [one.element_weights for one in (left, right) if one.element_weights is not None]
    summed = None if not by_element else np.sum(by_element, axis=0)
    return Sums(numerator, tuple(weights.values()), left.total_weight + right.total_weight, summed)


class Aggregator:
    """Numerator and denominator of the masked mean; memory does not depend on how many clients are added.

    A numerator is kept per element in float64. Weights need one number per unit and width of model: inside a
    client's sub-model every element of a unit was sent, or none. Blocks (see `wire.blocks`) need one per element.
    """

    def __init__(self, previous: Params, *, units: Units | None = None) -> None:
        self._previous = previous
        self._units = units_for(previous, units)
        self._sum = torch.zeros(self._units.elements, dtype=torch.float64)
        self._views = _views(self._sum, self._units)
        self._tables: dict[bytes, Units] = {}
        self._weights: dict[bytes, dict[str, Tensor]] = {}
        self._total = 0.0
        self._by_element: Tensor | None = None

    @property
    def units(self) -> Units:
        """Return the layer table of the global model."""
        return self._units

    @property
    def total_weight(self) -> float:
        """Return the weights added so far."""
        return self._total

    def add(self, values: Params, mask: Mapping[str, Tensor], weight: float) -> None:
        """Count one client: its values where the mask is true, with its weight (its number of samples).

        A narrower client's tensors are the prefix of the global ones on every axis.
        """
        if not 0.0 < weight < float("inf"):
            raise ValueError(f"a client's weight must be positive and finite, not {weight}")
        table = self._units.fit(values)
        table.check_mask(mask)
        weights = self._weights_of(table)
        for layer, own in zip(self._units.layers, table.layers, strict=True):
            kept = mask[own.name]
            weights[own.name].add_(kept, alpha=weight)
            chosen = None if bool(kept.all()) else kept.nonzero().squeeze(1)
            for slot, own_slot in zip(layer.slots, own.slots, strict=True):
                rows = own_slot.rows(values[slot.name].detach())
                target = prefix(slot.rows(self._views[slot.name]), rows.shape)
                if chosen is None:
                    target.add_(rows, alpha=weight)
                elif own_slot.lead == 1:
                    target.index_add_(0, chosen, rows.index_select(0, chosen).double(), alpha=weight)
                else:
                    index = own_slot.index(kept)
                    target[index] += rows[index].double() * weight
        for slot in self._units.fixed:
            self._views[slot.name].add_(values[slot.name].detach(), alpha=weight)
        self._total += weight

    def add_stack(self, values: Params, masks: Mapping[str, Tensor] | None, weights: Tensor, units: Units) -> None:
        """Count several clients of one model at once; their sum is taken in the precision of the values.

        values: stacks, finite also where nothing was sent    weights: float64 [clients]
        masks: [clients, units] per layer; None counts everything    units: the clients' layer table
        """
        counted = self._weights_of(units)
        for layer, own in zip(self._units.layers, units.layers, strict=True):
            shares = None  # [units, 1, clients], contiguous: batched products are several times slower without
            if masks is None or bool(masks[own.name].all()):
                counted[own.name] += weights.sum()
            else:
                per_unit = (weights[:, None] * masks[own.name]).T.contiguous()
                counted[own.name] += per_unit.sum(1)
                shares = per_unit.unsqueeze(1)
            for slot, own_slot in zip(layer.slots, own.slots, strict=True):
                rows = own_slot.stacked_rows(values[slot.name])
                if shares is None:
                    total = torch.mv(rows.flatten(1).T, weights.to(rows)).cpu()
                elif len(weights) == 1:  # a product of one number is no work for matrices
                    total = rows[0].mul(shares[:, 0].to(rows)).cpu()
                else:
                    total = torch.bmm(shares.to(rows), rows.transpose(0, 1)).cpu()
                target = self._views[slot.name]
                if not slot.plain or own_slot.shape != slot.shape:
                    target = slot.rows(target)
                    target = prefix(target, own_slot.rows(torch.empty(own_slot.shape, device="meta")).shape)
                target.add_(total.view(target.shape))
        for slot in self._units.fixed:
            self._views[slot.name].add_((values[slot.name].cpu().double() * weights).sum())
        self._total += float(weights.sum())

    def add_blocks(self, values: Params, chosen: Mapping[str, Tensor], weights: Tensor) -> None:
        """Count several clients of the global model's shape that sent some elements each.

        values: stacks, zero where nothing was sent    chosen: bool, of the same shapes    weights: float64 [clients]
        """
        if self._by_element is None:
            self._by_element = torch.zeros_like(self._sum)
        for slot, sums, counted in zip(
            self._units.slots, self._views.values(), _views(self._by_element, self._units).values(), strict=True
        ):
            sums.add_(torch.tensordot(weights, values[slot.name].cpu().double(), 1))
            counted.add_(torch.tensordot(weights, chosen[slot.name].cpu().double(), 1))
        self._total += float(weights.sum())

    def sums(self) -> Sums:
        """Return what was counted so far; the arrays are those of the aggregator, not copies."""
        weights = tuple(
            (table, {name: values.numpy() for name, values in self._weights[digest].items()})
            for digest, table in self._tables.items()
        )
        by_element = None if self._by_element is None else self._by_element.numpy()
        return Sums(self._sum.numpy(), weights, self._total, by_element)

    def merge(self, other: Aggregator | Sums) -> None:
        """Count everything that `other` has counted."""
        if isinstance(other, Aggregator):
            if other._units.digest != self._units.digest:
                raise ValueError("only aggregators of the same model can be merged")
            other = other.sums()
        names = [slot.name for slot in self._units.slots]
        named_alike = all([slot.name for slot in table.slots] == names for table, _ in other.weights)
        if other.numerator.shape != self._sum.shape or not named_alike:
            raise ValueError("only sums of the same model can be merged")
        tables = [self._weights_of(table) for table, _ in other.weights]
        self._sum.numpy()[:] += other.numerator
        for weights, (_, per_layer) in zip(tables, other.weights, strict=True):
            for name, added in per_layer.items():
                weights[name].numpy()[:] += added
        if other.element_weights is not None:
            own = 0.0 if self._by_element is None else self._by_element
            self._by_element = own + torch.from_numpy(other.element_weights)
        self._total += other.total_weight

    def result(self) -> dict[str, Tensor]:
        """Return the new global values; what nobody sent, and every integer tensor, keeps its previous value."""
        new = {name: tensor.detach().clone() for name, tensor in self._previous.items()}
        for layer in self._units.layers:
            for slot in layer.slots:
                _write_mean(
                    slot.rows(new[slot.name]),
                    slot.rows(self._views[slot.name]),
                    self._element_weights(layer.name, slot),
                )
        for slot in self._units.fixed:
            if self._total > 0:
                new[slot.name].copy_(self._views[slot.name] / self._total)
        return new | {alias: new[name] for alias, name in self._units.aliases if alias in new}

    def _element_weights(self, layer: str, slot: Slot) -> Tensor:
        """Return the weight behind every element, in the shape of the slot's rows or one that broadcasts to it."""
        weights = torch.zeros((1,) * slot.rows(self._views[slot.name]).dim(), dtype=torch.float64)
        for number, (digest, table) in enumerate(self._tables.items()):
            own = next(x for x in table.slots if x.name == slot.name)
            shape = own.rows(torch.empty(own.shape, device="meta")).shape
            per_unit = own.index(self._weights[digest][layer])
            spread = per_unit.reshape(*per_unit.shape, *[1] * (len(shape) - own.lead))
            if len(self._tables) == 1 and own.shape == slot.shape and self._by_element is None:
                return spread
            if number == 0:
                weights = torch.zeros(slot.rows(self._views[slot.name]).shape, dtype=torch.float64)
            prefix(weights, shape).add_(spread)
        if self._by_element is not None:
            weights = weights + slot.rows(_views(self._by_element, self._units)[slot.name])
        return weights

    def _weights_of(self, table: Units) -> dict[str, Tensor]:
        if table.digest not in self._tables:
            _check_nested(table, self._units)
            self._tables[table.digest] = table
            zeros = {x.name: torch.zeros(x.units, dtype=torch.float64) for x in table.layers}
            self._weights[table.digest] = zeros
        return self._weights[table.digest]


def _write_mean(rows: Tensor, sums: Tensor, weights: Tensor) -> None:
    """sums / weights into `rows`, some rows at a time; where nothing was counted they stay as they are."""
    weights = weights.expand(len(rows), *weights.shape[1:])
    together = max(1, BLOCK // max(1, rows[0].numel()))
    for start in range(0, len(rows), together):
        block = slice(start, start + together)
        counted = weights[block] > 0
        mean = sums[block] / weights[block]
        rows[block].copy_(mean if bool(counted.all()) else torch.where(counted, mean, rows[block].double()))


def _check_nested(narrow: Units, wide: Units) -> None:
    """Refuse a table that reaches beyond the global model before anything of it is counted."""
    for own, slot in zip(narrow.slots, wide.slots, strict=True):
        if any(size > limit for size, limit in zip(own.shape, slot.shape, strict=True)):
            raise ValueError(f"tensor {slot.name!r} of shape {own.shape} is no prefix of the global {slot.shape}")


def _views(flat: Tensor, table: Units) -> dict[str, Tensor]:
    """Return the parts of one vector, shaped as the tensors of the table."""
    parts = torch.split(flat, [slot.elements for slot in table.slots])
    return {slot.name: part.view(slot.shape) for slot, part in zip(table.slots, parts, strict=True)}
