"""Which trainer a model gets: a static rule, so that the same experiment always gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor, nn

from feddd.core.units import Params
from feddd.simulation.dense import dense_chain, train_dense
from feddd.simulation.training import Trained, Training, train

Train = Callable[[Params, Tensor, Tensor, Training, np.random.Generator], Trained]

TRAINERS = ("reference", "dense")


def choose_trainer(model: nn.Module) -> str:
    """ "dense" for chains of linear layers, "reference" for everything else."""
    return "reference" if dense_chain(model) is None else "dense"


def make_trainer(model: nn.Module, name: str) -> Train:
    """The function that trains one client from W to Ŵ."""
    if name == "reference":
        return partial(train, model)
    layers = dense_chain(model)
    if name != "dense" or layers is None:
        raise ValueError(f'trainer {name!r} does not fit this model; use "reference"')
    return partial(train_dense, layers)
