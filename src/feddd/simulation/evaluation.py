"""Testing a model: the loss and the metric over samples, in chunks whose sums can be added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.units import Params
from feddd.simulation.training import Floats, Samples
from feddd.world.objectives import CLASSIFICATION, MEAN, Finish, Objective, apply

TEST_CHUNK = 200
"""Samples that go through the model at once in a test: with more their activations leave the cache."""


@dataclass(frozen=True)
class Evaluation:
    """Sums over samples; they can be added.

    weight: what the metric's sum is divided by    correct, total: per class, empty where the metric has none
    """

    loss_sum: float
    samples: int
    metric_sum: float
    weight: float
    correct: NDArray[np.int64]
    total: NDArray[np.int64]
    finish: Finish = MEAN

    @property
    def metric(self) -> float:
        """Return the metric over all samples."""
        return self.finish(self.metric_sum / self.weight) if self.weight else math.nan

    @property
    def accuracy(self) -> float | None:
        """Return the share of samples classified rightly; None where the metric is another."""
        return self.metric if self.finish.metric == "accuracy" else None

    @property
    def loss(self) -> float:
        """Return the mean loss."""
        return self.loss_sum / self.samples

    @property
    def class_accuracy(self) -> Floats:
        """Return accuracy per class, NaN for a class without test samples."""
        return np.where(self.total > 0, self.correct / np.maximum(self.total, 1), np.nan)

    def __add__(self, other: Evaluation) -> Evaluation:
        return Evaluation(
            self.loss_sum + other.loss_sum,
            self.samples + other.samples,
            self.metric_sum + other.metric_sum,
            self.weight + other.weight,
            self.correct + other.correct,
            self.total + other.total,
            self.finish,
        )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    params: Params,
    inputs: Any,
    targets: Tensor,
    classes: int | None,
    objective: Objective | None = None,
    finish: Finish | None = None,
) -> Evaluation:
    """Test the global model on some samples; finish: what makes the metric out of a mean, see `Objective.finish`."""
    objective = objective or CLASSIFICATION
    model.eval()
    model.load_state_dict(params)
    outputs = apply(model, inputs)
    loss_sum = float(objective.losses(outputs, targets).double().sum())
    values, weights = objective.measure(outputs, targets)
    metric_sum = float((values if weights is None else values * weights).double().sum())
    weight = float(len(targets) if weights is None else weights.sum())
    by_class = classes if objective.by_class and targets.dim() == 1 and classes else 0
    labels = targets.cpu().numpy() if by_class else np.empty(0, np.int64)
    right = values.cpu().numpy() > 0.5 if by_class else np.empty(0, np.bool_)
    return Evaluation(
        loss_sum,
        len(targets),
        metric_sum,
        weight,
        np.bincount(labels[right], minlength=by_class).astype(np.int64),
        np.bincount(labels, minlength=by_class).astype(np.int64),
        finish or objective.finish(targets.cpu().numpy()),
    )


Bounds = Mapping[int, tuple[int, int]]
"""By number, where neighbouring samples begin and end."""


def evaluate_chunks(
    model: nn.Module,
    params: Params,
    samples: Samples,
    chunks: Bounds,
    classes: int | None,
    finish: Finish | None = None,
) -> dict[int, Evaluation]:
    """Test the global model on chunks of samples; finish: None for that of all samples."""
    finish = finish or samples.objective.finish(samples.targets.cpu().numpy())
    return {
        chunk: evaluate(
            *(model, params, samples.between(start, end), samples.targets[start:end]),
            classes,
            samples.objective,
            finish,
        )
        for chunk, (start, end) in chunks.items()
    }


def evaluate_each(
    model: nn.Module, params: Params, samples: Samples, clients: Bounds, classes: int | None
) -> dict[int, float]:
    """Return the global model's metric on each client's own samples; clients: where their samples lie."""
    found = {}
    for client, (first, end) in clients.items():
        finish = samples.objective.finish(samples.targets[first:end].cpu().numpy())
        chunks = {at: (at, min(at + TEST_CHUNK, end)) for at in range(first, end, TEST_CHUNK)}
        head, *rest = evaluate_chunks(model, params, samples, chunks, classes, finish).values()
        found[client] = sum(rest, start=head).metric
    return found
