"""What is learnt and how it is judged: a loss and a metric, both one value per sample, by name or import path.

cross-entropy   logits [batch, classes] and classes [batch], or more of both: [batch, classes, …] and [batch, …]
mse             numbers like the targets, or [batch, 1] for targets of shape [batch]
next-token      logits [batch, length, tokens] and tokens [batch, length]; −100 is padding, which nobody counts
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from feddd.errors import InputError
from feddd.world.dataset import MOST_CLASSES, NOT_COUNTED, Dataset
from feddd.world.models import import_object

LOSSES = {"cross-entropy": "accuracy", "mse": "mae", "next-token": "perplexity"}
"""Every loss by name, and the metric that goes with it unless another one is named."""
METRICS = {"accuracy": True, "perplexity": False, "mae": False, "r2": True}
"""Every metric by name, and whether higher is better."""


@dataclass(frozen=True)
class Objective:
    """A loss and a metric, by name or "package.module:function", and whether a higher metric is better."""

    loss: str = "cross-entropy"
    metric: str = "accuracy"
    higher_is_better: bool = True

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every sample, [batch]."""
        return _loss(self.loss)(outputs, targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the metric of every sample, [batch], and how much each counts; None if all count the same."""
        if self.metric == "perplexity":
            return _tokens(outputs, targets)
        if self.metric == "accuracy" and self.loss == "next-token":
            outputs = outputs.transpose(1, 2)
        return _metric(self.metric)(outputs, targets), None

    def finish(self, targets: NDArray[Any]) -> Finish:
        """Return what makes the metric out of the mean over samples with these targets."""
        if self.metric != "r2":
            return Finish(self.metric)
        numbers = targets.astype(np.float64).reshape(len(targets), -1)
        return Finish(self.metric, float(numbers.var(axis=0).mean()))

    @property
    def by_class(self) -> bool:
        """Return whether the metric can be told for every class."""
        return self.metric == "accuracy"

    def prepare(self, data: Dataset) -> Dataset:
        """Return the data set with targets as the loss takes them; targets that it cannot take are refused."""
        kind = data.train_targets.dtype.kind
        if self.loss == "mse":
            if data.class_names:
                raise InputError('the targets are names of classes; loss "mse" needs numbers')
            return data.with_targets(*(each.astype(np.float32) for each in (data.train_targets, data.test_targets)))
        if self.loss in ("cross-entropy", "next-token"):
            if kind != "i":
                raise InputError(
                    f'the targets are numbers ({data.train_targets.dtype}); loss "{self.loss}" needs whole ones'
                )
            _check_classes(data, padded=data.train_targets.ndim > 1)
        if self.loss == "next-token" and data.train_targets.ndim != 2:
            raise InputError(
                f'loss "next-token" needs targets [samples, length], not of shape {data.train_targets.shape}'
            )
        return data

    def has_classes(self, data: Dataset) -> bool:
        """Return whether every sample belongs to one class, so that clients differ in which classes they have."""
        plain = data.train_targets.ndim == 1 and data.train_targets.dtype.kind == "i"
        known = self.loss == "cross-entropy" or self.metric == "accuracy" or data.classes is not None
        return plain and known and self.loss != "mse"

    def classes(self, data: Dataset) -> int | None:
        """Return how many classes or tokens a model tells apart; None where targets are numbers."""
        if self.loss in ("cross-entropy", "next-token") or self.has_classes(data) or data.classes is not None:
            return data.class_count
        return None


@dataclass(frozen=True)
class Finish:
    """Makes the metric out of a mean over samples; variance: of the targets, for r2."""

    metric: str = "accuracy"
    variance: float = field(default=math.nan, compare=False)

    def __call__(self, mean: float) -> float:
        """Return the metric; NaN or infinity where it is not known."""
        if self.metric == "perplexity":
            return math.exp(mean) if mean < 700 else math.inf
        if self.metric == "r2":
            return 1.0 - mean / self.variance if self.variance > 0 else math.nan
        return mean


CLASSIFICATION = Objective()
"""What an experiment learns that does not say: classes, judged by the share of right ones."""
MEAN = Finish()


def make_objective(loss: str, metric: str | None = None, higher_is_better: bool | None = None) -> Objective:
    """Return the objective with what was left out; ValueError where that cannot be guessed."""
    if metric is None:
        if loss not in LOSSES:
            raise ValueError(f"a loss of your own needs a metric: {', '.join(METRICS)}, or one of your own")
        metric = LOSSES[loss]
    if loss in LOSSES and metric in METRICS and (metric in ("mae", "r2")) != (loss == "mse"):
        fitting = ("mae", "r2") if loss == "mse" else ("accuracy", "perplexity")
        raise ValueError(f"metric {metric!r} does not go with loss {loss!r}; take {' or '.join(fitting)}")
    if metric in METRICS:
        if higher_is_better not in (None, METRICS[metric]):
            raise ValueError(f"higher_is_better is {str(METRICS[metric]).lower()} for the metric {metric!r}")
        higher_is_better = METRICS[metric]
    if higher_is_better is None:
        raise ValueError("a metric of your own needs higher_is_better = true or false")
    return Objective(loss, metric, higher_is_better)


def check_fit(
    model: nn.Module, inputs: Any, targets: Tensor, objective: Objective, classes: int | None, name: str
) -> None:
    """Refuse a model whose outputs the loss cannot take, and losses and metrics that are not one value per sample.

    inputs, targets: of two samples; a single one is tried too, because a last batch may have no more
    """
    for count in (2, 1):
        few = {key: value[:count] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[:count]
        wanted = targets[:count]
        outputs = _outputs(model, few, name)
        _check_shape(outputs, wanted, objective, classes, name)
        for what, path, function in (
            ("loss", objective.loss, objective.losses),
            ("metric", objective.metric, lambda *given: objective.measure(*given)[0]),
        ):
            try:
                with torch.no_grad():
                    found = function(outputs, wanted)
            except InputError:
                raise
            except Exception as error:  # whatever a user's function raises is one line
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise InputError(f"{what} {path!r} fails on outputs of model {name!r}: {reason}") from error
            if not isinstance(found, Tensor) or found.shape != (len(wanted),) or not found.is_floating_point():
                shape = (
                    f"{found.dtype} of shape {tuple(found.shape)}"
                    if isinstance(found, Tensor)
                    else type(found).__name__
                )
                raise InputError(f"{what} {path!r} returned {shape} for {len(wanted)} samples, not one float each")
    if ":" in objective.loss:
        _check_gradient(model, inputs, targets, objective)


def _outputs(model: nn.Module, inputs: Any, name: str) -> Any:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return apply(model, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"model {name!r} cannot take inputs of shape {_shapes(inputs)}: {reason}") from error
    finally:
        model.train(training)


def apply(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs of a model that takes one input, or several by name."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _shapes(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in inputs.items())
    return str(tuple(inputs.shape[1:]))


def _check_shape(outputs: Any, targets: Tensor, objective: Objective, classes: int | None, name: str) -> None:
    """Refuse outputs that a loss by name cannot take."""
    if ":" in objective.loss:
        return
    found = tuple(outputs.shape) if isinstance(outputs, Tensor) else ()
    batch, rest = len(targets), tuple(targets.shape[1:])
    if objective.loss == "cross-entropy":
        fits, wanted, what = [(batch, classes, *rest)], (classes, *rest), "labels"
    elif objective.loss == "next-token":
        fits, wanted, what = [(batch, *rest, classes)], (*rest, classes), "tokens"
    else:
        fits, wanted, what = [(batch, *rest), *([(batch, 1)] if not rest else [])], rest or (1,), "targets"
    if found not in fits:
        shape = found[1:] if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InputError(f"model {name!r} gives outputs of shape {shape} per sample; the {what} need {wanted}")


def _check_gradient(model: nn.Module, inputs: Any, targets: Tensor, objective: Objective) -> None:
    training = model.training
    model.eval()
    with torch.enable_grad():
        learns = objective.losses(apply(model, inputs), targets).requires_grad
    model.train(training)
    if not learns:
        raise InputError(f"loss {objective.loss!r} has no gradient: it must be computed from the outputs by torch")


def _check_classes(data: Dataset, *, padded: bool) -> None:
    count = data.class_count or 0
    for part, targets in (("train", data.train_targets), ("test", data.test_targets)):
        low, high = int(targets.min()), int(targets.max())
        if low < 0 and padded:
            low = int(targets[targets != NOT_COUNTED].min(initial=0))
        if low < 0 or high >= count:
            raise InputError(
                f"{part}_targets has the class {low if low < 0 else high}; {count} classes are 0 to {count - 1}"
            )
    if count > MOST_CLASSES:
        raise InputError(
            f'the targets go up to {count - 1}: too many for classes; numbers are learnt with loss = "mse"'
        )


@functools.cache
def _loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    known = {"cross-entropy": _cross_entropy, "mse": _squared, "next-token": _next_token}
    return known[name] if name in known else import_object(name)


@functools.cache
def _metric(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    known = {"accuracy": _right, "mae": _absolute, "r2": _squared}
    return known[name] if name in known else import_object(name)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses if losses.dim() == 1 else _mean_of_counted(losses, targets)


def _next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return _mean_of_counted(_token_losses(outputs, targets), targets)


def _token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def _mean_of_counted(losses: Tensor, targets: Tensor) -> Tensor:
    """Average over what is not padding; zero for a sample that is nothing else."""
    counted = (targets != NOT_COUNTED).flatten(1).sum(1)
    return losses.flatten(1).sum(1) / counted.clamp(min=1)


def _tokens(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a sample's tokens, and how many it has."""
    last = outputs.shape[:-1] == targets.shape  # the axis of the classes is the last one, not the second
    losses = _token_losses(outputs, targets) if last else functional.cross_entropy(outputs, targets, reduction="none")
    losses, targets = losses.reshape(len(targets), -1), targets.reshape(len(targets), -1)
    return _mean_of_counted(losses, targets), (targets != NOT_COUNTED).sum(1)


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    right = outputs.argmax(1) == targets
    if right.dim() == 1:
        return right.double()
    counted = targets != NOT_COUNTED
    return (right & counted).flatten(1).sum(1).double() / counted.flatten(1).sum(1).clamp(min=1)


def _aligned(outputs: Tensor, targets: Tensor) -> Tensor:
    """Take [batch, 1] for [batch]: the difference of the two would be [batch, batch]."""
    return outputs.squeeze(-1) if outputs.dim() == targets.dim() + 1 else outputs


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (_aligned(outputs, targets) - targets).square().reshape(len(targets), -1).mean(1)


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (_aligned(outputs, targets) - targets).abs().reshape(len(targets), -1).mean(1)
