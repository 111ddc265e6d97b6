"""Which trainer a model gets: a static rule, so that the same experiment always gives the same bits.

- "stacked": chains of small convolutions and linear layers, several clients at once;
- "channels_last": other models with two-dimensional convolutions, one client at a time, pixels' channels together;
- "reference": every other model, one client at a time. It is also the oracle that the others are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import nn

from feddd.simulation.stacked import Chain, chain, train_stacked
from feddd.simulation.training import Start, Trained, Training, train

Train = Callable[[Iterable[Start], Training], Iterator[tuple[Start, Trained]]]

STACK = 10
"""Clients in one stack: more did not pay, and every one costs memory for its parameters and activations."""
SMALL = 200_000
"""Models with more parameters keep a core busy alone; stacking them was slower (CNN2, 587,194)."""


def choose_trainer(model: nn.Module) -> str:
    """The trainer for this model; it depends on nothing but the model's layers."""
    if chain(model) is not None and sum(parameter.numel() for parameter in model.parameters()) <= SMALL:
        return "stacked"
    return "channels_last" if any(isinstance(layer, nn.Conv2d) for layer in model.modules()) else "reference"


def make_trainer(model: nn.Module, name: str) -> Train:
    """The function that trains clients from W to Ŵ, in the order given."""
    if name == "stacked":
        network = chain(model)
        if network is None:
            raise ValueError('trainer "stacked" does not fit this model; use "reference"')
        return partial(_in_stacks, network)
    if name == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs do not know it
        return partial(_channels_last, model)
    return partial(_one_by_one, model)


def _one_by_one(model: nn.Module, starts: Iterable[Start], training: Training) -> Iterator[tuple[Start, Trained]]:
    for start in starts:
        yield start, train(model, start, training)


def _channels_last(model: nn.Module, starts: Iterable[Start], training: Training) -> Iterator[tuple[Start, Trained]]:
    for start in starts:
        images = start.images.contiguous(memory_format=torch.channels_last)
        yield start, train(model, replace(start, images=images), training)


def _in_stacks(network: Chain, starts: Iterable[Start], training: Training) -> Iterator[tuple[Start, Trained]]:
    remaining = iter(starts)
    while stack := list(islice(remaining, STACK)):
        yield from zip(stack, train_stacked(network, stack, training), strict=True)
