"""Stages that decide what numbers are taken to: what both ends know, and what is owed from earlier rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from feddd.core.units import Mask, Params, Units
from feddd.wire.chosen import flat, one, unflat
from feddd.wire.select import MASK, OWN, complement, split_mask
from feddd.wire.stage import At, ClientState, Each, Stage, Update

RESIDUAL = "residual"
"""What clients owe, among what they keep."""


class Deferred(Mapping[str, Tensor]):
    """Stacks that are worked out when they are asked for, and together with what is added to them if that is known."""

    @property
    def plain(self) -> Params:
        """Return the stacks themselves."""
        raise NotImplementedError

    def plus(self, base: Base) -> dict[str, Tensor]:
        """Return the stacks with what they were taken to added again."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Tensor:
        return self.plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


class Differences(Mapping[str, Tensor]):
    """Stacks less what they are taken to, worked out when they are asked for."""

    def __init__(self, after: Params, base: Base) -> None:
        self.after, self.base = after, base

    def __getitem__(self, name: str) -> Tensor:
        return self.after[name] - self.base.stack[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.base.stack)

    def __len__(self) -> int:
        return len(self.base.stack)


@dataclass(frozen=True)
class Base:
    """What differences are taken to: a model where a client was sent it in this round, the reference elsewhere."""

    model: Params
    reference: Params | None
    received: Mask | None
    table: Units

    @cached_property
    def stack(self) -> dict[str, Tensor]:
        """Return it for every client; a stack of one if all are alike."""
        stack = {slot.name: self.model[slot.name][None] for slot in self.table.slots}
        if self.received is None:
            return stack
        assert self.reference is not None
        for layer in self.table.layers:
            sent = self.received[layer.name].unsqueeze(2)
            for slot in layer.slots:
                new, old = (slot.stacked_rows(values[slot.name][None]) for values in (self.model, self.reference))
                stack[slot.name] = slot.tensors(torch.where(sent.to(new.device), new, old))
        return stack


@dataclass(frozen=True)
class Difference(Stage):
    """Send what training has changed, not what came out: against what both ends know."""

    needs_base: ClassVar[bool] = True

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Take what the client was sent away, and the reference where it was sent nothing."""
        base = Base(at.known.sent, at.known.reference, at.received, at.table)
        return dataclasses.replace(update, values=Differences(update.values, base)), states

    def decode(self, update: Update, at: At) -> Update:
        """Add the server's own values in place of what it sent."""
        base = Base(at.known.server, at.known.reference, at.received, at.table)
        if isinstance(update.values, Deferred):
            return dataclasses.replace(update, values=update.values.plus(base))
        values = {name: update.values[name] + own for name, own in base.stack.items()}
        return dataclasses.replace(update, values=values)


@dataclass(frozen=True)
class Feedback(Stage):
    """Send along later what the server did not get: what a later stage rounds away or leaves out.

    replaced: count also what a full download replaced before it was sent. Numbers had better be rounded to the nearest
    behind this stage: errors of rounding at random are larger than the numbers, and feeding them back lets them grow.
    """

    replaced: bool = False

    lasting: ClassVar[bool] = True

    def encode(self, update: Update, states: list[ClientState], at: At, each: Each) -> tuple[Update, list[ClientState]]:
        """Add what is owed."""
        owed = torch.stack([self._owed(state, place, at) for place, state in enumerate(states)])
        kept = [state | {RESIDUAL: own} for state, own in zip(states, owed, strict=True)]
        return dataclasses.replace(update, values=unflat(flat(update.values, at.table) + owed, at.table)), kept

    def _owed(self, state: ClientState, place: int, at: At) -> Tensor:
        table = at.table
        residual = state[RESIDUAL].clone() if RESIDUAL in state else torch.zeros(table.elements)
        full = at.received is None or all(bool(units[place].all()) for units in at.received.values())
        if not (self.replaced and full and at.known.replaced is not None and OWN in state) or not len(state[OWN]):
            return residual
        unsent = complement(split_mask(state[MASK], table))
        dense = one(unflat(residual[None], table), 0)
        lost = state[OWN] - table.take(at.known.replaced, unsent, fixed=False)
        table.put(dense, unsent, table.take(dense, unsent, fixed=False) + lost, fixed=False)
        return flat({name: tensor[None] for name, tensor in dense.items()}, table)[0]

    def remember(self, states: list[ClientState], owed: Update, arrived: Update, at: At) -> list[ClientState]:
        """Owe what has not arrived of the numbers that count; of the others what was owed before."""
        counted = arrived.chosen.counted(at.table)
        rest = flat(owed.values, at.table) - flat(arrived.values, at.table)
        if counted is not None:
            sent = flat(_elements(counted, at.table), at.table).bool()
            before = torch.stack([state[RESIDUAL] for state in states])
            rest = torch.where(sent, rest, before)
        return [state | {RESIDUAL: own} for state, own in zip(states, rest, strict=True)]


def _elements(counted: Any, table: Units) -> dict[str, Tensor]:
    """Return which elements count, as stacks of their own shapes; counted: masks of units, or of elements."""
    if set(counted) == {slot.name for slot in table.slots}:
        return dict(counted)
    clients = len(next(iter(counted.values())))
    found = {slot.name: torch.zeros(clients, *slot.shape) for slot in table.fixed}
    for layer in table.layers:
        for slot in layer.slots:
            each = slot.elements // layer.units
            found[slot.name] = slot.tensors(counted[layer.name].unsqueeze(2).expand(-1, -1, each).contiguous().float())
    return found
