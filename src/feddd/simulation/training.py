"""Local training of one client: the reference loop, plain autograd and a hand-written SGD step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from feddd.core.units import Params


@dataclass(frozen=True)
class Training:
    """How clients train: SGD for so many epochs, by the trainer of this name."""

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.01
    trainer: str = "reference"


@dataclass(frozen=True)
class Start:
    """A client about to train: W, its data ([samples, channels, height, width] and [samples]) and its generator."""

    before: Params
    images: Tensor
    labels: Tensor
    rng: np.random.Generator


@dataclass(frozen=True)
class Trained:
    """after: Ŵ (views of the module that trained; use them before it trains again)

    mean_loss: over all samples processed    oort_statistic: √(mean of squared sample losses)
    """

    after: dict[str, Tensor]
    mean_loss: float
    oort_statistic: float

    @classmethod
    def from_losses(cls, after: dict[str, Tensor], sample_losses: Tensor) -> Trained:
        """With the statistics of the losses of all samples processed."""
        losses = sample_losses.double()
        return cls(after, float(losses.mean()), float(losses.square().mean().sqrt()))

    @property
    def finite(self) -> bool:
        """Whether the client may be counted: loss and weights are numbers."""
        numbers = (tensor for tensor in self.after.values() if tensor.is_floating_point())
        # A float64 sum of float32 values is finite exactly when all of them are, and quicker than asking each.
        return math.isfinite(self.mean_loss) and all(
            math.isfinite(float(tensor.sum(dtype=torch.float64))) for tensor in numbers
        )


def batches(samples: int, training: Training, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Index arrays of a client's round: every epoch a new order, the last batch as short as it comes."""
    for _ in range(training.epochs):
        order = rng.permutation(samples)
        for start in range(0, samples, training.batch_size):
            yield order[start : start + training.batch_size]


def train(model: nn.Module, start: Start, training: Training) -> Trained:
    """Step 1 of a round: start from W, run the configured epochs on the client's own data."""
    model.train()
    model.load_state_dict(start.before)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sample_losses = []
    # Stochastic layers draw from torch's global generator: lend it the client's own seed and put it back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(start.rng.integers(2**63)))
        for index in batches(len(start.labels), training, start.rng):
            chosen = torch.from_numpy(index)
            losses = functional.cross_entropy(model(start.images[chosen]), start.labels[chosen], reduction="none")
            gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.add_(gradient, alpha=-training.learning_rate)
            sample_losses.append(losses.detach())
    return Trained.from_losses(model.state_dict(), torch.cat(sample_losses))


@dataclass(frozen=True)
class Evaluation:
    """Sums over test samples; they can be added. correct, total: per class."""

    loss_sum: float
    correct: NDArray[np.int64]
    total: NDArray[np.int64]

    @property
    def accuracy(self) -> float:
        """Share of samples classified rightly."""
        return float(self.correct.sum() / self.total.sum())

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss_sum / float(self.total.sum())

    @property
    def class_accuracy(self) -> NDArray[np.float64]:
        """Accuracy per class, NaN for a class without test samples."""
        return np.where(self.total > 0, self.correct / np.maximum(self.total, 1), np.nan)

    def __add__(self, other: Evaluation) -> Evaluation:
        return Evaluation(self.loss_sum + other.loss_sum, self.correct + other.correct, self.total + other.total)


@torch.no_grad()
def evaluate(model: nn.Module, params: Params, images: Tensor, labels: Tensor, classes: int) -> Evaluation:
    """The global model on some test samples."""
    model.eval()
    model.load_state_dict(params)
    logits = model(images)
    loss_sum = float(functional.cross_entropy(logits, labels, reduction="none").double().sum())
    right = logits.argmax(1) == labels
    return Evaluation(
        loss_sum,
        np.bincount(labels[right].numpy(), minlength=classes).astype(np.int64),
        np.bincount(labels.numpy(), minlength=classes).astype(np.int64),
    )
